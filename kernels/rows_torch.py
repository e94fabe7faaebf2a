"""The row moves of ``rows_triton`` in plain torch, for machines without triton. Synchronises with the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rocm_dp.kernels.rows import Scalar


def move_rows(
    dst: torch.Tensor,
    src: torch.Tensor,
    start: Scalar,
    count: Scalar,
    status: torch.Tensor | None,
    *,
    read: bool,
    fill: bool,
) -> None:
    """See ``rows_triton.move_rows``."""
    start, count = int(start), int(count)
    src_rows, dst_rows = src.shape[0], dst.shape[0]
    here, there = (dst_rows, src_rows) if read else (src_rows, dst_rows)
    if status is not None and not (0 <= count <= here and 0 <= start <= there - count):
        status.copy_(torch.tensor([1, start, count]))
    first = max(0, -start)
    rows = max(0, min(count, here, there - start) - first)
    near, far = slice(first, first + rows), slice(first + start, first + start + rows)
    into, out_of = (near, far) if read else (far, near)
    if rows:
        dst[into].copy_(src[out_of])
    if fill:
        for outside in (dst[: into.start], dst[into.stop :]) if rows else (dst,):
            if outside.numel():
                outside.zero_()


def repack_rows(
    dst: torch.Tensor,
    src: torch.Tensor,
    counts: torch.Tensor,
    status: torch.Tensor | None,
    *,
    size: int,
    align: int,
    expand: bool,
) -> None:
    """See ``rows_triton.repack_rows``."""
    packed_rows = src.shape[0] if expand else dst.shape[0]
    wanted = counts.tolist()
    held = [min(max(count, 0), size) for count in wanted]
    padded = [-(-count // align) * align for count in held]
    if status is not None and (held != wanted or sum(padded) > packed_rows):
        status.copy_(torch.tensor([1, sum(wanted), max(wanted)]))
    dst.zero_()
    at = 0
    for rank, (count, room) in enumerate(zip(held, padded, strict=True)):
        rows = max(0, min(count, packed_rows - at))
        packed, spread = slice(at, at + rows), slice(rank * size, rank * size + rows)
        into, out_of = (spread, packed) if expand else (packed, spread)
        dst[into] = src[out_of]
        at += room
