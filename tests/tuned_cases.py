"""What ranks run to see which table they go by."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
from exchange_cases import H

from rocm_dp import Groups, Options, PaddingMode, TokenExchange, TokenPlan
from rocm_dp.errors import ConfigError
from rocm_dp.measured import Measured, MeasuredTable
from rocm_dp.testing import rank_device
from rocm_dp.tuned import MINE, path_for

if TYPE_CHECKING:
    from exchange_cases import Grid

PREFERS_GROUPED = MeasuredTable((Measured(False, 4, 1.0, (("all_gather_v", False, 1.0), ("peer", False, 2.0))),))


def chosen_by_table(rank: int, grid: Grid, path: str) -> tuple[str, str]:
    """The transport chosen for four rows, and why."""
    layout = grid.layout(rank)
    with Groups.create(layout) as groups, _exchange(groups, path) as exchange:
        [chosen] = [one for one in exchange.explain(TokenPlan((2, 2), PaddingMode.SUM_LEN)) if one.chosen]
        return chosen.name, chosen.reason


def chosen_here(rank: int, grid: Grid, hidden: int, cache: str) -> tuple[str, str]:
    """The transport chosen for four rows by the table of this machine below ``cache``, and why."""
    layout = grid.layout(rank)
    with (
        patch.dict(os.environ, {"XDG_CACHE_HOME": cache}),
        Groups.create(layout) as groups,
        TokenExchange(layout, groups, device=rank_device(), hidden=hidden, dtype=torch.float32) as exchange,
    ):
        [chosen] = [one for one in exchange.explain(TokenPlan((2, 2), PaddingMode.SUM_LEN)) if one.chosen]
        return chosen.name, chosen.reason


def table_of_this_machine_is_broken(rank: int, grid: Grid, cache: str) -> tuple[str, str]:
    """What is warned of on this rank when the table of this machine can't be read, and which transport serves."""
    layout, device = grid.layout(rank), rank_device()
    with patch.dict(os.environ, {"XDG_CACHE_HOME": cache}), Groups.create(layout) as groups:
        if rank == 0:
            path = path_for(layout, device, H, torch.float32)
            path.parent.mkdir(parents=True)
            path.write_text("[" * 200_000)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with _exchange(groups, MINE) as exchange:
                [chosen] = [one for one in exchange.explain(TokenPlan((2, 2), PaddingMode.SUM_LEN)) if one.chosen]
        return "; ".join(str(one.message) for one in told), chosen.name


def refused_table(rank: int, grid: Grid, path: str) -> str:
    """What the constructor says of a file that is no table; the groups serve on."""
    with Groups.create(grid.layout(rank)) as groups:
        try:
            _exchange(groups, path)
        except ConfigError as error:
            with TokenExchange(groups.layout, groups, device=rank_device(), hidden=H, dtype=torch.float32):
                return str(error)
    return ""


def _exchange(groups: Groups, path: str) -> TokenExchange:
    options = Options(table=path)
    return TokenExchange(
        groups.layout, groups, device=rank_device(), hidden=H, dtype=torch.float32, options=options
    )
