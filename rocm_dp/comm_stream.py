"""The one side stream on which the collectives of both batches run, and its stand-in on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from rocm_dp.memory.copies import OneLane, StreamLanes
from rocm_dp.memory.events import EventPool, InlineEvent, RunAheadLimit, wait_for
from rocm_dp.options import RECORDS_PER_CALL

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from rocm_dp.memory.copies import Lanes
    from rocm_dp.memory.events import Event
    from rocm_dp.memory.slots import Slot
    from rocm_dp.options import Options


_OWN_RECORDS = 3  # ready, done, the hand-over
_NOTHING = nullcontext()
# Takes the raw handle of the stream that it runs on.
Work: TypeAlias = "Callable[[int], None]"


class SideStream(Protocol):
    """Where collectives run; shared by all exchanges on the same Groups, ``users`` of them.

    Calls are made in the same order on every rank.
    """

    events: EventPool
    options: Options
    streams_made: int
    users: int

    @property
    def in_flight(self) -> int:
        """Event records that the device may not have reached yet."""

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream that launches run on; None on the CPU."""

    def lanes(self, count: int) -> Lanes:
        """Return ``count`` streams beside that of the caller for copies to several peers, made on first use."""

    def launch(self, slot: Slot, work: Work, *, raw: bool, records: int = 0) -> None:
        """Run ``work`` after all that the caller's stream has queued, beside what it queues next.

        ``raw``: it goes by the handle that it is given, and makes ``records`` event records of its own.
        """

    def join(self, slot: Slot) -> None:
        """Make the caller's stream wait for the slot's last launch."""

    def inline(self, work: Work, *, raw: bool, records: int = 0) -> None:
        """Run ``work`` on the caller's stream, after every launch so far."""

    def ordered(self) -> torch.cuda.Stream | None:
        """Return the caller's stream, ordered after every call so far, not in a capture; None on the CPU."""

    def settled(self) -> int | None:
        """Return the raw handle of the caller's stream if it is behind every launch already, else None."""

    def capturing(self) -> bool:
        """Whether the caller's stream is being captured."""

    def finish(self, timeout: float) -> None:
        """Let the host wait for the stream's work; TimeoutError after ``timeout`` seconds."""

    def close(self) -> None:
        """Give its own events back; its work is done."""


class InlineStream:
    """The CPU: every call is done when it returns. Counts events like the real one."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.events = EventPool(InlineEvent, cap=options.max_events)
        self.streams_made = self.users = self.in_flight = 0
        self.stream: torch.cuda.Stream | None = None

    def lanes(self, count: int) -> Lanes:  # noqa: ARG002 - the protocol's
        """Return the one lane that there is."""
        return OneLane()

    def launch(self, slot: Slot, work: Work, *, raw: bool, records: int = 0) -> None:  # noqa: ARG002
        """Run ``work``."""
        slot.ready.record()
        work(0)
        slot.done.record()

    def join(self, slot: Slot) -> None:
        """Return at once: the work is done."""
        slot.done.wait()

    def inline(self, work: Work, *, raw: bool, records: int = 0) -> None:  # noqa: ARG002 - the protocol's
        """Run ``work``."""
        work(0)

    def ordered(self) -> torch.cuda.Stream | None:
        """Return None: the work is done."""
        return None

    def settled(self) -> int | None:
        """Return 0: the work is done."""
        return 0

    def capturing(self) -> bool:
        """Return False: there are no graphs."""
        return False

    def finish(self, timeout: float) -> None:
        """Return at once: the work is done."""

    def close(self) -> None:
        """Do nothing."""


class CommStream:
    """One high-priority CUDA/HIP stream.

    Collectives of one communicator must never run on two unordered streams. Launches are ordered by the comm
    stream; inline work waits for the last launch; and a caller that comes on another stream than the last one
    first waits for that one. While a graph is captured only what is captured is ordered: a capture starts when
    the device is idle.
    """

    def __init__(self, device: torch.device, options: Options) -> None:
        self._device, self.options = device, options
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._raw = self._stream.cuda_stream
        self._lanes: StreamLanes | None = None
        self.streams_made, self.users = 1, 0
        self.events = EventPool(_cuda_event, cap=options.max_events)
        self._limit = RunAheadLimit(self.events, limit=options.max_in_flight, timeout=options.timeout)
        self._handover = self.events.take("hand-over between callers' streams")
        self._caller: torch.cuda.Stream | None = None
        self._handle, self._index = -1, device.index  # of the last caller: quicker to compare
        # The last launch that no inline work has waited for, and whether it was captured.
        self._last: tuple[Event, bool] | None = None

    @property
    def in_flight(self) -> int:
        """Event records that the device may not have reached yet (an upper bound)."""
        return self._limit.in_flight

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream that launches run on."""
        return self._stream

    def lanes(self, count: int) -> Lanes:
        """Return ``count`` streams beside that of the caller for copies to several peers, made on first use."""
        if not count:
            return OneLane()
        if self._lanes is None:
            self._lanes = StreamLanes(self._device, self.events, count)
            self.streams_made += count
        return self._lanes

    def launch(self, slot: Slot, work: Work, *, raw: bool, records: int = 0) -> None:
        """Run ``work`` on the comm stream once the caller's stream has reached this point."""
        with self._on_device():
            capturing = torch.cuda.is_current_stream_capturing()
            slot.ready.record(self._current(capturing=capturing))
            slot.ready.wait(self._stream)
            if raw:
                work(self._raw)
            else:
                with torch.cuda.stream(self._stream):
                    work(self._raw)
            slot.done.record(self._stream)
            self._last = slot.done, capturing
            if not capturing:
                self._note((_OWN_RECORDS if raw else RECORDS_PER_CALL) + records, self._stream)

    def join(self, slot: Slot) -> None:
        """Make the caller's stream wait for the slot's last launch."""
        current, callers = self._callers()
        slot.done.wait(current)
        if self._last is not None and self._last[0] is slot.done and (self._last[1] or callers):
            self._last = None

    def inline(self, work: Work, *, raw: bool, records: int = 0) -> None:
        """Run ``work`` on the caller's stream, after every launch so far."""
        if raw and not records and (handle := self.settled()) is not None:
            work(handle)
            return
        with self._on_device():
            capturing = torch.cuda.is_current_stream_capturing()
            current = self._behind_all(capturing=capturing)
            work(current.cuda_stream)
            if not capturing:
                self._note((_OWN_RECORDS if raw else RECORDS_PER_CALL) + records, current)

    def ordered(self) -> torch.cuda.Stream | None:
        """Return the caller's stream, ordered after every call so far; not in a capture."""
        with self._on_device():
            return self._behind_all(capturing=False)

    def settled(self) -> int | None:
        """Return the raw handle of the caller's stream if it is behind every launch already, else None.

        So it is when it was the last caller's too. Never in a capture, which may go by another transport.
        """
        if self._last is None and torch._C._cuda_getDevice() == self._index:
            handle: int = torch._C._cuda_getCurrentRawStream(self._index)
            if handle == self._handle and not torch._C._cuda_isCurrentStreamCapturing():
                return handle
        return None

    def capturing(self) -> bool:
        """Whether the caller's stream is being captured."""
        return bool(torch._C._cuda_isCurrentStreamCapturing())

    def finish(self, timeout: float) -> None:
        """Let the host wait for the comm stream and the last caller's; TimeoutError after ``timeout`` seconds."""
        for stream in (self._stream, self._caller):
            if stream is not None:
                wait_for(stream, timeout)
        self._last = None

    def close(self) -> None:
        """Give the events back."""
        self._limit.close()
        self.events.give_back(self._handover)
        if self._lanes is not None:
            self._lanes.close()

    def _note(self, records: int, stream: torch.cuda.Stream) -> None:
        while records > 0:
            self._limit.note(min(records, RECORDS_PER_CALL), stream)
            records -= RECORDS_PER_CALL

    def _on_device(self) -> AbstractContextManager[object]:
        """Make the stream's device the current one: kernels go to that one's streams."""
        return _NOTHING if torch._C._cuda_getDevice() == self._index else torch.cuda.device(self._device)

    def _callers(self) -> tuple[torch.cuda.Stream, bool]:
        """Return the current stream, and whether it is that of the last caller; torch takes long to make one."""
        if self._caller is not None and torch._C._cuda_getCurrentRawStream(self._index) == self._handle:
            return self._caller, True
        return torch.cuda.current_stream(self._device), False

    def _behind_all(self, *, capturing: bool) -> torch.cuda.Stream:
        """Return the caller's stream, ordered after the last caller's and after the last launch."""
        current = self._current(capturing=capturing)
        last, self._last = self._last, None
        # What was captured is no event outside the graph, and the other way round.
        if last is not None and last[1] == capturing:
            last[0].wait(current)
        return current

    def _current(self, *, capturing: bool) -> torch.cuda.Stream:
        """Return the caller's stream, ordered after the last caller's if that was another one."""
        current, callers = self._callers()
        if not capturing and not callers:
            if self._caller is not None:
                self._handover.record(self._caller)
                self._handover.wait(current)
            self._caller, self._handle = current, current.cuda_stream
        return current


def _cuda_event() -> Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def side_stream(device: torch.device, options: Options) -> SideStream:
    """Return a side stream for ``device``: a CommStream on a GPU, an InlineStream on the CPU."""
    if device.type == "cuda":
        return CommStream(device, options)
    return InlineStream(options)
