"""The oracle itself, against examples small enough to write out by hand, and against planted errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_dp.errors import ConfigError
from rocm_dp.plan import PaddingMode, TokenPlan
from rocm_dp.reference import combine, gather, gather_many, same_bits, scatter, sum_error

ANY = settings(max_examples=60, deadline=None)
FLOATS = [torch.bfloat16, torch.float16, torch.float32]


def rows(*values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).reshape(len(values), -1)


def none(width: int) -> torch.Tensor:
    return torch.empty(0, width)


PADDED = TokenPlan((2, 0, 1), PaddingMode.MAX_LEN)
PACKED = TokenPlan((2, 0, 1), PaddingMode.SUM_LEN)


def test_gather_packs_the_rows_of_the_dp_ranks() -> None:
    got = gather([rows([1, 2], [3, 4]), none(2), rows([5, 6])], PACKED)
    assert same_bits(got, rows([1, 2], [3, 4], [5, 6]))


def test_gather_fills_padding_rows_with_zeros() -> None:
    got = gather([rows([1, 2], [3, 4]), none(2), rows([5, 6])], PADDED)
    assert same_bits(got, rows([1, 2], [3, 4], [0, 0], [0, 0], [5, 6], [0, 0]))


def test_gather_rounds_each_rank_up_to_align() -> None:
    plan = TokenPlan((1, 3), PaddingMode.SUM_LEN, align=2)
    got = gather([rows([1]), rows([2], [3], [4])], plan)
    assert same_bits(got, rows([1], [0], [2], [3], [4], [0]))


def test_gather_takes_replicated_rows_once() -> None:
    plan = TokenPlan((1, 1), PaddingMode.SUM_LEN)
    got = gather([rows([1]), rows([1]), rows([2]), rows([2])], plan)
    assert same_bits(got, rows([1], [2]))


def test_gather_sums_partial_rows_over_attention_tp() -> None:
    plan = TokenPlan((1, 1), PaddingMode.SUM_LEN)
    got = gather([rows([1]), rows([10]), rows([2]), rows([20])], plan, partial_over=2)
    assert same_bits(got, rows([11], [22]))


def test_gather_of_partial_rows_sums_over_one_tp_group_and_not_over_cp() -> None:
    # One dp rank of cp 2 * tp 2: both tp groups hold addends of the same row.
    plan = TokenPlan((1,), PaddingMode.SUM_LEN)
    got = gather([rows([1]), rows([10]), rows([4]), rows([7])], plan, partial_over=2)
    assert same_bits(got, rows([11]))


def test_gather_moves_any_dtype() -> None:
    for dtype in (torch.float8_e4m3fn, torch.int64, torch.bool):
        got = gather([rows([1, 0], dtype=dtype), rows([0, 1], dtype=dtype)], TokenPlan((1, 1), PaddingMode.SUM_LEN))
        assert same_bits(got, rows([1, 0], [0, 1], dtype=dtype))


def test_gather_of_a_step_where_all_are_idle_is_empty() -> None:
    got = gather([none(3), none(3)], TokenPlan((0, 0), PaddingMode.MAX_LEN))
    assert got.shape == (0, 3)


@pytest.mark.parametrize("odd", [2, 3])
def test_replicas_that_differ_in_one_bit_have_no_right_result(odd: int) -> None:
    locals_ = [rows([1]), rows([1]), rows([0.0]), rows([0.0])]
    locals_[odd] = rows([-0.0])
    with pytest.raises(ConfigError, match=r"^the ranks of dp rank 1 hold different rows$"):
        gather(locals_, TokenPlan((1, 1), PaddingMode.SUM_LEN))


def test_replicas_that_differ_in_shape_have_no_right_result() -> None:
    with pytest.raises(ConfigError, match="dp rank 0"):
        gather([rows([1], [1]), rows([1])], TokenPlan((2,), PaddingMode.SUM_LEN))


def test_gather_many_gathers_each_tensor_by_itself() -> None:
    hidden, ids = gather_many(
        [
            [rows([1, 2], [3, 4]), rows([7], [8], dtype=torch.int64)],
            [none(2), torch.empty(0, 1, dtype=torch.int64)],
            [rows([5, 6]), rows([9], dtype=torch.int64)],
        ],
        PACKED,
    )
    assert same_bits(hidden, rows([1, 2], [3, 4], [5, 6]))
    assert same_bits(ids, rows([7], [8], [9], dtype=torch.int64))


def test_combine_sums_over_all_ranks_and_gives_each_dp_rank_its_real_rows() -> None:
    first = rows([1], [2], [91], [92], [3], [93])
    second = rows([10], [20], [94], [95], [30], [96])
    got = combine([first, second, torch.zeros(6, 1)], PADDED)
    assert [part.tolist() for part in got] == [[[11], [22]], [], [[33]]]


def test_combine_rounds_once() -> None:
    # In bfloat16, 256 + 1 is 256: one addend after the other would never leave 256.
    partials = [rows([value], dtype=torch.bfloat16) for value in (256, 1, 1, 1, 1)]
    (got,) = combine(partials, TokenPlan((1,), PaddingMode.SUM_LEN))
    assert same_bits(got, rows([260], dtype=torch.bfloat16))


def test_scatter_gives_each_dp_rank_its_real_rows() -> None:
    full = rows([1], [2], [91], [92], [3], [93])
    assert [part.tolist() for part in scatter(full, PADDED)] == [[[1], [2]], [], [[3]]]


@ANY
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    padding=st.sampled_from(PaddingMode),
    align=st.integers(1, 4),
)
def test_scatter_undoes_gather(counts: list[int], padding: PaddingMode, align: int) -> None:
    plan = TokenPlan(tuple(counts), padding, align=align)
    locals_ = [torch.randint(0, 2**31, (count, 3)) for count in counts]
    for got, local in zip(scatter(gather(locals_, plan), plan), locals_, strict=True):
        assert same_bits(got, local)


def addends(seed: int, number: int, dtype: torch.dtype, *, low: float = -2.0) -> list[torch.Tensor]:
    """``number`` addends between ``low`` and 2 that ``dtype`` holds exactly."""
    made = torch.Generator().manual_seed(seed)
    drawn = torch.rand(number, 4, 16, generator=made, dtype=torch.float64) * (2 - low) + low
    return list(drawn.to(dtype))


def exact(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([part.double() for part in parts]).sum(0)


SEED, NUMBER, DTYPE = st.integers(0, 2**32), st.integers(1, 8), st.sampled_from(FLOATS)


@ANY
@given(seed=SEED, number=NUMBER, dtype=DTYPE)
def test_a_sum_that_is_rounded_once_is_right(seed: int, number: int, dtype: torch.dtype) -> None:
    parts = addends(seed, number, dtype)
    assert sum_error(exact(parts).to(dtype), parts) <= 1


@ANY
@given(seed=SEED, number=NUMBER, dtype=DTYPE, order=st.randoms(use_true_random=False))
def test_a_sum_that_is_rounded_at_every_step_is_right_in_any_order(
    seed: int, number: int, dtype: torch.dtype, order: Any
) -> None:
    parts = addends(seed, number, dtype)
    shuffled = list(parts)
    order.shuffle(shuffled)
    total = shuffled[0].clone()
    for part in shuffled[1:]:
        total += part
    assert sum_error(total, parts) <= 1


@ANY
@given(seed=SEED, number=NUMBER, dtype=DTYPE, data=st.data())
def test_a_sum_that_lacks_one_addend_is_wrong(
    seed: int, number: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    parts = addends(seed, number, dtype, low=1.0)
    missing = data.draw(st.integers(0, number - 1))
    lacking = torch.stack([part.double() for part in parts]).sum(0) - parts[missing].double()
    assert sum_error(lacking.to(dtype), parts) > 1


@ANY
@given(seed=SEED, number=NUMBER, dtype=DTYPE, data=st.data())
def test_a_sum_that_counts_one_addend_twice_is_wrong(
    seed: int, number: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    parts = addends(seed, number, dtype, low=1.0)
    twice = data.draw(st.integers(0, number - 1))
    assert sum_error((exact(parts) + parts[twice].double()).to(dtype), parts) > 1


@ANY
@given(seed=SEED, number=NUMBER, dtype=DTYPE, data=st.data())
def test_one_element_off_by_more_last_places_than_there_are_addends_is_wrong(
    seed: int, number: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    # Of one sign: n roundings, each of half a last place, of a sum up to twice the power of 2 that sets the place.
    parts = addends(seed, number, dtype, low=1.0)
    got = exact(parts).to(dtype)
    row, column = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 15))
    bits = got.view(torch.int32 if dtype is torch.float32 else torch.int16)
    bits[row, column] += number + 1
    assert sum_error(got, parts) > 1


def test_a_bfloat16_sum_of_two_off_by_three_last_places_is_wrong_and_off_by_none_is_right() -> None:
    parts = [rows([1.0], dtype=torch.bfloat16), rows([2.0], dtype=torch.bfloat16)]
    place = 2.0**-6  # of bfloat16 between 2 and 4
    assert sum_error(rows([3.0], dtype=torch.bfloat16), parts) == 0
    assert sum_error(rows([3.0 + 3 * place], dtype=torch.bfloat16), parts) == pytest.approx(2, rel=1e-6)


def test_the_copy_of_a_single_addend_must_be_exact_to_half_a_last_place() -> None:
    part = rows([1.0], dtype=torch.bfloat16)
    assert sum_error(part.clone(), [part]) == 0
    assert sum_error(rows([1.0 + 2.0**-7], dtype=torch.bfloat16), [part]) > 1


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
def test_nan_or_infinity_in_one_element_is_an_infinite_error(dtype: torch.dtype, bad: float) -> None:
    parts = addends(7, 3, dtype)
    got = exact(parts).to(dtype)
    got[2, 5] = bad
    assert sum_error(got, parts) == math.inf


def test_an_empty_sum_has_no_error() -> None:
    assert sum_error(none(4), [none(4), none(4)]) == 0


def nan(payload: int) -> torch.Tensor:
    return torch.tensor([[payload]], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (rows([0.0]), rows([-0.0])),
        (nan(0x7FC00000), nan(0x7FC00001)),
        (torch.ones(1, 4, dtype=torch.int32), torch.ones(1, 4, dtype=torch.int32).view(torch.float32)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(0, 3), torch.zeros(0, 4)),
        (torch.zeros(2, 3), torch.zeros(2, 4)[:, :2]),
        (rows([1.0, 2.0]), rows([2.0, 1.0])),
    ],
    ids=["sign of zero", "NaN payload", "dtype", "shape", "empty shape", "narrow", "order"],
)
def test_tensors_that_differ_are_told_apart(a: torch.Tensor, b: torch.Tensor) -> None:
    assert not same_bits(a, b)
    assert not same_bits(b, a)


@pytest.mark.parametrize(
    "tensor",
    [
        nan(0x7FC00001),
        rows([-0.0, math.inf]),
        none(3),
        torch.zeros(3, 0),
        rows([1, 0], dtype=torch.bool),
        rows([1, -2], dtype=torch.float8_e4m3fn),
    ],
    ids=["NaN", "-0.0 and inf", "no rows", "no columns", "bool", "fp8"],
)
def test_a_copy_has_the_same_bits(tensor: torch.Tensor) -> None:
    assert same_bits(tensor, tensor.clone())


def test_another_shape_is_an_infinite_error_and_an_overflow_is_right_where_the_sum_overflows() -> None:
    assert sum_error(torch.zeros(0, 3), [torch.ones(2, 3)] * 2) == float("inf")
    assert sum_error(torch.zeros(1, 3), [torch.ones(2, 3)] * 2) == float("inf")
    large = torch.full((2, 3), 40000.0, dtype=torch.float16)
    assert sum_error(torch.full((2, 3), float("inf"), dtype=torch.float16), [large, large]) == 0
    assert sum_error(torch.full((2, 3), 65504.0, dtype=torch.float16), [large, large]) > 1


def test_one_value_is_compared_whatever_its_stride_says() -> None:
    one = torch.arange(8.0)[::4][:1]
    assert same_bits(one, one.clone())
    assert not same_bits(one, one + 1)
