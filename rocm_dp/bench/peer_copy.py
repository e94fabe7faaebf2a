"""What a rank can receive at most: plain copies from all of its peers at once."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import torch

from rocm_dp.bench.timing import timing_event

if TYPE_CHECKING:
    from collections.abc import Callable

_BYTES = 2**28  # of each copy: long enough that its start is nothing
_REPEATS, _WARM_UP = 10, 2


def receive_bandwidth(world: int) -> float | None:
    """Return what copies from GPUs 1 to ``world`` - 1 bring to GPU 0 together, in GB/s.

    None where this process sees fewer GPUs than ranks, or where they can't reach each other's memory or have none
    left. To be called in one process while all GPUs are idle.
    """
    if world < 2 or torch.cuda.device_count() < world:
        return None
    if not all(torch.cuda.can_device_access_peer(0, other) for other in range(1, world)):
        return None
    try:
        with torch.cuda.device(0):
            us = _copy_us(world)
            torch.cuda.empty_cache()
    except torch.OutOfMemoryError:
        return None
    return (world - 1) * _BYTES / us / 1e3


def _copy_us(world: int) -> float:
    copy, start, end = _copies(world), timing_event(), timing_event()
    times: list[float] = []
    for _ in range(_WARM_UP + _REPEATS):
        copy(start, end)
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[_WARM_UP:])


def _copies(world: int) -> Callable[[torch.cuda.Event, torch.cuda.Event], None]:
    """Return a function that copies from every peer between two events, each on streams of its own."""
    peers = [torch.empty(_BYTES, dtype=torch.uint8, device=f"cuda:{other}") for other in range(1, world)]
    homes = [torch.empty_like(peer, device="cuda:0") for peer in peers]
    streams = [torch.cuda.Stream() for _ in peers]  # type: ignore[no-untyped-call]
    done = [torch.cuda.Event() for _ in peers]  # type: ignore[no-untyped-call]

    def copy(start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        start.record()
        for stream, event, home, peer in zip(streams, done, homes, peers, strict=True):
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                home.copy_(peer, non_blocking=True)
            event.record(stream)
            event.wait()
        end.record()

    return copy
