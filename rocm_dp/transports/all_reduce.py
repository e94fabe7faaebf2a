"""``all_reduce``: each rank places its rows in a zero-filled buffer, and all buffers are added.

It moves every row twice, so it comes last; it is what a custom all-reduce or a captured graph may still take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_dp.kernels import rows
from rocm_dp.transports import collectives

if TYPE_CHECKING:
    from rocm_dp.groups import Groups
    from rocm_dp.layout import RankLayout
    from rocm_dp.plan import TokenPlan


class AllReduce:
    """All-reduce over the whole global buffer; for any plan."""

    def __init__(self, layout: RankLayout, groups: Groups) -> None:
        self._layout, self._groups = layout, groups

    def gather(self, out: torch.Tensor, local: torch.Tensor, plan: TokenPlan, *, partial: bool) -> None:
        """Place the rows once (or once for each attention-tp part of them) and add the buffers.

        Rows that need no sum are added as integers: a float -0.0 + 0.0 would lose its sign, and fp8 has no sum.
        """
        layout = self._layout
        summed = partial and layout.tp_size > 1
        if layout.cp_rank == 0 and (summed or layout.tp_rank == 0):
            rows.place_rows(out, local, start=plan.starts[layout.dp_rank], count=local.shape[0])
        else:
            out.zero_()
        collectives.all_reduce(out if summed else _as_ints(out), self._groups.world)

    def combine_rows(self, plan: TokenPlan) -> tuple[int, int]:
        """Return all rows of the global buffer: the sum is made in a copy of it."""
        return plan.rows, plan.starts[self._layout.dp_rank]

    def combine(self, out: torch.Tensor, partial: torch.Tensor, plan: TokenPlan) -> None:  # noqa: ARG002 - the protocol's
        """Add the buffers of all ranks; the own rows lie where the plan says."""
        out.copy_(partial)
        collectives.all_reduce(out, self._groups.world)


def _as_ints(rows: torch.Tensor) -> torch.Tensor:
    row_bytes = rows.shape[1] * rows.itemsize
    return rows.view(torch.uint8 if row_bytes % 4 else torch.int32)
