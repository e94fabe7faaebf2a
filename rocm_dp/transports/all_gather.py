"""``all_gather``: equal-size all-gather and reduce-scatter on the padded buffer.

A dp rank's ``size`` rows are cut into one equal share for each of its ``replicas`` ranks, so that no row crosses
a link twice: in world-rank order the shares are exactly the global buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_dp.kernels import rows
from rocm_dp.transports import collectives

if TYPE_CHECKING:
    import torch

    from rocm_dp.groups import Groups
    from rocm_dp.layout import RankLayout
    from rocm_dp.plan import TokenPlan


class AllGather:
    """Equal-size collectives; for plans whose sizes are equal and divisible by the replicas."""

    def __init__(self, layout: RankLayout, groups: Groups) -> None:
        self._layout, self._groups = layout, groups

    def gather(self, out: torch.Tensor, local: torch.Tensor, plan: TokenPlan, *, partial: bool) -> None:
        """Gather in place: this rank's share of ``out`` is written first, padding included."""
        layout, dp = self._layout, self._layout.dp_rank
        start, size, count = plan.starts[dp], plan.sizes[dp], plan.counts[dp]
        share = size // layout.replicas
        first = layout.replica_rank * share
        own = out[start + first : start + first + share]
        if partial and layout.tp_size > 1:
            # The region is overwritten by the all-gather below, so it can hold the padded input of the sum.
            region = out[start : start + size]
            rows.place_rows(region, local, start=0, count=count)
            block = share * layout.tp_size
            collectives.reduce_scatter(
                own, region[layout.cp_rank * block : (layout.cp_rank + 1) * block], self._groups.tp
            )
        elif first + share <= count:
            own = local[first : first + share]
        else:
            real = local[first : first + share]
            rows.place_rows(own, real, start=0, count=real.shape[0])
        self._all_gather(out, own)

    def combine_rows(self, plan: TokenPlan) -> tuple[int, int]:
        """Return the padded size of this dp rank, whose rows come first."""
        return plan.sizes[self._layout.dp_rank], 0

    def combine(self, out: torch.Tensor, partial: torch.Tensor, plan: TokenPlan) -> None:  # noqa: ARG002 - the protocol's
        """Sum each share at its owner, then gather the shares within the dp rank: tp first, then cp."""
        layout, groups = self._layout, self._groups
        share = out.shape[0] // layout.replicas
        own = out[layout.replica_rank * share : (layout.replica_rank + 1) * share]
        self._reduce_scatter(own, partial)
        block = share * layout.tp_size
        mine = out[layout.cp_rank * block : (layout.cp_rank + 1) * block]
        if layout.tp_size > 1:
            collectives.all_gather(mine, own, groups.tp)
        if layout.cp_size > 1:
            collectives.all_gather(out, mine, groups.cp)

    def _all_gather(self, out: torch.Tensor, own: torch.Tensor) -> None:
        """Fill ``out`` with the share ``own`` of every rank, of which it may hold this rank's already."""
        collectives.all_gather(out, own, self._groups.world)

    def _reduce_scatter(self, own: torch.Tensor, full: torch.Tensor) -> None:
        """Sum ``full`` over all ranks; this rank's share fills ``own``."""
        collectives.reduce_scatter(own, full, self._groups.world)
