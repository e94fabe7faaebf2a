"""Calls in a graph, or why they can't be."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rocm_dp.errors import RocmDpError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(slots=True)
class Capture:
    """A graph of some calls and their ``results``, or the ``reason`` why there is none."""

    graph: torch.cuda.CUDAGraph
    results: list[Any] = field(default_factory=list)
    reason: str | None = None


@contextmanager
def captured(call: Callable[[], object], calls: int) -> Iterator[Capture]:
    """Capture ``calls`` calls; the device is idle before.

    The graph is given up at the end: a communicator can't be destroyed while a graph holds its kernels.
    """
    capture = Capture(torch.cuda.CUDAGraph())
    try:
        with torch.cuda.graph(capture.graph):
            try:
                capture.results.extend(call() for _ in range(calls))
            except (RuntimeError, RocmDpError) as error:
                # Kept from the end of the capture, which then fails in turn and says less.
                capture.reason = _said(error)
    except RuntimeError as error:
        capture.reason = capture.reason or _said(error)
    try:
        yield capture
    finally:
        torch.cuda.synchronize()
        with suppress(RuntimeError):
            capture.graph.reset()


def _said(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
