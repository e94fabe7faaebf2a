"""Events that are made once, and a bound on how far the host may run ahead of them.

KFD allows 4096 signal events per process. Every recorded event that the device has not reached pins one, and so
does every live one, so both the number of events and the number of records in flight are bounded here.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Protocol

from rocm_dp.errors import ConfigError, EventPoolExhausted
from rocm_dp.options import MIN_IN_FLIGHT, RECORDS_PER_CALL

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

FENCES = 8
_POLL_S = 50e-6


class Pollable(Protocol):
    """An event, or a stream."""

    def query(self) -> bool:
        """Return whether the work is done."""


class Event(Protocol):
    """What is used of ``torch.cuda.Event``; ``stream`` None is the current one."""

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        """Mark the work queued on ``stream`` so far."""

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make ``stream`` wait for the marked work."""

    def query(self) -> bool:
        """Return whether the marked work is done."""


class InlineEvent:
    """The event of a device whose work is done when its call returns: the CPU."""

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        """Do nothing: the work before it is done."""

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Do nothing: the marked work is done."""

    def query(self) -> bool:
        """Return True: the marked work is done."""
        return True


class EventPool:
    """Makes events on demand up to ``cap``, knows who holds each, and hands returned ones out again."""

    def __init__(self, make: Callable[[], Event], *, cap: int) -> None:
        if not 1 <= cap < 4096:
            raise ConfigError(f"an event pool's cap must lie in [1, 4096), got {cap}")
        self._make, self._cap = make, cap
        self._free: list[Event] = []
        # The event too: an id alone would come again once its owner had dropped it.
        self._holders: dict[int, tuple[Event, str]] = {}
        self.made = 0

    @property
    def held(self) -> int:
        """Events handed out and not yet given back."""
        return len(self._holders)

    def take(self, owner: str) -> Event:
        """Hand out an event to ``owner``; raise EventPoolExhausted, naming who holds what, past the cap."""
        if not self._free:
            if self.made == self._cap:
                counted = Counter(name for _, name in self._holders.values()).most_common()
                held = ", ".join(f"{name} {count}" for name, count in counted)
                raise EventPoolExhausted(f"{owner} needs an event, all {self._cap} are held: {held}")
            self._free.append(self._make())
            self.made += 1
        event = self._free.pop()
        self._holders[id(event)] = event, owner
        return event

    def give_back(self, event: Event) -> None:
        """Take back an event that nothing waits for any more."""
        del self._holders[id(event)]
        self._free.append(event)


class RunAheadLimit:
    """Keeps the records in flight at or under ``limit`` by waiting on old fences, never on the newest work.

    After every few records one of ``FENCES`` fences is recorded on the comm stream. A fence that has passed
    proves that all records before it have, so the host waits on the oldest fence, and only when all of them are
    outstanding. It waits for ``timeout`` seconds at most.
    """

    def __init__(self, events: EventPool, *, limit: int, timeout: float) -> None:
        if not MIN_IN_FLIGHT <= limit < 4096:
            raise ConfigError(f"max_in_flight must lie in [{MIN_IN_FLIGHT}, 4096), got {limit}")
        self._events, self._timeout = events, timeout
        # From fence to fence there are at most stride + RECORDS_PER_CALL records, itself included. With all fences
        # outstanding and the next one due, FENCES + 1 times as many are in flight.
        self._stride = limit // (FENCES + 1) - RECORDS_PER_CALL
        self._spare = [events.take("run-ahead fences") for _ in range(FENCES)]
        self._outstanding: deque[tuple[int, Event]] = deque()
        self._issued = self._fenced = self._passed = 0

    @property
    def in_flight(self) -> int:
        """Records that may not have been reached by the device yet (an upper bound)."""
        return self._issued - self._passed

    def note(self, records: int, stream: torch.cuda.Stream | None) -> None:
        """Count up to RECORDS_PER_CALL ``records`` made before or on ``stream``; wait for a fence if need be.

        Raises TimeoutError when the oldest fence is not reached in time.
        """
        self._issued += records
        if self._issued - self._fenced < self._stride:
            return
        if not self._spare:
            issued, oldest = self._outstanding[0]
            wait_for(oldest, self._timeout)
            self._outstanding.popleft()
            self._passed = issued
            self._spare.append(oldest)
        fence = self._spare.pop()
        fence.record(stream)
        self._issued += 1
        self._fenced = self._issued
        self._outstanding.append((self._issued, fence))

    def close(self) -> None:
        """Give the fences back; the caller has waited for the stream."""
        for fence in (*self._spare, *(fence for _, fence in self._outstanding)):
            self._events.give_back(fence)
        self._spare.clear()
        self._outstanding.clear()
        self._passed = self._issued


def wait_for(work: Pollable, timeout: float) -> None:
    """Let the host wait until ``work`` is done; raise TimeoutError after ``timeout`` seconds.

    By polling: a wait inside the driver for a rank that is gone can't be left.
    """
    deadline = time.monotonic() + timeout
    while not work.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the device did not come to the end of its calls in {timeout:g} s")
        time.sleep(_POLL_S)
