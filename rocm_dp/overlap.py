"""Two-batch overlap: halves of a step that take turns: one computes while the other's rows are under way."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from rocm_dp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import torch

    from rocm_dp.exchange import TokenExchange
    from rocm_dp.graphs import GraphPlan
    from rocm_dp.plan import TokenPlan

T = TypeVar("T")
S = TypeVar("S")


class Layer(Protocol[S]):
    """One layer of a model, for forwards that need not be written as generators.

    ``S`` is what goes from layer to layer. ``attention`` takes it, and returns the rows to gather, contiguous
    [L, H], and what ``finish`` will need. ``experts`` takes the rows of all ranks [G, H] and returns this rank's
    addends to them, contiguous [G, H]. ``finish`` takes what was kept and this dp rank's sums [L, H], which it must
    not keep: the next layer's combine overwrites them.
    """

    def attention(self, state: S) -> tuple[torch.Tensor, S]:
        """Return the rows to gather, and what to keep."""

    def experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the addends to the rows of all ranks."""

    def finish(self, kept: S, own: torch.Tensor) -> S:
        """Return what the next layer takes."""


@dataclass(frozen=True, slots=True)
class Half(Generic[S]):
    """One half of a step (see ``TokenPlan.halves``): what the first layer takes, and the plan of its rows."""

    state: S
    plan: TokenPlan | GraphPlan


def interleave(*batches: Generator[None, None, T], exchange: TokenExchange | None = None) -> list[T]:
    """Run the batches in turns, from ``yield`` to ``yield``: A0 B0 A1 B1 ...; return what each returned.

    The turns depend on nothing but the generators' lengths, so the collectives of all batches are issued in
    one order on every rank. If one batch raises, the others are closed and its error goes on. With ``exchange``
    that gives up then, so that no other rank waits for calls that this one won't make; without, call ``drain`` on
    it before it is used again, on ranks that all failed alike. Raises ConfigError for the same generator twice.
    """
    if len({id(batch) for batch in batches}) < len(batches):
        raise ConfigError("every batch must be a generator of its own, got one twice")
    results: dict[int, T] = {}
    with ExitStack() as stack:
        for batch in batches:
            stack.callback(batch.close)
        live = dict(enumerate(batches))
        try:
            while live:
                for index, batch in list(live.items()):
                    try:
                        next(batch)
                    except StopIteration as stop:
                        results[index] = stop.value
                        del live[index]
        except BaseException as error:
            if exchange is not None:
                exchange.give_up(error)
            raise
    return [results[index] for index in range(len(batches))]


def overlapped_forward(layers: Sequence[Layer[S]], halves: Sequence[Half[S]], exchange: TokenExchange) -> list[S]:
    """Run ``layers`` on ``halves`` that take turns; return what the last layer returned for each.

    Half i uses batch i of the exchange. Every rank has the same layers and the same plans; ask
    ``exchange.overlap_verdict`` whether it pays. After an error the exchange has given up: see there.
    """
    batches = [_half(layers, half, exchange, batch) for batch, half in enumerate(halves)]
    return interleave(*batches, exchange=exchange)


def serial_forward(layers: Sequence[Layer[S]], step: Half[S], exchange: TokenExchange) -> S:
    """Run ``layers`` on a whole step, its calls on the current stream; return what the last layer returned.

    After an error the exchange has given up: see there.
    """
    state, plan = step.state, step.plan
    try:
        for layer in layers:
            rows, kept = layer.attention(state)
            addends = layer.experts(exchange.gather(rows, plan))
            state = layer.finish(kept, exchange.combine(addends, plan))
    except BaseException as error:
        exchange.give_up(error)
        raise
    return state


def _half(
    layers: Sequence[Layer[S]], half: Half[S], exchange: TokenExchange, batch: int
) -> Generator[None, None, S]:
    state, plan = half.state, half.plan
    for layer in layers:
        rows, kept = layer.attention(state)
        pending = exchange.gather_async(rows, plan, batch=batch)
        del rows  # held by the call while it needs them
        yield
        addends = layer.experts(pending.wait())
        pending = exchange.combine_async(addends, plan, batch=batch)
        del addends
        yield
        state = layer.finish(kept, pending.wait())
    return state
