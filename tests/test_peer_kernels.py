"""The peer kernels, interpreted, across real processes: counts on the device, one wait a call, two slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import peer_kernel_cases as cases
import pytest
import torch
from exchange_cases import Grid

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.testing import RankPool

    Interpreted = Callable[[int], RankPool]

# Interpreted ranks take seconds to start: the other worlds with -m soak.
ALL = [
    *(
        Grid(2, 2),
        Grid(2, 1),
        Grid(3, 3),
        Grid(4, 2),
        Grid(4, 4),
        Grid(4, 1, 2),
        Grid(5, 5),
        Grid(6, 3),
        Grid(6, 1, 3),
    ),
    *(Grid(7, 7), Grid(8, 4), Grid(8, 8), Grid(8, 2, 2)),
]


def grids(*always: Grid) -> list[object]:
    """All grids, those that are not in ``always`` with -m soak."""
    return [grid if grid in always else pytest.param(grid, marks=pytest.mark.soak) for grid in ALL]


@pytest.mark.parametrize("grid", grids(Grid(2, 2), Grid(3, 3)), ids=str)
def test_rows_of_any_dtype_and_width_are_gathered_bit_for_bit_under_one_wait(
    interpreted: Interpreted, grid: Grid
) -> None:
    steps = 4
    for wrong, epochs in interpreted(grid.world).run(cases.gathers, grid, steps):
        assert wrong == 0
        # Four fields took no more epochs than one: a call has one wait.
        assert epochs == [steps, 1, 1, 1, 1]


@pytest.mark.parametrize("grid", grids(Grid(2, 1), Grid(3, 3)), ids=str)
def test_sums_are_made_in_float32_in_rank_order_and_shares_brought_together(
    interpreted: Interpreted, grid: Grid
) -> None:
    pool = interpreted(grid.world)
    assert pool.run(cases.combines, grid, 12, torch.float32, 4) == [0] * grid.world
    if grid.world == 3:
        for dtype in (torch.bfloat16, torch.float16):
            assert pool.run(cases.combines, grid, 7, dtype, 3) == [0] * grid.world


@pytest.mark.parametrize(
    "grid",
    [Grid(2, 1), *(pytest.param(grid, marks=pytest.mark.soak) for grid in (Grid(4, 2), Grid(8, 2, 2)))],
    ids=str,
)
def test_addends_of_attention_tp_are_summed_before_they_are_gathered(interpreted: Interpreted, grid: Grid) -> None:
    assert interpreted(grid.world).run(cases.partial_gathers, grid, 4) == [0] * grid.world


@pytest.mark.parametrize("grid", grids(Grid(2, 2), Grid(2, 1)), ids=str)
def test_one_launch_serves_all_counts_that_lie_on_the_device(interpreted: Interpreted, grid: Grid) -> None:
    assert interpreted(grid.world).run(cases.counts_on_the_device, grid, 3) == [0] * grid.world


@pytest.mark.soak
def test_eight_ranks_are_served(interpreted: Interpreted) -> None:
    assert interpreted(8).run(cases.counts_on_the_device, Grid(8, 4), 1) == [0] * 8


def test_a_slow_rank_reads_what_is_its_own_and_without_the_wait_or_the_second_slot_it_does_not(
    interpreted: Interpreted,
) -> None:
    pool, steps = interpreted(3), 6
    assert pool.run(cases.with_a_slow_rank, 3, cases.LONG, 2, steps) == [0, 0, 0]
    assert sum(pool.run(cases.with_a_slow_rank, 3, 1e-6, 2, steps)) > 0
    assert sum(pool.run(cases.with_a_slow_rank, 3, cases.LONG, 1, steps)) > 0


def test_a_slot_that_is_used_twice_in_a_row_is_written_only_when_all_have_read_it(interpreted: Interpreted) -> None:
    steps = 6
    # Each call but the first has a second wait, at its entry.
    assert interpreted(3).run(cases.same_slot_again, 3, steps) == [(0, 2 * steps - 1)] * 3


def test_epochs_count_on_beyond_32_bits(interpreted: Interpreted) -> None:
    assert interpreted(2).run(cases.epochs_far_on, 2, 4) == [0, 0]


def test_a_rank_that_never_calls_is_named_and_nobody_waits_for_ever(interpreted: Interpreted) -> None:
    first, absent, last = interpreted(3).run(cases.one_rank_never_calls, 3)
    for late, what, spoilt, seconds in (first, last):
        assert late
        assert what == (("gather", 0), 2, (1,))
        assert spoilt, "what did not come must read NaN"
        # One wait of a second by its own clock, not one for each of the 21 calls.
        assert seconds < 10
    assert absent[:2] == (False, None)


@pytest.mark.parametrize("parts", range(1, 9))
def test_shares_are_cut_as_everywhere_else(parts: int) -> None:
    assert all(cases.shares_are_cut_alike(rows, parts) for rows in range(50))
