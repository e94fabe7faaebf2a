"""Triton kernels that move rows whose place and number are read on the device.

Shapes: S source rows, D destination rows, V vectors of VEC units in a row. Memory is moved in units of 1 to 8
bytes, VEC of them at once where a row's bytes and both pointers allow 16-byte accesses. Every product of rows
and units is an int64; a block strides over the rows, so a grid never depends on what the device reads.
"""

import triton
import triton.language as tl
from rocm_dp.kernels.launch import Launcher


@triton.jit
def _clamp(value, low, high):
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def _move(dst, src, first, last, begin, end, shift, BLOCK: tl.constexpr):
    """``dst[e] = src[e - shift] if begin <= e < end else 0`` for every unit ``first <= e < last``.

    The places of a block are 64-bit, those within it 32-bit: sixteen 64-bit comparisons a thread would cost more
    than the memory does. Most blocks lie inside the region and need none at all.
    """
    lane = tl.arange(0, BLOCK)
    block = tl.program_id(0).to(tl.int64) * BLOCK
    for at in range(first + block, last, tl.num_programs(0).to(tl.int64) * BLOCK):
        low = _clamp(begin - at, 0, BLOCK).to(tl.int32)
        high = _clamp(end - at, 0, BLOCK).to(tl.int32)
        to = dst + at
        source = src + (at - shift)
        if (low == 0) & (high == BLOCK):
            tl.store(to + lane, tl.load(source + lane))
        else:
            moved = tl.load(source + lane, mask=(lane >= low) & (lane < high), other=0)
            tl.store(to + lane, moved, mask=lane < _clamp(last - at, 0, BLOCK).to(tl.int32))


@triton.jit(do_not_specialize=["start", "count", "src_rows", "dst_rows", "row_vecs"])
def move_rows(
    dst,
    src,
    start,
    count,
    status,
    src_rows,
    dst_rows,
    row_vecs,
    READ: tl.constexpr,
    FILL: tl.constexpr,
    ON_DEVICE: tl.constexpr,
    REPORT: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``dst[start + i] = src[i]`` for ``i < count``; with READ ``dst[i] = src[start + i]``; FILL zeroes the rest.

    Row ``r`` of dst takes row ``r - shift`` of src, for ``begin <= r < end``: the rows that both tensors have.
    Example: S 5, D 20, start 3, count 5 writes rows 3 to 7; S 2, D 64, start 10, count 40 writes rows 10 and 11
    and reports (10, 40). With ON_DEVICE start and count are pointers.
    """
    if ON_DEVICE:
        start = tl.load(start)
        count = tl.load(count)
    start = start.to(tl.int64)
    count = count.to(tl.int64)
    src_rows = src_rows.to(tl.int64)
    dst_rows = dst_rows.to(tl.int64)
    if READ:
        shift = -_clamp(start, -dst_rows, src_rows)
        end = tl.minimum(_clamp(count, 0, dst_rows), shift + src_rows)
        fits = (count <= dst_rows) & (start <= src_rows - count)
    else:
        shift = _clamp(start, -src_rows, dst_rows)
        end = tl.minimum(shift + _clamp(count, 0, src_rows), dst_rows)
        fits = (count <= src_rows) & (start <= dst_rows - count)
    begin = tl.maximum(shift, 0)
    end = tl.maximum(end, begin)
    if REPORT:
        bad = (tl.program_id(0) == 0) & ((start < 0) | (count < 0) | (fits == 0))
        tl.store(status, 1, mask=bad)
        tl.store(status + 1, start, mask=bad)
        tl.store(status + 2, count, mask=bad)
    row = row_vecs.to(tl.int64) * VEC
    if FILL:
        _move(dst, src, row * 0, dst_rows * row, begin * row, end * row, shift * row, BLOCK)
    else:
        _move(dst, src, begin * row, end * row, begin * row, end * row, shift * row, BLOCK)


@triton.jit(do_not_specialize=["size", "packed_rows", "row_vecs", "align"])
def repack_rows(
    dst,
    src,
    counts,
    status,
    size,
    packed_rows,
    row_vecs,
    align,
    EXPAND: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_POW2: tl.constexpr,
    REPORT: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move every rank's rows between the padded layout (``size`` rows each) and the packed one.

    Packed, rank d starts at ``sum of round_up(counts[k], align) for k < d``. Axis 1 of the grid is the rank;
    without EXPAND one more program zeroes what lies behind the last rank. Example: size 4, counts (3, 1): padded
    rows 0 1 2 - 4 - - - are packed rows 0 1 2 4. Counts are clamped to ``[0, size]`` and to the packed rows.
    """
    rank = tl.program_id(1)
    each = tl.arange(0, RANKS_POW2)
    wanted = tl.load(counts + each, mask=each < RANKS, other=0).to(tl.int64)
    size = size.to(tl.int64)
    packed_rows = packed_rows.to(tl.int64)
    held = _clamp(wanted, 0, size)
    padded = (held + align - 1) // align * align
    before = tl.sum(tl.where(each < rank, padded, 0))
    mine = tl.sum(tl.where(each == rank, held, 0))
    room = tl.sum(tl.where(each == rank, padded, 0))
    if REPORT:
        overfull = tl.sum(padded) > packed_rows
        wrong = tl.max(tl.where(wanted == held, 0, 1)) > 0
        bad = (tl.program_id(0) == 0) & (rank == 0) & (overfull | wrong)
        tl.store(status, 1, mask=bad)
        tl.store(status + 1, tl.sum(wanted), mask=bad)
        tl.store(status + 2, tl.max(tl.where(each < RANKS, wanted, tl.min(wanted))), mask=bad)
    row = row_vecs.to(tl.int64) * VEC
    if EXPAND:
        begin = rank.to(tl.int64) * size
        last = begin + size
        source = before
        end = begin + tl.minimum(mine, tl.maximum(packed_rows - before, 0))
    else:
        begin = tl.minimum(before, packed_rows)
        # The program behind the last rank has no rows of its own, and zeroes to the end.
        last = tl.minimum(tl.where(rank == RANKS, packed_rows, before + room), packed_rows)
        source = tl.minimum(rank, RANKS - 1).to(tl.int64) * size
        end = tl.minimum(begin + mine, last)
    _move(dst, src, begin * row, last * row, begin * row, end * row, (begin - source) * row, BLOCK)


INTERPRETED = not isinstance(move_rows, triton.JITFunction)

launch_move_rows = Launcher(move_rows, moved=2)
launch_repack_rows = Launcher(repack_rows, moved=2)
