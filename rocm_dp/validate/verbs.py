"""Every verb once, on rows that every rank can make. L local rows, G global rows, H width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_dp import reference
from rocm_dp.errors import DtypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rocm_dp.exchange import TokenExchange
    from rocm_dp.plan import TokenPlan

# Beside the hidden state: rows of 24, 8, 3 and 5 bytes, which no wide access fits.
_BESIDE = ((6, torch.int32), (1, torch.int64), (3, torch.float8_e4m3fnuz), (5, torch.bool))
RIGHT = ""


class Verbs:
    """Calls the verbs of one exchange and says what was wrong ("": nothing); collective."""

    def __init__(self, exchange: TokenExchange) -> None:
        self._exchange, self._layout = exchange, exchange.layout
        self._sums = exchange.dtype.itemsize > 1

    def check(self, plan: TokenPlan) -> Iterator[tuple[str, str]]:
        """Yield (verb, what was wrong) for every verb, blocking and on the comm stream."""
        exchange = self._exchange
        yield "gather", self._gather(plan, exchange.gather)
        yield (
            "gather_async",
            self._gather(plan, lambda rows, plan: exchange.gather_async(rows, plan, batch=1).wait()),
        )
        yield "gather_many", self._many(plan)
        yield "scatter", self._scatter(plan)
        if not self._sums:
            yield "combine", self._refused(plan)
            return
        yield "combine", self._combine(plan, exchange.combine)
        yield "combine_async", self._combine(plan, lambda x, plan: exchange.combine_async(x, plan, batch=1).wait())
        if self._layout.tp_size > 1:
            yield "gather(partial=True)", self._partial_gather(plan)

    def _gather(self, plan: TokenPlan, call: Callable[[torch.Tensor, TokenPlan], torch.Tensor]) -> str:
        locals_ = self._copies(plan, self._exchange.hidden, self._exchange.dtype)
        mine = self._mine(locals_)
        got = call(mine, plan).cpu()
        return _bits([got], [reference.gather(locals_, plan)]) or _unwritten(mine, locals_[self._layout.rank])

    def _many(self, plan: TokenPlan) -> str:
        fields = ((self._exchange.hidden, self._exchange.dtype), *_BESIDE)
        columns = [self._copies(plan, width, dtype) for width, dtype in fields]
        got = [tensor.cpu() for tensor in self._exchange.gather_many([self._mine(one) for one in columns], plan)]
        return _bits(got, reference.gather_many(list(zip(*columns, strict=True)), plan))

    def _scatter(self, plan: TokenPlan) -> str:
        full = _any_bits(plan.rows, 7, self._exchange.dtype, seed=3)
        got = self._exchange.scatter(full.to(self._exchange.device), plan).cpu()
        return _bits([got], [reference.scatter(full, plan)[self._layout.dp_rank]])

    def _combine(self, plan: TokenPlan, call: Callable[[torch.Tensor, TokenPlan], torch.Tensor]) -> str:
        width, dtype = self._exchange.hidden, self._exchange.dtype
        partials = [_numbers(plan.rows, width, dtype, seed=rank) for rank in range(self._layout.world_size)]
        mine = self._mine(partials)
        own = reference.scatter_range(plan, self._layout.dp_rank)
        got = call(mine, plan).cpu()
        return _sum(got, [part[own] for part in partials]) or _unwritten(mine, partials[self._layout.rank])

    def _partial_gather(self, plan: TokenPlan) -> str:
        layout, exchange = self._layout, self._exchange
        # The cp ranks of a dp rank hold copies of the addends, its tp ranks different ones.
        addends = [
            [
                _numbers(count, exchange.hidden, exchange.dtype, seed=dp * 64 + turn)
                for turn in range(layout.tp_size)
            ]
            for dp, count in enumerate(plan.counts)
        ]
        mine = addends[layout.dp_rank][layout.tp_rank].to(exchange.device)
        got = exchange.gather(mine, plan, partial=True).cpu()
        padding = got.clone()
        for dp, parts in enumerate(addends):
            rows = reference.scatter_range(plan, dp)
            if wrong := _sum(got[rows], parts):
                return wrong
            padding[rows] = 0
        return "left padding rows unwritten" if padding.view(torch.uint8).any() else RIGHT

    def _refused(self, plan: TokenPlan) -> str:
        rows = torch.zeros(
            plan.rows, self._exchange.hidden, dtype=self._exchange.dtype, device=self._exchange.device
        )
        try:
            self._exchange.combine(rows, plan)
        except DtypeError:
            return RIGHT
        return "added rows of a dtype that has no sum"

    def _copies(self, plan: TokenPlan, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the rows of every rank; those of one dp rank hold the same."""
        per_dp = [_any_bits(count, width, dtype, seed=1000 + dp) for dp, count in enumerate(plan.counts)]
        return [rows for rows in per_dp for _ in range(self._layout.replicas)]

    def _mine(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[self._layout.rank].to(self._exchange.device, copy=True)


def _any_bits(rows: int, width: int, dtype: torch.dtype, *, seed: int) -> torch.Tensor:
    """Return rows of random bits: every NaN payload, -0.0 and denormal has its chance."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (rows, width), generator=generator).bool()
    shape = (rows, width * dtype.itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)


def _numbers(rows: int, width: int, dtype: torch.dtype, *, seed: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _bits(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> str:
    return RIGHT if all(map(reference.same_bits, got, want)) and len(got) == len(want) else "differs"


def _sum(got: torch.Tensor, addends: Sequence[torch.Tensor]) -> str:
    error = reference.sum_error(got, addends)
    return RIGHT if error <= 1 else f"is off by {error:.3g} x the rounding bound"


def _unwritten(after: torch.Tensor, before: torch.Tensor) -> str:
    return RIGHT if reference.same_bits(after.cpu(), before) else "wrote its input"
