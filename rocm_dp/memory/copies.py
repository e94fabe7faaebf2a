"""Copies that take no compute unit between GPUs: by SDMA or copy engines; by the host between CPU ranks."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Protocol

import torch

from rocm_dp.memory.runtime import loaded_runtime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_dp.memory.events import EventPool
    from rocm_dp.memory.runtime import Runtime


class Copier(Protocol):
    """Queues copies and zeros by bare addresses on raw streams."""

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Copy ``nbytes``."""

    def zero(self, at: int, nbytes: int, stream: int) -> None:
        """Write ``nbytes`` zeros."""


class HostCopier:
    """CPU ranks: a copy is done when it returns."""

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:  # noqa: ARG002 - the protocol's
        """Copy ``nbytes``."""
        ctypes.memmove(to, source, nbytes)

    def zero(self, at: int, nbytes: int, stream: int) -> None:  # noqa: ARG002 - the protocol's
        """Write ``nbytes`` zeros."""
        ctypes.memset(at, 0, nbytes)


class Lanes(Protocol):
    """Streams on which copies to several peers run side by side."""

    @property
    def records(self) -> int:
        """Event records of one ``fork`` and ``join``."""

    def fork(self, stream: int) -> Sequence[int]:
        """Return raw streams, ``stream`` the first, that are behind all that it has queued."""

    def join(self, stream: int) -> None:
        """Make ``stream`` wait for the others."""


class OneLane:
    """One copy after the other, on the caller's stream."""

    records = 0

    def fork(self, stream: int) -> Sequence[int]:
        """Return ``stream`` alone."""
        return (stream,)

    def join(self, stream: int) -> None:
        """Do nothing."""


class StreamLanes:
    """``count`` streams beside the caller's, with an event each and one for the fork; all made once."""

    def __init__(self, device: torch.device, events: EventPool, count: int) -> None:
        self._runtime: Runtime = loaded_runtime()
        self._pool, self._events = events, [events.take("copy lanes") for _ in range(count + 1)]
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(count)]  # type: ignore[no-untyped-call]
        # torch makes an event when it is first recorded.
        for event in self._events:
            event.record(self._streams[0])
        self._fork, *self._done = [int(event.cuda_event) for event in self._events]  # type: ignore[attr-defined]
        self._handles = [stream.cuda_stream for stream in self._streams]
        self.records = count + 1

    def fork(self, stream: int) -> Sequence[int]:
        """Return raw streams, ``stream`` the first, that are behind all that it has queued."""
        self._runtime.record(self._fork, stream)
        for handle in self._handles:
            self._runtime.wait(handle, self._fork)
        return (stream, *self._handles)

    def join(self, stream: int) -> None:
        """Make ``stream`` wait for the others."""
        for handle, done in zip(self._handles, self._done, strict=True):
            self._runtime.record(done, handle)
            self._runtime.wait(stream, done)

    def close(self) -> None:
        """Give the events back."""
        for event in self._events:
            self._pool.give_back(event)


def copier_for(device: torch.device) -> Copier:
    """Return what copies between the ranks' memory on ``device``."""
    return loaded_runtime() if device.type == "cuda" else HostCopier()
