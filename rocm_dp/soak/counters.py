"""How each counter is judged: exactly, by its slope, by its drift, by a bound, or only shown."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

_KIB, _MIB = 1024.0, 1024.0**2


class Kind(Enum):
    """What a gate asks of a counter."""

    EXACT = "exact"
    """It comes back to where it was after warm-up."""
    SLOPE = "slope"
    """It does not climb by more than ``effect`` in what is judged of the run, so a longer run sees slower leaks."""
    DRIFT = "drift"
    """Like SLOPE, ``effect`` being a share of its own height."""
    BOUND = "bound"
    """It does not exceed ``effect`` after warm-up."""
    SHOWN = "shown"
    """Nothing: it belongs to others too, or is told to explain the rest."""


@dataclass(frozen=True, slots=True)
class Counter:
    """The counters whose name matches ``pattern``; ``effect``: see Kind, in ``unit``.

    ``cause``: what is leaking when it fails, in the words of ``--inject``.
    """

    pattern: str
    kind: Kind
    unit: str
    cause: str = ""
    effect: float = 0.0


# The first match counts. In the order of causes: what is further up explains what is further down (a leaked thread
# holds mappings and memory too), not the other way round.
COUNTERS = (
    Counter("own.calls", Kind.SHOWN, "calls"),
    Counter("own.records_in_flight", Kind.EXACT, "records", "run-ahead"),
    Counter("own.events_*", Kind.EXACT, "events", "event"),
    Counter("hsa.live", Kind.EXACT, "signals", "event"),
    Counter("hsa.*", Kind.SHOWN, "signals"),
    Counter("objects.*Event", Kind.EXACT, "objects", "event"),
    Counter("own.streams_made", Kind.EXACT, "streams", "stream"),
    Counter("objects.*Stream", Kind.EXACT, "objects", "stream"),
    Counter("kfd.queues", Kind.EXACT, "queues", "stream"),
    Counter("own.buffer_bytes", Kind.EXACT, "bytes", "buffer"),
    Counter("own.*", Kind.EXACT, "made", "buffer"),
    Counter("objects.Tensor", Kind.EXACT, "objects", "buffer"),
    Counter("torch.allocated", Kind.SLOPE, "bytes", "buffer", effect=4.0 * _KIB),
    Counter("torch.balloon", Kind.BOUND, "x", "record-stream", effect=4.0),
    Counter("torch.reserved", Kind.SLOPE, "bytes", "record-stream", effect=4 * _MIB),
    Counter("torch.inactive_split", Kind.SHOWN, "bytes"),
    Counter("torch.segments", Kind.SLOPE, "segments", "record-stream", effect=2.0),
    Counter("torch.alloc_retries", Kind.EXACT, "retries", "record-stream"),
    Counter("torch.*", Kind.SHOWN, "bytes"),
    Counter("threads", Kind.EXACT, "threads", "thread"),
    Counter("shm.files", Kind.EXACT, "files", "shm"),
    Counter("shm.bytes", Kind.EXACT, "bytes", "shm"),
    Counter("fds.*", Kind.EXACT, "fds", "fd"),
    Counter("objects.*", Kind.EXACT, "objects", "object"),
    # Not exactly: the C library's allocator splits and joins mappings as it likes.
    Counter("maps", Kind.SLOPE, "mappings", "rss", effect=4.0),
    Counter("heap.used", Kind.SLOPE, "bytes", "rss", effect=_MIB / 2),
    Counter("rss", Kind.SLOPE, "bytes", "rss", effect=_MIB / 2),
    # Not exactly: numbers and strings come and go, and some are kept for the next.
    Counter("heap.blocks", Kind.SLOPE, "blocks", "rss", effect=1000.0),
    # A library that others map too is divided among them: they end, and our share grows.
    Counter("pss", Kind.SHOWN, "bytes"),
    Counter("memlock", Kind.EXACT, "bytes", "rss"),
    Counter("kfd.vram", Kind.SLOPE, "bytes", "buffer", effect=4 * _MIB),
    Counter("latency.drift", Kind.DRIFT, "x", "latency", effect=0.25),
)
_UNKNOWN = Counter("*", Kind.SHOWN, "")
CAUSES = tuple(dict.fromkeys(counter.cause for counter in COUNTERS if counter.cause))


def counter_of(name: str) -> Counter:
    """Return how the counter ``name`` is judged; one that is not in the table is only shown."""
    return next((counter for counter in COUNTERS if fnmatchcase(name, counter.pattern)), _UNKNOWN)


def priority(name: str) -> int:
    """Return the place of the counter in the table: a lower one explains a higher one."""
    return next((place for place, c in enumerate(COUNTERS) if fnmatchcase(name, c.pattern)), len(COUNTERS))
