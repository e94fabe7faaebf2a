"""The library broken on purpose, in one place each, inside the ranks."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
from exchange_cases import (
    Case,
    Grid,
    an_exchange,
    check_combine,
    check_gather,
    check_gather_many,
    check_partial_gather,
)
from lifetime_cases import one_step

from rocm_dp.calls import GroupCall
from rocm_dp.memory.slots import Slot, SlotPool
from rocm_dp.plan import PaddingMode
from rocm_dp.transports import all_gather_v, collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from rocm_dp.exchange import TokenExchange
    from rocm_dp.plan import TokenPlan


@dataclass(frozen=True)
class SwappedStarts:
    """A plan whose first two dp ranks lie in each other's place."""

    plan: TokenPlan

    @property
    def starts(self) -> tuple[int, ...]:
        first, second, *rest = self.plan.starts
        return (self.plan.sizes[1], first, *rest) if second else (second, first, *rest)

    @property
    def counts(self) -> tuple[int, ...]:
        return self.plan.counts


_world_shares = all_gather_v.AllGatherV._world_shares
_take = SlotPool.take
_reduce_scatter_v = collectives.reduce_scatter_v


def swap_starts() -> AbstractContextManager[object]:
    def swapped(self: object, buffer: torch.Tensor, plan: TokenPlan) -> list[torch.Tensor]:
        return _world_shares(self, buffer, SwappedStarts(plan))  # type: ignore[arg-type]

    return patch.object(all_gather_v.AllGatherV, "_world_shares", swapped)


def leave_padding_unwritten() -> AbstractContextManager[object]:
    return patch.object(all_gather_v, "zero_padding", lambda out, plan: None)


@contextmanager
def make_events_per_call() -> Iterator[None]:
    def fresh(self: SlotPool, verb: str, batch: int, nbytes: int, *, reserve: int | None = None) -> Slot:
        self._slots.pop((verb, batch), None)
        return _take(self, verb, batch, nbytes, reserve=reserve)

    with patch.object(SlotPool, "take", fresh), patch.object(GroupCall, "stale", new=True):
        yield


def forget_an_addend() -> AbstractContextManager[object]:
    def forgetful(out: torch.Tensor, parts: list[torch.Tensor], group: object) -> None:
        kept = [torch.zeros_like(part) if group.rank() == 1 else part for part in parts]  # type: ignore[attr-defined]
        _reduce_scatter_v(out, kept, group)  # type: ignore[arg-type]

    return patch.object(collectives, "reduce_scatter_v", forgetful)


def write_the_input() -> AbstractContextManager[object]:
    def destructive(out: torch.Tensor, parts: list[torch.Tensor], group: object) -> None:
        _reduce_scatter_v(out, parts, group)  # type: ignore[arg-type]
        parts[0].zero_()

    return patch.object(collectives, "reduce_scatter_v", destructive)


def take_addends_for_copies() -> AbstractContextManager[object]:
    honest = all_gather_v.AllGatherV.gather

    def gather(
        self: all_gather_v.AllGatherV, out: torch.Tensor, local: torch.Tensor, plan: TokenPlan, *, partial: bool
    ) -> None:
        honest(self, out, local, plan, partial=False)

    return patch.object(all_gather_v.AllGatherV, "gather", gather)


def _flat(exchange: TokenExchange, grid: Grid, case: Case) -> None:
    one_step(exchange, case.plan)
    before = exchange.stats().events_made
    one_step(exchange, case.plan)
    assert exchange.stats().events_made == before, f"events grew from {before} to {exchange.stats().events_made}"


UNEVEN = Case((3, 1), PaddingMode.SUM_LEN, transport="all_gather_v")
PADDED = Case((3, 1), PaddingMode.MAX_LEN, transport="all_gather_v")
CONTROLS: dict[str, tuple[Callable[[], AbstractContextManager[object]], Callable[..., None], Grid, Case]] = {
    "two ranks' starts swapped, gather": (swap_starts, check_gather, Grid(2, 2), UNEVEN),
    "two ranks' starts swapped, combine": (swap_starts, check_combine, Grid(2, 2), UNEVEN),
    "a padding row left unwritten, gather": (leave_padding_unwritten, check_gather, Grid(2, 2), PADDED),
    "a padding row left unwritten, gather_many": (leave_padding_unwritten, check_gather_many, Grid(2, 2), PADDED),
    "a padding row left unwritten, partial": (leave_padding_unwritten, check_partial_gather, Grid(4, 2), PADDED),
    "one event per call": (make_events_per_call, _flat, Grid(2, 2), UNEVEN),
    "an addend forgotten": (forget_an_addend, check_combine, Grid(2, 2), UNEVEN),
    "an input written": (write_the_input, check_combine, Grid(2, 2), UNEVEN),
    "addends taken for copies": (take_addends_for_copies, check_partial_gather, Grid(4, 2), UNEVEN),
}


def checked_under_sabotage(rank: int, name: str, broken: bool) -> str:
    """What the check said of the sabotaged library ("" when it found nothing), or of the real one."""
    sabotage, check, grid, case = CONTROLS[name]
    with an_exchange(rank, grid, poison=True, transport="all_gather_v") as exchange:
        try:
            if broken:
                with sabotage():
                    check(exchange, grid, case)
            else:
                check(exchange, grid, case)
        except AssertionError as error:
            return str(error)
        return ""
