"""SGLang's layer on 2 GPUs: many random steps, eager and replayed. Run with ``-m gpu``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import sglang_cases
from exchange_cases import Grid

from rocm_dp.integrations.sglang import DpPaddingMode

if TYPE_CHECKING:
    from rocm_dp.testing import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
GRIDS = [Grid(2, 2), Grid(2, 1), Grid(2, 1, 2)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("transport", [None, "all_gather_v"])
def test_500_random_steps_equal_the_description(pair: RankPool, grid: Grid, transport: str | None) -> None:
    assert pair.run(sglang_cases.random_layouts, grid, 5, 500, 64, transport) == [500] * 2


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("mode", DpPaddingMode, ids=lambda mode: mode.name)
def test_a_captured_layer_replays_every_batch_right(pair: RankPool, grid: Grid, mode: DpPaddingMode) -> None:
    pair.run(sglang_cases.replayed, grid, mode, 100)


def test_nothing_is_made_after_warm_up(pair: RankPool) -> None:
    pair.run(sglang_cases.nothing_is_made_again, Grid(2, 2))
