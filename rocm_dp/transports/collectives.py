"""Collectives of torch.distributed in the two shapes used here, equal and of varying size, for any backend.

``*_v`` take one tensor for each rank of the group, of any number of rows, zero included: every rank knows all
sizes from the plan, so what is skipped is skipped everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

# torch 2.13 renamed both and warns about the old names.
_all_gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_equal = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous 2-D tensor as uint8 [rows, width * itemsize], so that any dtype can be moved."""
    return tensor.view(torch.uint8)


def all_gather(out: torch.Tensor, mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather equal chunks, moved as bytes; ``mine`` may be this rank's own chunk of ``out``."""
    if not out.numel():
        return
    _all_gather_equal(as_bytes(out), as_bytes(mine), group=group)


def reduce_scatter(out: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum equal chunks to their owners; ``out`` may be this rank's own chunk of ``full``."""
    if not full.numel():
        return
    _reduce_scatter_equal(out, full, group=group)


def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum in place over the group."""
    if not tensor.numel():
        return
    dist.all_reduce(tensor, group=group)


def all_gather_v(views: Sequence[torch.Tensor], mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather ``mine`` of every rank into ``views``, which are ordered by rank and may lie anywhere."""
    if not any(view.numel() for view in views):
        return
    moved = [as_bytes(view) for view in views]
    if dist.get_backend(group) != "gloo":
        dist.all_gather(moved, as_bytes(mine), group=group)
        return
    own = views[dist.get_rank(group)]
    if own.data_ptr() != mine.data_ptr():
        own.copy_(mine)
    works = [
        dist.broadcast(view, group=group, group_src=root, async_op=True)
        for root, view in enumerate(moved)
        if view.numel()
    ]
    for work in works:
        work.wait()


def reduce_scatter_v(out: torch.Tensor, parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum ``parts[r]`` of all ranks into ``out`` of rank ``r``; ``parts`` are not written."""
    if not any(part.numel() for part in parts):
        return
    if dist.get_backend(group) != "gloo":
        dist.reduce_scatter(out, list(parts), group=group)
        return
    rank = dist.get_rank(group)
    for root, part in enumerate(parts):
        if part.numel():
            # gloo reduces in place on every rank, the root or not.
            summed = out.copy_(part) if root == rank else part.clone()
            dist.reduce(summed, group=group, group_dst=root)
