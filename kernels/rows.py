"""Rows moved to where the device says, as many as it says, in one launch and without asking the host.

``start``, ``count`` and ``counts`` are int32 or int64 tensors on the device of the rows; a host int does for
``start`` and ``count`` too. Rows lie in dimension 0 of contiguous tensors of any dtype and row length. Nothing
outside either tensor is touched, whatever the numbers say: rows without a place are dropped. A ``status`` made
by ``new_status`` remembers that this happened until ``check_status`` asks.

On a GPU the moves are Triton kernels, elsewhere plain torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from rocm_dp.kernels import rows_torch

rows_triton: ModuleType | None
try:
    from rocm_dp.kernels import rows_triton
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    rows_triton = None  # plain torch does, on any device

if TYPE_CHECKING:
    from types import ModuleType

Scalar: TypeAlias = "torch.Tensor | int"

_UNITS = {16: torch.int32, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
# 128 threads that move 32 bytes each: two 16-byte accesses in flight in each of two waves of 64 lanes (gfx942 and
# gfx950) or four warps of 32 (NVIDIA). Small blocks spread evenly over 304, 256 or 132 compute units, so that the
# last wave of blocks is short: on an H200, the only one of them measured, larger blocks lost up to 8 % at 100 MiB.
# Narrow units are limited by the number of accesses, not by bytes: eight a thread.
_THREADS = 128
_BLOCK_BYTES = 4096
_MAX_BLOCK = 1024  # units
_MAX_GRID = 65535
_MAX_ALIGN = 2**31  # sums of rounded counts stay within 64 bits
_STATUS_WORDS = 3  # whether rows were dropped, and the two numbers that said so


class Shape(NamedTuple):
    """How memory is cut for a launch: units of ``dtype``, ``vec`` of them at once, ``block`` of them a block."""

    dtype: torch.dtype
    vec: int
    block: int

    @property
    def vec_bytes(self) -> int:
        """Bytes of one memory access."""
        return self.vec * self.dtype.itemsize


def shape_for(row_bytes: int, *pointers: int) -> Shape:
    """Return the widest accesses, up to 16 bytes, that rows of ``row_bytes`` at ``pointers`` allow."""
    unit = math.gcd(16, row_bytes, *pointers)
    dtype = _UNITS[unit]
    return Shape(dtype, unit // dtype.itemsize, min(_MAX_BLOCK, _BLOCK_BYTES // dtype.itemsize))


def new_status(device: torch.device | str) -> torch.Tensor:
    """Return a status word for calls on ``device``: int64 [3], all zero while everything fitted."""
    return torch.zeros(_STATUS_WORDS, dtype=torch.int64, device=device)


def check_status(status: torch.Tensor) -> None:
    """Raise IndexError if a call with this ``status`` had to drop rows; waits for the device, then clears it."""
    bad, first, second = status.tolist()
    if bad:
        status.zero_()
        raise IndexError(
            f"rows were dropped: the device said start {first}, count {second} (or counts with sum {first}, "
            f"largest {second}), which the tensors have no room for"
        )


def write_rows(
    dst: torch.Tensor, src: torch.Tensor, *, start: Scalar, count: Scalar, status: torch.Tensor | None = None
) -> None:
    """``dst[start : start + count] = src[:count]``; other rows of ``dst`` [D, ...] keep their values."""
    _move(dst, src, start, count, status, read=False, fill=False)


def place_rows(
    dst: torch.Tensor, src: torch.Tensor, *, start: Scalar, count: Scalar, status: torch.Tensor | None = None
) -> None:
    """``dst[start : start + count] = src[:count]``, and every other row of ``dst`` [D, ...] becomes zero."""
    _move(dst, src, start, count, status, read=False, fill=True)


def read_rows(
    dst: torch.Tensor, src: torch.Tensor, *, start: Scalar, count: Scalar, status: torch.Tensor | None = None
) -> None:
    """``dst[:count] = src[start : start + count]``, and every other row of ``dst`` [D, ...] becomes zero."""
    _move(dst, src, start, count, status, read=True, fill=True)


def compact_rows(
    dst: torch.Tensor,
    src: torch.Tensor,
    *,
    counts: torch.Tensor,
    align: int = 1,
    status: torch.Tensor | None = None,
) -> None:
    """Pack the real rows of ``src``, padded to equal size for each rank, into ``dst``; its other rows are zero.

    MAX_LEN to SUM_LEN: ``counts`` [W], ``src`` [W * size, ...]; in ``dst`` rank d starts at the sum of the counts
    before it, each rounded up to ``align``.
    """
    _repack(dst, src, counts, align, status, expand=False)


def expand_rows(
    dst: torch.Tensor,
    src: torch.Tensor,
    *,
    counts: torch.Tensor,
    align: int = 1,
    status: torch.Tensor | None = None,
) -> None:
    """Spread the packed rows of ``src`` into ``dst`` [W * size, ...], padding rows zero: the way back."""
    _repack(dst, src, counts, align, status, expand=True)


def _move(
    dst: torch.Tensor,
    src: torch.Tensor,
    start: Scalar,
    count: Scalar,
    status: torch.Tensor | None,
    *,
    read: bool,
    fill: bool,
) -> None:
    _check_rows(dst, src)
    on_device = isinstance(start, torch.Tensor)
    if on_device != isinstance(count, torch.Tensor):
        raise TypeError(f"start and count must both be tensors or both ints, got {start!r} and {count!r}")
    for name, value in (("start", start), ("count", count)):
        _check_numbers(name, value, dst, 1)
    _check_status(status, dst)
    if status is None and not (dst.numel() and (fill or src.numel())):
        return
    if rows_triton is None or not _by_triton(dst):
        rows_torch.move_rows(dst, src, start, count, status, read=read, fill=fill)
        return
    rows = dst.shape[0] if fill else min(dst.shape[0], src.shape[0])
    shape, row_vecs = _cut(dst, src)
    rows_triton.launch_move_rows(
        (_blocks(rows * row_vecs * shape.vec, shape), 1, 1),
        (dst, src, start, count, status, src.shape[0], dst.shape[0], row_vecs),
        {
            "READ": read,
            "FILL": fill,
            "ON_DEVICE": on_device,
            "REPORT": status is not None,
            "VEC": shape.vec,
            "BLOCK": shape.block,
        },
        unit=shape.dtype,
        warps=_warps(),
    )


def _repack(
    dst: torch.Tensor,
    src: torch.Tensor,
    counts: torch.Tensor,
    align: int,
    status: torch.Tensor | None,
    *,
    expand: bool,
) -> None:
    _check_rows(dst, src)
    ranks = counts.numel()
    _check_numbers("counts", counts, dst, ranks)
    padded, name = (dst, "dst") if expand else (src, "src")
    if not ranks or padded.shape[0] % ranks:
        raise ValueError(
            f"{name} must hold an equal number of rows for each of {ranks} ranks, got {padded.shape[0]}"
        )
    if not 1 <= align <= _MAX_ALIGN:
        raise ValueError(f"align must be from 1 to {_MAX_ALIGN}, got {align}")
    size = padded.shape[0] // ranks
    _check_status(status, dst)
    if status is None and not dst.numel():
        return
    if rows_triton is None or not _by_triton(dst):
        rows_torch.repack_rows(dst, src, counts, status, size=size, align=align, expand=expand)
        return
    shape, row_vecs = _cut(dst, src)
    packed_rows = src.shape[0] if expand else dst.shape[0]
    rows_triton.launch_repack_rows(
        (_blocks(size * row_vecs * shape.vec, shape), ranks + (not expand), 1),
        (dst, src, counts, status, size, packed_rows, row_vecs, align),
        {
            "EXPAND": expand,
            "RANKS": ranks,
            "RANKS_POW2": 1 << (ranks - 1).bit_length(),
            "REPORT": status is not None,
            "VEC": shape.vec,
            "BLOCK": shape.block,
        },
        unit=shape.dtype,
        warps=_warps(),
    )


def _check_rows(dst: torch.Tensor, src: torch.Tensor) -> None:
    for name, tensor in (("dst", dst), ("src", src)):
        if tensor.dim() < 1 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous with rows in dimension 0, got {_describe(tensor)}")
    if (dst.shape[1:], dst.dtype, dst.device) != (src.shape[1:], src.dtype, src.device):
        raise ValueError(f"rows must be alike: dst is {_describe(dst)}, src is {_describe(src)}")
    apart = src.data_ptr() - dst.data_ptr()
    if -src.numel() * src.itemsize < apart < dst.numel() * dst.itemsize and src.numel() and dst.numel():
        raise ValueError("dst and src must not overlap in memory")


def _check_numbers(name: str, value: Scalar, dst: torch.Tensor, wanted: int) -> None:
    if not isinstance(value, torch.Tensor):
        if type(value) is not int or not -(2**63) <= value < 2**63:
            raise ValueError(f"{name} must be a tensor or an int of 64 bits, got {value!r}")
        return
    if value.dtype not in (torch.int32, torch.int64) or value.dim() > 1 or value.numel() != wanted:
        raise ValueError(f"{name} must be {wanted} int32 or int64 numbers, got {_describe(value)}")
    if not value.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {value.stride()}")
    if value.device != dst.device:
        raise ValueError(f"{name} must be on {dst.device}, where the rows are, got {value.device}")


def _check_status(status: torch.Tensor | None, dst: torch.Tensor) -> None:
    if status is None:
        return
    right = status.dtype == torch.int64 and status.numel() == _STATUS_WORDS and status.is_contiguous()
    if not right or status.device != dst.device:
        raise ValueError(f"status must come from new_status({str(dst.device)!r}), got {_describe(status)}")


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def _by_triton(tensor: torch.Tensor) -> bool:
    # Under TRITON_INTERPRET=1 kernels take tensors of the CPU.
    return rows_triton is not None and (tensor.is_cuda or rows_triton.INTERPRETED)


def _cut(dst: torch.Tensor, src: torch.Tensor) -> tuple[Shape, int]:
    """Return how memory is cut, and the vectors of one row."""
    row_bytes = math.prod(dst.shape[1:]) * dst.itemsize
    # The place in the storage too: without rows the address is 0, and torch views no odd place in wider units.
    begins = [begin for one in (dst, src) for begin in (one.data_ptr(), int(one.storage_offset()) * one.itemsize)]
    shape = shape_for(row_bytes, *begins)
    return shape, row_bytes // shape.vec_bytes


def _blocks(units: int, shape: Shape) -> int:
    return max(1, min(-(-units // shape.block), _MAX_GRID))


def _warps() -> int:
    return _THREADS // (64 if torch.version.hip else 32)
