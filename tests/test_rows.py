"""Rows are moved as defined and nothing else is touched, by the interpreted kernels and by plain torch alike."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import row_cases
import torch
from rocm_dp.kernels import rows, rows_torch
from row_cases import Move, check_move

from rocm_dp.testing import RankPool

if TYPE_CHECKING:
    from collections.abc import Iterator


TWO = torch.zeros(2, dtype=torch.int64)
NUMBERS = torch.zeros(5, dtype=torch.int32)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[RankPool]:
    """A process in which Triton interprets its kernels."""
    with patch.dict(os.environ, {"TRITON_INTERPRET": "1"}), RankPool(1, backend="gloo", timeout=280.0) as pool:
        yield pool


def interpreted(rank: int, case: str) -> object:
    if row_cases.which_code_runs() != "triton":
        return "the kernels are not interpreted"
    if case == "matrix":
        return row_cases.matrix("cpu")
    row_cases.any_move("cpu", 60)
    return None


def test_the_kernels_move_rows_of_any_dtype_width_and_alignment_and_touch_no_guard(interpreter: RankPool) -> None:
    assert interpreter.run(interpreted, "matrix") == [row_cases.matrix("cpu")]


def test_the_kernels_move_whatever_they_are_told(interpreter: RankPool) -> None:
    assert interpreter.run(interpreted, "any") == [None]


def test_plain_torch_moves_whatever_it_is_told() -> None:
    assert row_cases.which_code_runs() == "torch"
    row_cases.any_move("cpu", 60)


def test_host_ints_do_for_start_and_count() -> None:
    dst = torch.full((6, 2), 7.0)
    rows.place_rows(dst, torch.ones(2, 2), start=3, count=2)
    assert dst[:, 0].tolist() == [0, 0, 0, 1, 1, 0]


def test_a_status_is_asked_later_and_cleared_by_the_answer() -> None:
    status = rows.new_status("cpu")
    dst, src = torch.zeros(4, 2), torch.ones(4, 2)
    rows.write_rows(dst, src, start=2, count=4, status=status)
    rows.write_rows(dst, src, start=0, count=1, status=status)
    with pytest.raises(IndexError, match="start 2, count 4"):
        rows.check_status(status)
    rows.check_status(status)


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda d, s: rows.write_rows(d, s[:, :2], start=0, count=1), ValueError, "contiguous"),
        (lambda d, s: rows.write_rows(d, s.double(), start=0, count=1), ValueError, "rows must be alike"),
        (lambda d, s: rows.write_rows(d, s[:, :2].clone(), start=0, count=1), ValueError, "rows must be alike"),
        (lambda d, s: rows.write_rows(d, s, start=TWO, count=TWO[0]), ValueError, "start must be 1 int32 or int64"),
        (lambda d, s: rows.write_rows(d, s, start=torch.tensor(1.0), count=torch.tensor(1)), ValueError, "float32"),
        (lambda d, s: rows.write_rows(d, s, start=0, count=torch.tensor(1)), TypeError, "both"),
        (lambda d, s: rows.compact_rows(d, s, counts=torch.tensor([1, 1, 1])), ValueError, "3 ranks, got 4"),
        (lambda d, s: rows.expand_rows(d, s, counts=torch.tensor([1, 1, 1])), ValueError, "3 ranks, got 4"),
        (lambda d, s: rows.compact_rows(d, s, counts=torch.tensor([1, 1]), align=0), ValueError, "align"),
        (lambda d, s: rows.compact_rows(d, s, counts=torch.tensor([1, 1]), align=2**62), ValueError, "align"),
        (
            lambda d, s: rows.compact_rows(d, s, counts=torch.ones(2, 3, dtype=torch.int64)[:, 0]),
            ValueError,
            "strides",
        ),
        (lambda d, s: rows.write_rows(d, s, start=True, count=1), ValueError, "got True"),
        (lambda d, s: rows.write_rows(d, s, start=2**63, count=1), ValueError, "int of 64 bits"),
        (lambda d, s: rows.write_rows(d, s, start=0, count=1, status=torch.zeros(3)), ValueError, "new_status"),
        (lambda d, s: rows.write_rows(d, s, start=0, count=1, status=NUMBERS[2:]), ValueError, "new_status"),
        (lambda d, s: rows.write_rows(d, d[1:], start=0, count=1), ValueError, "overlap"),
    ],
)
def test_wrong_arguments_name_both_sides(call: object, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        call(torch.zeros(4, 3), torch.zeros(4, 3))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("row_bytes", "pointers", "vec_bytes"),
    [
        (14336, (0, 512), 16),
        (24, (0, 512), 8),
        (8, (0, 512), 8),
        (12, (0, 512), 4),
        (64002, (0, 512), 2),
        (7, (0, 512), 1),
        (14336, (0, 8), 8),
        (14336, (2, 512), 2),
    ],
)
def test_accesses_are_as_wide_as_rows_and_pointers_allow(
    row_bytes: int, pointers: tuple[int, int], vec_bytes: int
) -> None:
    shape = rows.shape_for(row_bytes, *pointers)
    assert shape.vec_bytes == vec_bytes
    assert shape.block * shape.dtype.itemsize <= 4096


def test_a_grid_is_never_empty_and_never_too_large() -> None:
    shape = rows.shape_for(1)
    assert rows._blocks(0, shape) == 1
    assert rows._blocks(2**50, shape) == 65535


def test_a_move_that_misses_by_one_row_or_leaves_a_row_unwritten_is_seen() -> None:
    """The checks of this file fail when the code is broken."""
    honest = rows_torch.move_rows

    def shifted(dst: torch.Tensor, src: torch.Tensor, start: int, count: int, status: object, **how: bool) -> None:
        honest(dst, src, int(start) + 1, count, None, **how)

    def lazy(dst: torch.Tensor, src: torch.Tensor, start: int, count: int, status: object, **how: bool) -> None:
        honest(dst, src, start, count, None, **{**how, "fill": False})

    for broken, verb in ((shifted, "write_rows"), (lazy, "place_rows"), (lazy, "read_rows")):
        with patch.object(rows_torch, "move_rows", broken), pytest.raises(AssertionError, match="rows differ"):
            check_move(Move(verb, 4, 9, 2, 3) if verb != "read_rows" else Move(verb, 9, 4, 2, 3), "cpu")
