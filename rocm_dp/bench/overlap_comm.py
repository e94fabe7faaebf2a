"""How the rows of a forward move: through an exchange, by hand with torch.distributed, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from rocm_dp.bench.inputs import Inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_dp.bench.contenders import Contender
    from rocm_dp.bench.library import Site
    from rocm_dp.bench.overlap_layers import Half
    from rocm_dp.exchange import TokenExchange
    from rocm_dp.plan import TokenPlan


class Arriving(Protocol):
    """Rows under way."""

    def wait(self) -> torch.Tensor:
        """Order the current stream after their arrival and return them."""


class Comm(Protocol):
    """Moves the rows of two halves and of a whole batch, ``half`` 0, 1 or 2; local [L, H], global [G, H].

    A result is valid until the next call of the same verb on the same half.
    """

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """Where the async verbs run; None where they are done when they return."""

    def gather(self, local: torch.Tensor, half: int) -> torch.Tensor:
        """Return the rows of all ranks."""

    def combine(self, partial: torch.Tensor, half: int) -> torch.Tensor:
        """Return this dp rank's rows, summed over all ranks."""

    def gather_async(self, local: torch.Tensor, half: int) -> Arriving:
        """Like ``gather``, beside what the caller's stream does next."""

    def combine_async(self, partial: torch.Tensor, half: int) -> Arriving:
        """Like ``combine``, beside what the caller's stream does next."""


class ExchangeComm:
    """Through a TokenExchange; each half is a batch of its own, and what is not split is the first."""

    def __init__(self, exchange: TokenExchange, plans: Sequence[TokenPlan]) -> None:
        self._exchange, self._plans = exchange, plans
        self.stream = exchange.comm_stream

    def gather(self, local: torch.Tensor, half: int) -> torch.Tensor:
        """Gather."""
        return self._exchange.gather(local, self._plans[half], batch=half % 2)

    def combine(self, partial: torch.Tensor, half: int) -> torch.Tensor:
        """Combine."""
        return self._exchange.combine(partial, self._plans[half], batch=half % 2)

    def gather_async(self, local: torch.Tensor, half: int) -> Arriving:
        """Gather on the comm stream."""
        return self._exchange.gather_async(local, self._plans[half], batch=half % 2)

    def combine_async(self, partial: torch.Tensor, half: int) -> Arriving:
        """Combine on the comm stream."""
        return self._exchange.combine_async(partial, self._plans[half], batch=half % 2)


@dataclass(frozen=True, slots=True)
class HalfInputs(Inputs):
    """Inputs whose tensors are the buffers of a half, for library paths that are bound to what they move."""

    half: Half

    def local(self) -> torch.Tensor:
        """Return what is gathered."""
        return self.half.local

    def partial(self, plan: TokenPlan) -> torch.Tensor:  # noqa: ARG002 - the half was made for one plan
        """Return what is combined."""
        return self.half.partial


class _Events(NamedTuple):
    ready: torch.cuda.Event
    done: torch.cuda.Event


class HandComm:
    """What a user writes by hand: a library path for each verb, a stream beside, two events for each call."""

    def __init__(
        self,
        sites: Sequence[Site],
        gather: Callable[[Site], Contender],
        combine: Callable[[Site], Contender],
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.stream = stream
        self._gathers = [gather(site).call for site in sites]
        self._combines = [combine(site).call for site in sites]
        self._events = {} if stream is None else {call: _new_events() for call in self._gathers + self._combines}

    def gather(self, local: torch.Tensor, half: int) -> torch.Tensor:  # noqa: ARG002 - bound to the half's buffer
        """Gather."""
        return self._gathers[half]()

    def combine(self, partial: torch.Tensor, half: int) -> torch.Tensor:  # noqa: ARG002 - bound likewise
        """Combine."""
        return self._combines[half]()

    def gather_async(self, local: torch.Tensor, half: int) -> Arriving:  # noqa: ARG002 - bound likewise
        """Gather on the stream beside."""
        return self._beside(self._gathers[half])

    def combine_async(self, partial: torch.Tensor, half: int) -> Arriving:  # noqa: ARG002 - bound likewise
        """Combine on the stream beside."""
        return self._beside(self._combines[half])

    def _beside(self, call: Callable[[], torch.Tensor]) -> Arriving:
        if self.stream is None:
            return Arrived(call())
        events = self._events[call]
        events.ready.record()
        self.stream.wait_event(events.ready)
        with torch.cuda.stream(self.stream):
            result = call()
        events.done.record(self.stream)
        return Arrived(result, events.done)


class NoComm:
    """Nothing moves: what stands in for the rows is there already."""

    stream = None

    def __init__(self, halves: Sequence[Half]) -> None:
        self._halves = halves

    def gather(self, local: torch.Tensor, half: int) -> torch.Tensor:  # noqa: ARG002 - the protocol's
        """Return the stand-in [G, H]."""
        return self._halves[half].gathered

    def combine(self, partial: torch.Tensor, half: int) -> torch.Tensor:  # noqa: ARG002 - the protocol's
        """Return the stand-in [L, H]."""
        return self._halves[half].own

    def gather_async(self, local: torch.Tensor, half: int) -> Arriving:
        """Return the stand-in, there already."""
        return Arrived(self.gather(local, half))

    def combine_async(self, partial: torch.Tensor, half: int) -> Arriving:
        """Return the stand-in, there already."""
        return Arrived(self.combine(partial, half))


@dataclass(frozen=True, slots=True)
class Arrived:
    """Rows that are there once ``done`` is (None: already)."""

    rows: torch.Tensor
    done: torch.cuda.Event | None = None

    def wait(self) -> torch.Tensor:
        """Order the current stream after ``done`` and return the rows."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)
        return self.rows


def _new_events() -> _Events:
    return _Events(torch.cuda.Event(), torch.cuda.Event())  # type: ignore[no-untyped-call]
