"""What times mean: bandwidths, the floor, geometric means. Plain numbers, no torch.

Bytes per microsecond over 1000 are GB/s (1e9 bytes a second), as nccl-tests prints them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def algbw(nbytes: int, us: float) -> float:
    """Return the algorithm bandwidth in GB/s: ``nbytes`` of the whole buffer over the time of a call.

    nccl-tests, doc/PERFORMANCE.md, "Algorithm bandwidth": size / time; the size of an all-gather is what a rank
    has in the end, that of a reduce-scatter what it has at first.
    """
    return nbytes / us / 1e3


def busbw(nbytes: int, us: float, world: int) -> float:
    """Return the bus bandwidth in GB/s: what crosses the slowest link of a ring, algbw * (world - 1) / world.

    nccl-tests, doc/PERFORMANCE.md, "ReduceScatter" and "AllGather".
    """
    return algbw(nbytes, us) * (world - 1) / world


def gather_receives(counts: tuple[int, ...]) -> int:
    """Return the rows that the busiest rank must receive: all but its own.

    >>> gather_receives((128, 64))
    128
    """
    return sum(counts) - min(counts)


def combine_receives(counts: tuple[int, ...], replicas: int) -> int:
    """Return the rows that the busiest rank must receive when every rank sends it its partial rows directly.

    Each of the ``replicas`` ranks of a dp rank sums its share, and gets the other shares from its fellows.

    >>> combine_receives((128, 64), 1), combine_receives((128, 64), 2)
    (128, 256)
    """
    world, rows = len(counts) * replicas, max(counts)
    share = -(-rows // replicas)
    return (world - 1) * share + rows - share


def floor_us(nbytes: int, gb_s: float) -> float:
    """Return the microseconds that ``nbytes`` take at ``gb_s`` GB/s; no latency in it."""
    return nbytes / gb_s / 1e3


def geometric_mean(ratios: Iterable[float]) -> float | None:
    """Return the geometric mean, or None of nothing."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None
