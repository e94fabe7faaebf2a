"""The one side stream on which the collectives of both batches run, and its stand-in on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from rocm_dp.memory.events import EventPool, InlineEvent, RunAheadLimit

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.memory.events import Event
    from rocm_dp.memory.slots import Slot


class SideStream(Protocol):
    """Where collectives run. Calls are made in the same order on every rank."""

    events: EventPool
    streams_made: int

    @property
    def in_flight(self) -> int:
        """Event records that the device may not have reached yet."""

    def launch(self, slot: Slot, work: Callable[[], None]) -> None:
        """Run ``work`` after all that the caller's stream has queued, beside what it queues next."""

    def join(self, slot: Slot) -> None:
        """Make the caller's stream wait for the slot's last launch."""

    def inline(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the caller's stream, after every launch so far."""

    def close(self) -> None:
        """Wait for the stream's work; give its own events back."""


class InlineStream:
    """The CPU: every call is done when it returns. Counts events like the real one."""

    def __init__(self, *, max_events: int) -> None:
        self.events = EventPool(InlineEvent, cap=max_events)
        self.streams_made = 0
        self.in_flight = 0

    def launch(self, slot: Slot, work: Callable[[], None]) -> None:
        """Run ``work``."""
        slot.ready.record()
        work()
        slot.done.record()

    def join(self, slot: Slot) -> None:
        """Return at once: the work is done."""
        slot.done.wait()

    def inline(self, work: Callable[[], None]) -> None:
        """Run ``work``."""
        work()

    def close(self) -> None:
        """Do nothing."""


class CommStream:
    """One high-priority CUDA/HIP stream. One communicator is never used from two unordered streams."""

    def __init__(self, device: torch.device, *, max_events: int, max_in_flight: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self.streams_made = 1
        self.events = EventPool(_cuda_event, cap=max_events)
        self._limit = RunAheadLimit(self.events, limit=max_in_flight)
        self._last: Event | None = None

    @property
    def in_flight(self) -> int:
        """Event records that the device may not have reached yet (an upper bound)."""
        return self._limit.in_flight

    def launch(self, slot: Slot, work: Callable[[], None]) -> None:
        """Run ``work`` on the comm stream once the caller's stream has reached this point."""
        slot.ready.record(torch.cuda.current_stream(self._device))
        slot.ready.wait(self._stream)
        with torch.cuda.stream(self._stream):
            work()
        slot.done.record(self._stream)
        self._last = slot.done
        if not torch.cuda.is_current_stream_capturing():
            self._limit.note(2, self._stream)

    def join(self, slot: Slot) -> None:
        """Make the caller's stream wait for the slot's last launch."""
        slot.done.wait(torch.cuda.current_stream(self._device))
        if self._last is slot.done:
            self._last = None

    def inline(self, work: Callable[[], None]) -> None:
        """Run ``work`` on the caller's stream, after every launch so far."""
        if self._last is not None:
            self._last.wait(torch.cuda.current_stream(self._device))
            self._last = None
        work()

    def close(self) -> None:
        """Wait for the stream's work and give the fences back."""
        self._stream.synchronize()
        self._limit.close()


def _cuda_event() -> Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def side_stream(device: torch.device, *, max_events: int, max_in_flight: int) -> SideStream:
    """Return the side stream for ``device``: a CommStream on a GPU, an InlineStream on the CPU."""
    if device.type == "cuda":
        return CommStream(device, max_events=max_events, max_in_flight=max_in_flight)
    return InlineStream(max_events=max_events)
