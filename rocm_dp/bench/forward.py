"""A forward of a batch: whole, or its two halves one after the other or taking turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_dp.bench.overlap_comm import NoComm
from rocm_dp.bench.overlap_layers import Layers, NoCompute
from rocm_dp.overlap import interleave

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    import torch

    from rocm_dp.bench.overlap_comm import Comm
    from rocm_dp.bench.overlap_layers import Compute, Half, Weights

_HALVES, _WHOLE = (0, 1), 2


def run_serial(depth: int, compute: Compute, comm: Comm) -> None:
    """Run ``depth`` layers of the first half, then those of the second, with the sync verbs."""
    compute.begin()
    for half in _HALVES:
        _in_a_row(depth, compute, comm, half)


def run_whole(depth: int, compute: Compute, comm: Comm) -> None:
    """Run ``depth`` layers of the batch that was not split, with the sync verbs."""
    compute.begin()
    _in_a_row(depth, compute, comm, _WHOLE)


def run_overlapped(depth: int, compute: Compute, comm: Comm) -> None:
    """Run ``depth`` layers of both halves in turns: while one computes, the rows of the other move."""
    compute.begin()
    interleave(*(_in_turns(depth, compute, comm, half) for half in _HALVES))


def _in_a_row(depth: int, compute: Compute, comm: Comm, part: int) -> None:
    own = None
    for _ in range(depth):
        gathered = comm.gather(compute.attention(part, own), part)
        own = comm.combine(compute.experts(part, gathered), part)
    assert own is not None
    compute.finish(part, own)


def _in_turns(depth: int, compute: Compute, comm: Comm, half: int) -> Generator[None, None, None]:
    own = None
    for _ in range(depth):
        pending = comm.gather_async(compute.attention(half, own), half)
        yield
        pending = comm.combine_async(compute.experts(half, pending.wait()), half)
        yield
        own = pending.wait()
    assert own is not None
    compute.finish(half, own)


@dataclass(frozen=True, slots=True)
class Forward:
    """One way to move the rows of one case, and the layers around it. ``name`` and ``ours``: of the contender.

    ``halves``: the buffers of both halves and, third, of the whole batch. ``pays``: whether the library would
    overlap, eager and in a graph; None where it is not asked.
    """

    name: str
    ours: bool
    halves: Sequence[Half]
    weights: Weights
    depth: int
    comm: Comm
    pays: tuple[bool, bool] | None = None

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.halves[0].inputs.device

    def layers(self) -> Layers:
        """Return the stages that compute."""
        return Layers(self.halves, self.weights, self.depth)

    def runs(self) -> dict[str, Callable[[], None]]:
        """Return what is timed: compute alone, communication alone, both, in turns, and the whole not split."""
        depth, layers, comm = self.depth, self.layers(), self.comm
        still, silent = NoCompute(self.halves), NoComm(self.halves)
        return {
            "compute": lambda: run_serial(depth, layers, silent),
            "comm": lambda: run_serial(depth, still, comm),
            "serial": lambda: run_serial(depth, layers, comm),
            "overlap": lambda: run_overlapped(depth, layers, comm),
            "whole": lambda: run_whole(depth, layers, comm),
        }

    def outcome(self, run: Callable[[], object]) -> list[torch.Tensor]:
        """Run over NaN and return a copy of both halves' rows [L, H]."""
        halves = [self.halves[half] for half in _HALVES]
        for half in halves:
            half.poison()
        run()
        return [half.hidden.clone() for half in halves]
