"""The protocol of a transport, and what those over process groups share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from rocm_dp.plan import TokenPlan


class Transport(Protocol):
    """Moves rows by one plan. Shapes: L local rows, G global rows (``plan.rows``), H width.

    Both verbs are collective, run on the current stream, write every row they return and never their inputs.
    Whether a transport can carry a plan is decided by ``routing`` alone.
    """

    def gather(self, out: torch.Tensor, local: torch.Tensor, plan: TokenPlan, *, partial: bool) -> None:
        """Fill ``out`` [G, H] from the ``local`` [L, H] of every rank; padding rows become zero."""

    def combine_rows(self, plan: TokenPlan) -> tuple[int, int]:
        """Return how many rows the ``out`` of ``combine`` must have, and where the own rows start in it."""

    def combine(self, out: torch.Tensor, partial: torch.Tensor, plan: TokenPlan) -> None:
        """Sum ``partial`` [G, H] over all ranks; this dp rank's own [L, H] end up in ``out``."""


def zero_padding(out: torch.Tensor, plan: TokenPlan) -> None:
    """Zero every padding row of the global buffer ``out`` [G, H]."""
    for start, size, count in zip(plan.starts, plan.sizes, plan.counts, strict=True):
        if size > count:
            out[start + count : start + size].zero_()
