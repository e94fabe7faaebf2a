"""When the stages of a forward began and ended, and the file that a trace viewer shows them from."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rocm_dp.bench.forward import run_overlapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rocm_dp.bench.forward import Forward
    from rocm_dp.bench.overlap_comm import Arriving, Comm
    from rocm_dp.bench.overlap_layers import Compute

LANES = ("compute A", "compute B", "comm A", "comm B")


@dataclass(frozen=True, slots=True)
class Span:
    """A stage: its lane (one of LANES), its name, and when it began and how long it took, in microseconds."""

    lane: str
    name: str
    start: float
    us: float


class Clock(Protocol):
    """Tells when a stream came to a point."""

    def mark(self, stream: torch.cuda.Stream | None = None) -> Any:
        """Mark the point that ``stream`` (None: the current one) has come to."""

    def us(self, before: Any, after: Any) -> float:
        """Return the microseconds between two marks; the device has passed both."""

    def rewind(self) -> None:
        """Begin again: the marks so far are no longer read."""


class HostClock:
    """The CPU: what was called is done."""

    def mark(self, stream: torch.cuda.Stream | None = None) -> float:  # noqa: ARG002 - the protocol's
        """Return now."""
        return time.perf_counter()

    def us(self, before: float, after: float) -> float:
        """Return the difference."""
        return 1e6 * (after - before)

    def rewind(self) -> None:
        """Do nothing."""


class DeviceClock:
    """Timing events, made on first use and used again. ``in_graph``: they are nodes of the graph that is captured.

    Raises RuntimeError where graphs can't hold timing events.
    """

    def __init__(self, *, in_graph: bool = False) -> None:
        self._in_graph, self._next = in_graph, 0
        self._events: list[torch.cuda.Event] = []

    def mark(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        """Record the next event."""
        if self._next == len(self._events):
            made = torch.cuda.Event(enable_timing=True, external=self._in_graph)  # type: ignore[no-untyped-call]
            self._events.append(made)
        event = self._events[self._next]
        self._next += 1
        event.record(stream)
        return event

    def us(self, before: torch.cuda.Event, after: torch.cuda.Event) -> float:
        """Return what the device's clock says."""
        found: float = before.elapsed_time(after)
        return found * 1e3

    def rewind(self) -> None:
        """Record the first event next."""
        self._next = 0


@dataclass(slots=True)
class Marks:
    """The marks of one forward: before and after each compute stage, and when a call's rows were ready and done."""

    clock: Clock
    compute: list[tuple[str, str, Any, Any]] = field(default_factory=list)
    comm: list[tuple[str, str, Any, Any]] = field(default_factory=list)

    def clear(self) -> None:
        """Forget all marks."""
        self.clock.rewind()
        self.compute.clear()
        self.comm.clear()

    def busy_us(self) -> float:
        """Return the time inside compute stages."""
        return sum(self.clock.us(before, after) for _, _, before, after in self.compute)

    def spans(self) -> list[Span]:
        """Return all stages, from the beginning of the first.

        A call begins when its rows are ready and the call before it on the comm stream is done.
        """
        origin, us = self.compute[0][2], self.clock.us
        between = (
            (lane, name, us(origin, before), us(origin, after)) for lane, name, before, after in self.compute
        )
        found = [Span(lane, name, start, end - start) for lane, name, start, end in between]
        free = 0.0
        for lane, name, ready, done in self.comm:
            start, free = max(free, us(origin, ready)), us(origin, done)
            found.append(Span(lane, name, start, free - start))
        return found


class MarkedCompute:
    """Stages with a mark before and after each."""

    def __init__(self, compute: Compute, marks: Marks) -> None:
        self._compute, self._marks = compute, marks
        self._layer = [0, 0]

    def begin(self) -> None:
        """Begin, unmarked."""
        self._layer = [0, 0]
        self._compute.begin()

    def attention(self, half: int, own: torch.Tensor | None) -> torch.Tensor:
        """Attention, marked."""
        before = self._marks.clock.mark()
        local = self._compute.attention(half, own)
        self._note(half, f"attention {self._layer[half]}", before)
        return local

    def experts(self, half: int, gathered: torch.Tensor) -> torch.Tensor:
        """Experts, marked."""
        before = self._marks.clock.mark()
        partial = self._compute.experts(half, gathered)
        self._note(half, f"experts {self._layer[half]}", before)
        self._layer[half] += 1
        return partial

    def finish(self, half: int, own: torch.Tensor) -> None:
        """Finish, marked."""
        before = self._marks.clock.mark()
        self._compute.finish(half, own)
        self._note(half, "last add", before)

    def _note(self, half: int, name: str, before: Any) -> None:
        self._marks.compute.append((LANES[half], name, before, self._marks.clock.mark()))


class MarkedComm:
    """Async verbs with a mark where their rows are ready and where they are done; for overlapped forwards."""

    def __init__(self, comm: Comm, marks: Marks) -> None:
        self._comm, self._marks, self.stream = comm, marks, comm.stream
        self._layer = [0, 0]

    def gather(self, local: torch.Tensor, half: int) -> torch.Tensor:
        """Gather, unmarked."""
        return self._comm.gather(local, half)

    def combine(self, partial: torch.Tensor, half: int) -> torch.Tensor:
        """Combine, unmarked."""
        return self._comm.combine(partial, half)

    def gather_async(self, local: torch.Tensor, half: int) -> Arriving:
        """Gather, marked."""
        ready = self._marks.clock.mark()
        arriving = self._comm.gather_async(local, half)
        self._note(half, f"gather {self._layer[half]}", ready)
        return arriving

    def combine_async(self, partial: torch.Tensor, half: int) -> Arriving:
        """Combine, marked."""
        ready = self._marks.clock.mark()
        arriving = self._comm.combine_async(partial, half)
        self._note(half, f"combine {self._layer[half]}", ready)
        self._layer[half] += 1
        return arriving

    def _note(self, half: int, name: str, ready: Any) -> None:
        self._marks.comm.append((LANES[2 + half], name, ready, self._marks.clock.mark(self.stream)))


def new_clock(device: torch.device, *, in_graph: bool = False) -> Clock:
    """Return the clock of ``device``."""
    return DeviceClock(in_graph=in_graph) if device.type == "cuda" else HostClock()


def overlapped_spans(forward: Forward) -> list[Span]:
    """Run one overlapped forward, eager, and return its stages; all ranks do it together."""
    marks = Marks(new_clock(forward.device))
    for _ in range(2):  # The first makes the events, which would show.
        marks.clear()
        run_overlapped(forward.depth, MarkedCompute(forward.layers(), marks), MarkedComm(forward.comm, marks))
        if forward.device.type == "cuda":
            torch.cuda.synchronize(forward.device)
    return marks.spans()


def trace_events(forwards: Iterable[tuple[str, Sequence[Span]]]) -> dict[str, object]:
    """Return what to write as JSON for a trace viewer: a process for each named forward, a thread for each lane.

    Google's Trace Event Format: complete events "X" and metadata "M", times in microseconds.
    """
    events: list[dict[str, object]] = []
    for pid, (name, spans) in enumerate(forwards):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})
        for tid, lane in enumerate(LANES):
            for what, value in (("thread_name", {"name": lane}), ("thread_sort_index", {"sort_index": tid})):
                events.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": value})
        for span in spans:
            where = {"pid": pid, "tid": LANES.index(span.lane), "cat": span.lane.partition(" ")[0]}
            events.append({"ph": "X", "name": span.name, **where, "ts": span.start, "dur": span.us})
    return {"traceEvents": events, "displayTimeUnit": "ns"}
