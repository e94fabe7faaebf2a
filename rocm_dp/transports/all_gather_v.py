"""``all_gather_v``: only the real rows move, straight into views of the output.

A dp rank's ``count`` rows are cut into one share for each of its ``replicas`` ranks (sizes differ by at most
one row), so that no row crosses a link twice. On NCCL and RCCL the uneven collectives are grouped broadcasts
and reduces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_dp.plan import split_rows
from rocm_dp.transports import collectives
from rocm_dp.transports.base import zero_padding

if TYPE_CHECKING:
    import torch

    from rocm_dp.groups import Groups
    from rocm_dp.layout import RankLayout
    from rocm_dp.plan import TokenPlan


class AllGatherV:
    """Collectives of varying size; for any plan."""

    def __init__(self, layout: RankLayout, groups: Groups) -> None:
        self._layout, self._groups = layout, groups

    def gather(self, out: torch.Tensor, local: torch.Tensor, plan: TokenPlan, *, partial: bool) -> None:
        """Gather every rank's share of the real rows; zero the padding rows."""
        layout = self._layout
        views = self._world_shares(out, plan)
        mine = self._own_shares(local)
        own = mine[layout.replica_rank]
        if partial and layout.tp_size > 1:
            own = views[layout.rank]
            block = slice(layout.cp_rank * layout.tp_size, (layout.cp_rank + 1) * layout.tp_size)
            collectives.reduce_scatter_v(own, mine[block], self._groups.tp)
        collectives.all_gather_v(views, own, self._groups.world)
        zero_padding(out, plan)

    def combine_rows(self, plan: TokenPlan) -> tuple[int, int]:
        """Return the real rows of this dp rank and nothing else."""
        return plan.counts[self._layout.dp_rank], 0

    def combine(self, out: torch.Tensor, partial: torch.Tensor, plan: TokenPlan) -> None:
        """Sum each share at its owner, then gather the shares within the dp rank: tp first, then cp."""
        layout, groups = self._layout, self._groups
        shares = self._own_shares(out)
        own = shares[layout.replica_rank]
        collectives.reduce_scatter_v(own, self._world_shares(partial, plan), groups.world)
        if layout.tp_size > 1:
            block = slice(layout.cp_rank * layout.tp_size, (layout.cp_rank + 1) * layout.tp_size)
            collectives.all_gather_v(shares[block], own, groups.tp)
        if layout.cp_size > 1:
            bounds = split_rows(out.shape[0], layout.replicas)
            blocks = [
                out[bounds[first][0] : bounds[first + layout.tp_size - 1][1]]
                for first in range(0, layout.replicas, layout.tp_size)
            ]
            collectives.all_gather_v(blocks, blocks[layout.cp_rank], groups.cp)

    def _own_shares(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Cut this dp rank's rows into one share for each of its ranks."""
        return [rows[start:stop] for start, stop in split_rows(rows.shape[0], self._layout.replicas)]

    def _world_shares(self, buffer: torch.Tensor, plan: TokenPlan) -> list[torch.Tensor]:
        """Cut the real rows of the global buffer into one share for each rank of the world."""
        return [
            buffer[first + start : first + stop]
            for first, count in zip(plan.starts, plan.counts, strict=True)
            for start, stop in split_rows(count, self._layout.replicas)
        ]
