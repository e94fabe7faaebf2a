"""MessageLayout: tensors of mixed dtypes and widths, packed in one byte row for each token and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rocm_dp.errors import TensorError
from rocm_dp.messages import MessageLayout
from rocm_dp.reference import same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]
UNTOUCHED = 0xAB

Fields = list[tuple[int, torch.dtype]]


def filled(rows: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits, NaNs of any payload among them."""
    made = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (rows, width), generator=made).bool()
    nbytes = (rows, width * dtype.itemsize)
    return torch.randint(0, 256, nbytes, generator=made, dtype=torch.uint8).view(dtype)


def packed_and_tensors(fields: Fields, rows: int) -> tuple[MessageLayout, torch.Tensor, list[torch.Tensor]]:
    layout = MessageLayout(fields)
    packed = torch.full((rows, layout.row_bytes), UNTOUCHED, dtype=torch.uint8)
    tensors = [filled(rows, width, dtype, seed) for seed, (width, dtype) in enumerate(fields)]
    layout.pack(packed, tensors)
    return layout, packed, tensors


def any_fields(test: Callable[[Fields, int], None]) -> Callable[[], None]:
    # As MoE layers send them: fp8 hidden, top-6 ids, weights, one scale.
    moe: Fields = [(7168, torch.float8_e4m3fn), (6, torch.int32), (6, torch.float32), (1, torch.float32)]
    field = st.tuples(st.integers(1, 40), st.sampled_from(DTYPES))
    drawn = given(fields=st.lists(field, min_size=1, max_size=6), rows=st.integers(0, 5))
    one_byte: Fields = [(1, torch.bool)]
    examples = example(fields=moe, rows=3)(example(fields=one_byte, rows=0)(test))
    return settings(max_examples=80, deadline=None)(drawn(examples))


@any_fields
def test_unpack_undoes_pack(fields: Fields, rows: int) -> None:
    layout, packed, tensors = packed_and_tensors(fields, rows)
    out = [torch.zeros_like(tensor) for tensor in tensors]
    layout.unpack(out, packed)
    for got, tensor in zip(out, tensors, strict=True):
        assert same_bits(got, tensor)


@any_fields
def test_every_field_starts_at_the_next_multiple_of_16_bytes_and_the_gaps_stay_untouched(
    fields: Fields, rows: int
) -> None:
    layout, packed, tensors = packed_and_tensors(fields, rows)
    expected = torch.full_like(packed, UNTOUCHED)
    start = 0
    for tensor, (width, dtype) in zip(tensors, fields, strict=True):
        nbytes = width * dtype.itemsize
        expected[:, start : start + nbytes] = tensor.view(torch.uint8)
        start = (start + nbytes + 15) // 16 * 16
    assert layout.row_bytes == start
    assert same_bits(packed, expected)


@any_fields
def test_rows_may_be_unpacked_in_another_order_than_packed(fields: Fields, rows: int) -> None:
    layout, packed, tensors = packed_and_tensors(fields, rows)
    out = [torch.zeros_like(tensor) for tensor in tensors]
    layout.unpack(out, packed.flip(0))
    for got, tensor in zip(out, tensors, strict=True):
        assert same_bits(got, tensor.view(torch.uint8).flip(0).view(tensor.dtype))


@pytest.mark.parametrize(
    ("fields", "row_bytes"),
    [
        ([(1, torch.bool)], 16),
        ([(16, torch.uint8)], 16),
        ([(17, torch.uint8)], 32),
        ([(3, torch.bfloat16), (2, torch.int64)], 32),
        ([(7168, torch.bfloat16), (6, torch.int64), (6, torch.float32)], 14336 + 48 + 32),
    ],
)
def test_a_row_takes_the_bytes_of_its_fields_rounded_up(fields: Fields, row_bytes: int) -> None:
    assert MessageLayout(fields).row_bytes == row_bytes


def test_a_message_needs_at_least_one_tensor() -> None:
    with pytest.raises(TensorError, match=r"^gather_many needs at least one tensor, got none$"):
        MessageLayout([])


@pytest.mark.parametrize("width", [0, -1])
def test_a_field_without_columns_is_refused(width: int) -> None:
    with pytest.raises(
        TensorError, match=f"^every tensor of gather_many needs a width of at least 1, got {width}$"
    ):
        MessageLayout([(4, torch.int32), (width, torch.bfloat16)])


def test_another_number_of_tensors_than_fields_is_refused() -> None:
    layout = MessageLayout([(4, torch.int32), (1, torch.bool)])
    packed = torch.zeros(2, layout.row_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="zip"):
        layout.pack(packed, [torch.zeros(2, 4, dtype=torch.int32)])
    with pytest.raises(ValueError, match="zip"):
        layout.unpack([torch.zeros(2, 4, dtype=torch.int32)], packed)
