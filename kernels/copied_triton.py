"""What is left to kernels when copy engines move the rows: make room, meet the peers, add up.

How the ranks meet, and the terms used, stand in ``peer_triton``. A call is: ``open_slot`` once graphs are replayed,
the copies, ``meet``, and for a combine ``sum_rows``, one after the other on a stream. While it waits for the peers
it holds one wave.
"""

import triton
import triton.language as tl
from rocm_dp.kernels.combine_triton import add_up
from rocm_dp.kernels.gather_triton import spoil
from rocm_dp.kernels.peer_triton import (
    HEAD,
    arrive,
    enter,
    fill,
    flags_of,
    held_by,
    leave,
    pointer_at,
    report,
    share_of,
    start_of,
    wait,
)


@triton.jit(do_not_specialize=["table", "place", "first", "rank", "tag", "looks"])
def open_slot(table, place, first, rank, tag, looks, W: tl.constexpr, W_POW2: tl.constexpr, R: tl.constexpr):
    """Wait, if the slot is the one used last, until all peers have read it; in one block, ahead of the copies."""
    table = pointer_at(table, tl.int64, 8)
    channel = table + place
    who = (first.to(tl.int64), rank.to(tl.int64))
    flags = flags_of(channel, who, W, W_POW2, R)
    epoch, looks = enter(table, channel, flags, who, tag, looks, W, W_POW2)
    tl.store(channel, epoch)
    tl.store(channel + 2, (tag ^ 1).to(tl.int64))


# fmt: off
@triton.jit(
    do_not_specialize=[
        *("table", "place", "counts", "h0", "h1", "h2", "h3", "s0", "s1", "s2", "s3"),
        *("first", "rank", "tag", "rows", "most", "looks"),
        *("f0", "o0", "v0", "f1", "o1", "v1", "f2", "o2", "v2", "f3", "o3", "v3"),
    ]
)
def meet(
    table, place, counts, h0, h1, h2, h3, s0, s1, s2, s3, first, rank, tag, rows, most, looks,
    f0, o0, v0, f1, o1, v1, f2, o2, v2, f3, o3, v3,
    B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, B3: tl.constexpr, BLOCK: tl.constexpr,
    W: tl.constexpr, W_POW2: tl.constexpr, R: tl.constexpr, DP_POW2: tl.constexpr, REPLICAS: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """Tell the peers that the copies queued before are with them, and wait for theirs; in one block.

    The numbers are those of ``gather_rows``: what did not come of its fields is spoilt. Without a field: a combine.
    """
    table = pointer_at(table, tl.int64, 8)
    channel = table + place
    plan = (counts, h0, h1, h2, h3, s0, s1, s2, s3, most.to(tl.int64))
    who = (first.to(tl.int64), rank.to(tl.int64))
    rows = rows.to(tl.int64)
    flags = flags_of(channel, who, W, W_POW2, R)
    epoch, looks = enter(table, channel, flags, who, tag, looks, W, W_POW2)
    epoch += 1
    missing = epoch * 0 - 1
    if looks > 0:
        arrive(flags[0], who, epoch, tag, W, W_POW2)
        looks, missing, named = wait(flags[1], who, epoch, tag, looks, W, W_POW2)
        report(table, channel, epoch, missing, named)
    leave(channel, epoch, tag)
    if missing != 0:
        if B0 > 0:
            spoil((f0, o0, v0), channel, plan, who, rows, missing, B0, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)
        if B1 > 0:
            spoil((f1, o1, v1), channel, plan, who, rows, missing, B1, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)
        if B2 > 0:
            spoil((f2, o2, v2), channel, plan, who, rows, missing, B2, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)
        if B3 > 0:
            spoil((f3, o3, v3), channel, plan, who, rows, missing, B3, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)


@triton.jit(
    do_not_specialize=[
        *("table", "place", "counts", "h0", "h1", "h2", "h3", "s0", "s1", "s2", "s3"),
        *("first", "rank", "rows", "most", "partial", "out", "offset", "vecs", "stage_rows", "out_rows"),
    ]
)
def sum_rows(
    table, place, counts, h0, h1, h2, h3, s0, s1, s2, s3, first, rank, rows, most,
    partial, out, offset, vecs, stage_rows, out_rows,
    DTYPE: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    W: tl.constexpr, DP_POW2: tl.constexpr, REPLICAS: tl.constexpr, ON_DEVICE: tl.constexpr,
):
    """Sum what lies in the own staging area, as ``combine_rows`` does, and with the same of its numbers.

    Once a wait has run out every row it writes is NaN.
    """
    SIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8
    UNITS: tl.constexpr = BLOCK // SIZE
    table = pointer_at(table, tl.int64, 8)
    plan = (counts, h0, h1, h2, h3, s0, s1, s2, s3, most.to(tl.int64))
    first, rank = first.to(tl.int64), rank.to(tl.int64)
    rows, stage = rows.to(tl.int64), stage_rows.to(tl.int64)
    row = vecs.to(tl.int64) * (B // SIZE)
    origin = start_of(plan, first // REPLICAS, DP_POW2, ON_DEVICE)
    begin, low, high = share_of(plan, rank, origin, rows, DP_POW2, REPLICAS, ON_DEVICE)
    size = tl.minimum(high - low, stage) * row
    result = pointer_at(out, DTYPE, B)
    here = partial.to(tl.int64) + (begin + low) * row * SIZE
    staged = tl.load(table + place + HEAD + rank) + offset
    stage_bytes = (stage * row * SIZE + 15) // 16 * 16
    spoilt = tl.where(tl.load(table) != 0, float("nan"), 0.0)
    add_up(
        *(result + low * row, here, staged, stage_bytes, rank - first, spoilt, low * 0, size),
        *(DTYPE, B, UNITS, W),
    )
    fill(result, held_by(plan, rank // REPLICAS, ON_DEVICE) * row, out_rows.to(tl.int64) * row, 0.0, DTYPE, UNITS)
