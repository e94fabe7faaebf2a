"""Slow leaks on purpose: the negative controls of every gate."""

from __future__ import annotations

import os
import threading
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from unittest.mock import patch

import torch

from rocm_dp.errors import ConfigError
from rocm_dp.memory.events import RunAheadLimit
from rocm_dp.soak.hazards import RecordStreamLeak
from rocm_dp.soak.host import SHM

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.exchange import TokenExchange

T = TypeVar("T")
_RSS_BYTES = 128 * 1024
_TENSOR_BYTES = 4096
_SLOWER = 100e-6  # seconds, more each step: to be seen in some hundred of them beside whatever else runs
# A unit is lost once in so many steps.
_RARELY = 4


class Injection(Protocol):
    """A leak; what it holds on to is given back by ``close``, so that the next run starts clean."""

    def step(self, index: int) -> None:
        """Leak a little."""

    def close(self) -> None:
        """Give everything back."""


class _Kept(Generic[T]):
    """Keeps what ``make`` makes, once in ``every`` steps; ``end`` ends one of them."""

    def __init__(self, make: Callable[[], T], end: Callable[[T], object] = lambda _: None, every: int = 1) -> None:
        self._make, self._end, self._every = make, end, every
        self._kept: list[T] = []

    def step(self, index: int) -> None:
        if index % self._every == 0:
            self._kept.append(self._make())

    def close(self) -> None:
        while self._kept:
            self._end(self._kept.pop())


class LeakedObject:
    """What the injection ``object`` loses; found by its type."""

    def __init__(self) -> None:
        self.itself = self


def _event(exchange: TokenExchange) -> Injection:
    pool = exchange._dispatch._side.events
    return _Kept(lambda: pool.take("a leak, on purpose"), pool.give_back, _RARELY)


def _thread() -> Injection:
    over = threading.Event()

    def start() -> threading.Thread:
        thread = threading.Thread(target=over.wait, daemon=True)
        thread.start()
        return thread

    def end(thread: threading.Thread) -> None:
        over.set()
        thread.join()

    return _Kept(start, end, _RARELY)


def _fd() -> Injection:
    return _Kept(lambda: os.open(os.devnull, os.O_RDONLY), os.close, _RARELY)


def _shm() -> Injection:
    def leave() -> str:
        segment = SharedMemory(create=True, size=4096)
        # Else the tracker removes at exit what was left on purpose, and says so.
        resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
        segment.close()
        return segment.name

    return _Kept(leave, lambda name: (SHM / name).unlink(missing_ok=True), _RARELY)


def _buffer(exchange: TokenExchange) -> Injection:
    return _Kept(lambda: torch.ones(_TENSOR_BYTES, dtype=torch.uint8, device=exchange.device), every=2)


def _stream(exchange: TokenExchange) -> Injection:
    return _Kept(lambda: torch.cuda.Stream(exchange.device), every=_RARELY)  # type: ignore[no-untyped-call]


class _Slower:
    """Each step takes a little longer than the one before."""

    def step(self, index: int) -> None:
        time.sleep(index * _SLOWER)

    def close(self) -> None:
        """Nothing is held."""


class _NoBound:
    """The host is no longer held back: records pile up, and each would hold a signal on AMD."""

    def __init__(self) -> None:
        def note(self: RunAheadLimit, records: int, stream: object) -> None:
            del stream
            self._issued += records

        self._patch = patch.object(RunAheadLimit, "note", note)
        self._patch.start()

    def step(self, index: int) -> None:
        """The exchange's own calls do it."""

    def close(self) -> None:
        self._patch.stop()


INJECTIONS: dict[str, Callable[[TokenExchange], Injection]] = {
    "event": _event,
    "run-ahead": lambda _: _NoBound(),
    "buffer": _buffer,
    "record-stream": RecordStreamLeak,
    "fd": lambda _: _fd(),
    "thread": lambda _: _thread(),
    "rss": lambda _: _Kept(lambda: bytearray(os.urandom(1) * _RSS_BYTES)),
    "stream": _stream,
    "shm": lambda _: _shm(),
    "object": lambda _: _Kept(LeakedObject),
    "latency": lambda _: _Slower(),
}
NEEDS_GPU = {
    "run-ahead": "on the CPU a call is done when it returns: no records are in flight",
    "record-stream": "record_stream does nothing to CPU tensors",
    "stream": "there are no streams on the CPU",
}


def inject(kind: str | None, exchange: TokenExchange) -> Injection | None:
    """Return the leak ``kind``, None for None. Raises ConfigError for an unknown one, or one that needs a GPU."""
    if kind is None:
        return None
    if kind not in INJECTIONS:
        raise ConfigError(f"inject must be one of {', '.join(INJECTIONS)}, got {kind!r}")
    if kind in NEEDS_GPU and exchange.device.type != "cuda":
        raise ConfigError(f"--inject {kind} needs a GPU: {NEEDS_GPU[kind]}")
    return INJECTIONS[kind](exchange)
