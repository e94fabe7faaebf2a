"""Collectives of torch.distributed in the two shapes used here, equal and of varying size.

``*_v`` take one tensor for each rank of the group, of any number of rows, zero included: every rank knows all
sizes from the plan, so what is skipped is skipped everywhere. Any failure inside torch.distributed is raised as
CollectiveFailedError.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# torch 2.13 renamed both and warns about the old names.
_all_gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_equal = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CollectiveFailedError(Exception):
    """A collective failed or timed out; its cause is what torch.distributed raised."""


@contextmanager
def _named(tensor: torch.Tensor) -> Iterator[None]:
    # gloo reports a lost rank as a plain RuntimeError, which on a GPU could be anything.
    lost = RuntimeError if tensor.is_cpu else dist.DistError
    try:
        yield
    except lost as error:
        raise CollectiveFailedError(str(error)) from error


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous 2-D tensor as uint8 [rows, width * itemsize], so that any dtype can be moved."""
    return tensor.view(torch.uint8)


def all_gather(out: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather equal chunks, moved as bytes; ``mine`` may be this rank's own chunk of ``out``."""
    if group.size() == 1:
        _copy(out, mine)
    elif out.numel():
        with _named(out):
            _all_gather_equal(as_bytes(out), as_bytes(mine), group=group)


def reduce_scatter(out: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum equal chunks to their owners; ``out`` may be this rank's own chunk of ``full``."""
    if group.size() == 1:
        _copy(out, full)
    elif full.numel():
        with _named(out):
            _reduce_scatter_equal(out, full, group=group)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum in place over the group."""
    if group.size() > 1 and tensor.numel():
        with _named(tensor):
            dist.all_reduce(tensor, group=group)


def all_gather_v(views: Sequence[torch.Tensor], mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather ``mine`` of every rank into ``views``, which are ordered by rank and may lie anywhere."""
    whole = _as_one(views)
    if whole is not None:
        all_gather(whole, mine, group)
    elif mine.is_cpu:
        _copy(views[group.rank()], mine)
        with _named(mine):
            works = [
                dist.broadcast(as_bytes(view), group=group, group_src=root, async_op=True)
                for root, view in enumerate(views)
                if view.numel()
            ]
            for work in works:
                work.wait()
    else:
        with _named(mine):
            dist.all_gather([as_bytes(view) for view in views], as_bytes(mine), group=group)


def reduce_scatter_v(out: torch.Tensor, parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum ``parts[r]`` of all ranks into ``out`` of rank ``r``; ``parts`` are not written."""
    whole = _as_one(parts)
    if whole is not None:
        reduce_scatter(out, whole, group)
    elif out.is_cpu:
        for root, part in enumerate(parts):
            if part.numel():
                # gloo reduces in place on every rank, the root or not.
                summed = out.copy_(part) if root == group.rank() else part.clone()
                with _named(out):
                    dist.reduce(summed, group=group, group_dst=root)
    else:
        with _named(out):
            dist.reduce_scatter(out, list(parts), group=group)


def _as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return equal, adjacent [rows, width] tensors as one; None when they are not.

    Of equal sizes torch.distributed would make a copy of the whole, which it leaves out for one tensor.
    """
    first = tensors[0]
    size = first.numel() * first.itemsize
    if any(tensor.shape != first.shape for tensor in tensors):
        return None
    if size and any(after.data_ptr() - before.data_ptr() != size for before, after in pairwise(tensors)):
        return None
    return first.as_strided((first.shape[0] * len(tensors), first.shape[1]), (first.shape[1], 1))


def _copy(out: torch.Tensor, mine: torch.Tensor) -> None:
    if out.data_ptr() != mine.data_ptr():
        out.copy_(mine)
