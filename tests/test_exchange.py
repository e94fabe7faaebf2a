"""Every verb, on every factorisation of 1, 2, 3, 4, 6 and 8 ranks, against the oracle."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch
from exchange_cases import Case, Grid, every_verb

from rocm_dp import PaddingMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.testing import RankPool

    Ranks = Callable[[int], RankPool]

WORLDS = (1, 2, 3, 4, 6, 8)
GRIDS = [
    Grid(world, dp, cp)
    for world in WORLDS
    for dp, cp in product(range(1, world + 1), repeat=2)
    if world % (dp * cp) == 0
]


def counts_for(dp: int) -> list[tuple[int, ...]]:
    """The counts that break naive code: idle ranks in every place, one row, uneven, equal, all idle."""
    chosen = {
        (0,) * dp,
        (1,) + (0,) * (dp - 1),
        (0,) * (dp - 1) + (5,),
        (4,) * dp,
        tuple(3 * d + 1 for d in range(dp)),
        tuple((7 * d + 2) % 5 for d in range(dp)),
    }
    return sorted(chosen)


def cases_for(grid: Grid, dtype: torch.dtype, transport: str | None) -> list[Case]:
    """Each layout of the buffer that the transport can carry: packed, packed and aligned, padded."""
    replicas = grid.world // grid.dp
    layouts = {(PaddingMode.SUM_LEN, 1), (PaddingMode.SUM_LEN, replicas), (PaddingMode.MAX_LEN, replicas)}
    if transport == "all_gather":
        layouts = {(PaddingMode.MAX_LEN, replicas)}
    return [
        Case(counts, padding, align, dtype, transport)
        for padding, align in sorted(layouts, key=str)
        for counts in counts_for(grid.dp)
    ]


# Six and eight ranks on a small machine take long: a few layouts of eight, the others with -m soak.
QUICK = {(8, 8, 1), (8, 2, 2)}


@pytest.mark.parametrize(
    "grid",
    [
        pytest.param(grid, marks=pytest.mark.soak)
        if grid.world > 4 and (grid.world, grid.dp, grid.cp) not in QUICK
        else grid
        for grid in GRIDS
    ],
    ids=lambda g: f"world{g.world}-dp{g.dp}-cp{g.cp}",
)
def test_every_verb_equals_the_oracle(ranks: Ranks, grid: Grid) -> None:
    forced = ("all_gather", "all_gather_v", "all_reduce")
    # The library's own choice is one of these: once for each world and dp is enough.
    for transport in forced if grid.cp > 1 else (None, *forced):
        cases = cases_for(grid, torch.bfloat16, transport)
        assert ranks(grid.world).run(every_verb, grid, cases) == [len(cases)] * grid.world


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8, torch.uint8, torch.bool],
)
@pytest.mark.parametrize("transport", ["all_gather", "all_gather_v", "all_reduce"])
def test_every_dtype_is_moved_bit_for_bit(ranks: Ranks, dtype: torch.dtype, transport: str) -> None:
    for grid in (Grid(4, 4), Grid(4, 2)):
        ranks(4).run(every_verb, grid, cases_for(grid, dtype, transport))
