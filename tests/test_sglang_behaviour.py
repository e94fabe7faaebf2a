"""SGLang's layer on ranks, against an oracle written from its description."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
import sglang_cases
import torch
from exchange_cases import Grid

from rocm_dp.integrations.sglang import DpPaddingMode
from rocm_dp.integrations.sglang.moves import _as_ints

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.testing import RankPool

    Ranks = Callable[[int], RankPool]

# (dp, cp) of 4 ranks, and one of 8 with all three above 1.
GRIDS = [
    *(Grid(4, 4), Grid(4, 2), Grid(4, 1), Grid(4, 2, 2), Grid(4, 1, 2), Grid(4, 1, 4)),
    pytest.param(Grid(8, 2, 2), marks=pytest.mark.soak),
]


@pytest.mark.parametrize("grid", [Grid(4, 4), Grid(4, 2), Grid(8, 2), Grid(4, 1)], ids=str)
def test_both_algorithms_of_the_description_agree_on_equal_blocks(grid: Grid) -> None:
    steps = [step for step in sglang_cases.random_steps(grid, 3, 60) if step.mode is DpPaddingMode.MAX_LEN]
    assert len(steps) > 5
    for step in steps:
        for partial in (False, True):
            one, other = (oracle(step, partial=partial) for oracle in (sglang_cases.gathered, sglang_cases.stacked))
            assert one.equal(other), step


@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: f"world{g.world}-dp{g.dp}-cp{g.cp}")
@pytest.mark.parametrize("max_rows", [None, 20], ids=["growing", "larger steps than there is room for"])
def test_random_steps_equal_the_description(ranks: Ranks, grid: Grid, max_rows: int | None) -> None:
    number = 12
    done = ranks(grid.world).run(sglang_cases.random_layouts, grid, 7 * grid.dp + grid.cp, number, max_rows)
    assert done == [number] * grid.world


@pytest.mark.parametrize("grid", [Grid(4, 4), Grid(4, 2), Grid(4, 2, 2)], ids=str)
def test_rows_of_any_shape_and_dtype_are_moved_and_other_floats_summed(ranks: Ranks, grid: Grid) -> None:
    ranks(4).run(sglang_cases.other_rows, grid)


@pytest.mark.parametrize("grid", [Grid(4, 2, 2), Grid(4, 1, 2)], ids=str)
def test_cp_ranks_may_hold_shards_of_their_rows(ranks: Ranks, grid: Grid) -> None:
    ranks(4).run(sglang_cases.cp_shards, grid)


@pytest.mark.parametrize("grid", [Grid(4, 2), Grid(4, 2, 2), Grid(4, 1, 2), Grid(4, 4)], ids=str)
def test_group_functions_fill_the_callers_tensors(ranks: Ranks, grid: Grid) -> None:
    ranks(4).run(sglang_cases.group_functions, grid)


@pytest.mark.parametrize("grid", [Grid(4, 4), Grid(4, 2)], ids=str)
def test_fp8_rows_are_near_zeros_exact_and_max_len_untouched(ranks: Ranks, grid: Grid) -> None:
    ranks(grid.world).run(sglang_cases.fp8_gather, grid)


def test_two_layers_in_one_process_do_not_touch(ranks: Ranks) -> None:
    ranks(4).run(sglang_cases.two_in_one_process)


def test_async_calls_make_nothing_after_warm_up(ranks: Ranks) -> None:
    ranks(4).run(sglang_cases.nothing_is_made_again, Grid(4, 4))


def test_ranks_with_different_settings_are_told_which(ranks: Ranks) -> None:
    for text in ranks(4).run(sglang_cases.different_settings):
        assert "rank 1: gatherv=False, fp8_gather=False" in text
        assert "rank 2: gatherv=False, fp8_gather=True" in text


@pytest.mark.parametrize("fault", sglang_cases.FAULTS)
def test_the_checks_see_a_layer_that_is_broken(ranks: Ranks, fault: str) -> None:
    ranks(4).run(sglang_cases.broken_on_purpose, fault)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int64], ids=str)
def test_rows_are_summed_as_integers_wherever_they_begin_and_without_rows_too(dtype: torch.dtype) -> None:
    for number, width, begin in product((0, 3), (1, 2, 4, 7), range(4)):
        rows = torch.ones(begin + number * width + 1).to(dtype)[begin : begin + number * width].view(number, width)
        ints = _as_ints(rows)
        assert ints.dtype in (torch.int32, torch.uint8)
        assert torch.equal(ints.view(torch.uint8), rows.view(torch.uint8))
