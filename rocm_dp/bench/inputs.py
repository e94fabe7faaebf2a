"""What the ranks put in, and how many elements of what they get out are wrong.

Every element is a small whole number that follows from its rank and place, so any rank can make the rows of any
other, sums are exact in every dtype and order, and results are compared bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from rocm_dp import reference
from rocm_dp.bench.config import DTYPES
from rocm_dp.plan import PaddingMode, TokenPlan

if TYPE_CHECKING:
    from rocm_dp.bench.config import BenchConfig
    from rocm_dp.layout import RankLayout

_EXACT = 128  # whole numbers up to here are exact in bfloat16, which has the fewest bits
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class Inputs:
    """The rows of one case on this rank: L local rows, G global rows, H width."""

    config: BenchConfig
    layout: RankLayout
    device: torch.device
    counts: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        found: torch.dtype = getattr(torch, DTYPES[self.config.dtype])
        return found

    def sum_len(self) -> TokenPlan:
        """Return the plan of the real rows only."""
        return TokenPlan(self.counts, PaddingMode.SUM_LEN)

    def max_len(self) -> TokenPlan:
        """Return the plan of equal chunks, cut evenly among the ranks of a dp rank."""
        return TokenPlan(self.counts, PaddingMode.MAX_LEN, align=self.layout.replicas)

    def empty(self, rows: int) -> torch.Tensor:
        """Return an uninitialised [rows, H]."""
        return torch.empty(rows, self.config.hidden, dtype=self.dtype, device=self.device)

    def local(self) -> torch.Tensor:
        """Return this dp rank's rows [L, H]."""
        return self._placed(self._dp_rows(self.layout.dp_rank))

    def partial(self, plan: TokenPlan) -> torch.Tensor:
        """Return this rank's addend [G, H] of all rows; padding rows hold ones."""
        rows = self.empty(plan.rows).fill_(1)
        for dp in range(len(plan.counts)):
            rows[reference.scatter_range(plan, dp)] = self._addend(self.layout.rank, dp)
        return self._placed(rows)

    def gathered(self, plan: TokenPlan) -> torch.Tensor:
        """Return what gather must give [G, H]."""
        rows = [self._dp_rows(dp) for dp in range(len(self.counts))]
        of_ranks = [rows[rank // self.layout.replicas] for rank in range(self.layout.world_size)]
        return reference.gather(of_ranks, plan)

    def combined(self) -> torch.Tensor:
        """Return what combine must give [L, H]."""
        own = self.layout.dp_rank
        addends = [self._addend(rank, own) for rank in range(self.layout.world_size)]
        return reference.combine(addends, TokenPlan((self.counts[own],), PaddingMode.SUM_LEN))[0]

    def _dp_rows(self, dp: int) -> torch.Tensor:
        return self._numbers(dp, self.counts[dp], _EXACT)

    def _addend(self, rank: int, dp: int) -> torch.Tensor:
        return self._numbers(7 + 31 * rank + dp, self.counts[dp], max(1, _EXACT // self.layout.world_size))

    def _numbers(self, source: int, rows: int, most: int) -> torch.Tensor:
        """Return whole numbers in [-most, most], scattered by a multiplicative hash of source, row and column."""
        row = torch.arange(rows, device=self.device).view(-1, 1) * 40503
        column = torch.arange(self.config.hidden, device=self.device) * 10007
        mixed = (row + column + source * 7919 + self.config.seed % 2**31) * 2654435761 % 2**32 >> 12
        return (mixed % (2 * most + 1) - most).to(self.dtype)

    def _placed(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows as they are, or one element off the allocation's alignment."""
        if not self.config.unaligned:
            return rows
        room = torch.empty(rows.numel() + 1, dtype=self.dtype, device=self.device)
        return room[1:].view(rows.shape).copy_(rows)


class Expected:
    """What the calls of one verb on one case must return; made when first asked for."""

    def __init__(self, verb: str, inputs: Inputs) -> None:
        self._verb, self._inputs = verb, inputs
        self._of = cache(self._make)

    def wrong(self, got: torch.Tensor, plan: TokenPlan) -> int:
        """Return how many elements of ``got``, the result of a call with ``plan``, are wrong."""
        return wrong_elements(got, self._of(plan))

    def _make(self, plan: TokenPlan) -> torch.Tensor:
        return self._inputs.gathered(plan) if self._verb == "gather" else self._inputs.combined()


def wrong_elements(got: torch.Tensor, want: torch.Tensor) -> int:
    """Return how many elements differ in any bit: all of them for another shape or dtype, at least one."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return max(1, want.numel())
    bits = _INTS[want.itemsize]
    return int((got.contiguous().view(bits) != want.view(bits)).sum())


def poison(tensor: torch.Tensor) -> None:
    """Fill with NaN, so that what a call leaves unwritten is seen."""
    tensor.fill_(float("nan"))
