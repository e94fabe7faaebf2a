"""How long work takes on the device, eager and in a graph."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    # Prepared calls over different memory, so that none finds its own in a cache.
    Work = Sequence[Callable[[], object]]

_WARM_UP = 3


def eager_us(work: Work, *, repeats: int) -> float:
    """Return the median time of one call in microseconds, launches by the host included."""
    for call in list(work)[:_WARM_UP] * _WARM_UP:
        call()
    return _median_us(lambda: [call() for call in work], repeats=repeats) / len(work)


def graph_us(work: Work, *, repeats: int) -> float:
    """Return the median time of one call in microseconds when all are replayed from one graph."""
    for call in work:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in work:
            call()
    for _ in range(_WARM_UP):
        graph.replay()
    return _median_us(graph.replay, repeats=repeats) / len(work)


def _median_us(run: Callable[[], object], *, repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    times: list[float] = []
    for _ in range(repeats):
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)
