"""How long work takes, eager and in a graph. Microseconds, by the device's clock, on the CPU by the host's."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    # Prepared calls over different memory, so that none finds its own in a cache.
    Work = Sequence[Callable[[], object]]

_WARM_UP = 3
_BATCH = 10  # eager calls between two looks at the clock


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of one call: median and spread. On a GPU ``p99`` is of single calls, the others of batches."""

    p10: float
    p50: float
    p90: float
    p99: float


def eager_us(work: Work, *, repeats: int) -> float:
    """Return the median time of one call in microseconds, launches by the host included."""
    for call in list(work)[:_WARM_UP] * _WARM_UP:
        call()
    return statistics.median(_samples(lambda: [call() for call in work], repeats=repeats)) / len(work)


def graph_us(work: Work, *, repeats: int) -> float:
    """Return the median time of one call in microseconds when all are replayed from one graph."""
    for call in work:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in work:
            call()
    return replay_times(graph, len(work), repeats=repeats).p50


def replay_times(graph: torch.cuda.CUDAGraph, calls: int, *, repeats: int) -> Times:
    """Return the times of one of the ``calls`` calls in ``graph``, over ``repeats`` replays."""
    for _ in range(_WARM_UP):
        graph.replay()
    each = [us / calls for us in _samples(graph.replay, repeats=repeats)]
    return _times(each, each)


def call_times(call: Callable[[], object], device: torch.device, *, warmup: int, repeats: int) -> Times:
    """Return the times of one eager call, launches by the host included, over ``repeats`` batches of calls.

    On a GPU single calls are measured apart, since events between the calls cost time too.
    """
    for _ in range(warmup):
        call()
    if device.type != "cuda":
        each = [us for _ in range(repeats) for us in _host_marks(call)]
        return _times(each, each)

    def batch() -> None:
        for _ in range(_BATCH):
            call()

    torch.cuda.synchronize()
    each = [us / _BATCH for us in _samples(batch, repeats=repeats)]
    events = [timing_event() for _ in range(_BATCH + 1)]
    return _times(each, [us for _ in range(repeats) for us in _device_marks(call, events)])


def run_us(run: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Return the median time of ``run`` in microseconds, launches by the host included; no warm-up."""
    if device.type == "cuda":
        return statistics.median(_samples(run, repeats=repeats))
    marks = [time.perf_counter()]
    for _ in range(repeats):
        run()
        marks.append(time.perf_counter())
    return statistics.median((after - before) * 1e6 for before, after in pairwise(marks))


def quantile(samples: Sequence[float], q: float) -> float:
    """Return the smallest sample that at least the share ``q`` of them doesn't exceed (nearest rank).

    >>> quantile([4.0, 1.0, 3.0, 2.0], 0.5), quantile([1.0, 2.0], 0.99)
    (2.0, 2.0)
    """
    return sorted(samples)[max(0, math.ceil(q * len(samples)) - 1)]


def _times(batches: Sequence[float], single: Sequence[float]) -> Times:
    return Times(quantile(batches, 0.1), statistics.median(batches), quantile(batches, 0.9), quantile(single, 0.99))


def timing_event() -> torch.cuda.Event:
    """Return an event of the current device that knows its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _samples(run: Callable[[], object], *, repeats: int) -> list[float]:
    start, end = timing_event(), timing_event()
    times: list[float] = []
    for _ in range(repeats):
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times


def _device_marks(call: Callable[[], object], events: list[torch.cuda.Event]) -> list[float]:
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    events[-1].synchronize()
    return [before.elapsed_time(after) * 1e3 for before, after in pairwise(events)]


def _host_marks(call: Callable[[], object]) -> list[float]:
    marks = [time.perf_counter()]
    for _ in range(_BATCH):
        call()
        marks.append(time.perf_counter())
    return [(after - before) * 1e6 for before, after in pairwise(marks)]
