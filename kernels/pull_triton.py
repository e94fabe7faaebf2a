"""Combine over peer-mapped memory in which the addends lie already: each owner reads its rows from all ranks.

How the ranks meet, and the terms used, stand in ``peer_triton``.
"""

import triton
import triton.language as tl
from rocm_dp.kernels.peer_triton import (
    arrive,
    buffer_of,
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


# fmt: off
@triton.jit(
    do_not_specialize=[
        *("table", "place", "counts", "h0", "h1", "h2", "h3", "s0", "s1", "s2", "s3"),
        *("first", "rank", "tag", "rows", "most", "looks", "out", "vecs", "out_rows"),
    ]
)
def pull_rows(
    table, place, counts, h0, h1, h2, h3, s0, s1, s2, s3, first, rank, tag, rows, most, looks,
    out, vecs, out_rows,
    DTYPE: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    W: tl.constexpr, W_POW2: tl.constexpr, R: tl.constexpr, DP_POW2: tl.constexpr, REPLICAS: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """Sum this rank's share of its dp rank's rows over the buffers of all ranks, in rank order, in float32.

    The first numbers are those of ``gather_rows``. Every rank's addends [rows, ...] of DTYPE lie at the begin of
    its buffer, ``vecs`` vectors of B bytes in a row. ``out`` gets the rows of the share; it is zeroed behind its
    dp rank's rows, up to ``out_rows``.

    There is one buffer, and its slot is always the one used last: the call waits until all peers are in it, so
    have written their addends, and again until all have read them, so that they may be overwritten.
    """
    UNITS: tl.constexpr = BLOCK * 8 // DTYPE.primitive_bitwidth
    table = pointer_at(table, tl.int64, 8)
    channel = table + place
    plan = (counts, h0, h1, h2, h3, s0, s1, s2, s3, most.to(tl.int64))
    who = (first.to(tl.int64), rank.to(tl.int64))
    rows = rows.to(tl.int64)
    row = vecs.to(tl.int64) * (B * 8 // DTYPE.primitive_bitwidth)
    flags = flags_of(channel, who, W, W_POW2, R)
    epoch, looks = enter(table, channel, flags, who, tag, looks, W, W_POW2)
    origin = start_of(plan, who[0] // REPLICAS, DP_POW2, ON_DEVICE)
    begin, low, high = share_of(plan, who[1], origin, rows, DP_POW2, REPLICAS, ON_DEVICE)
    result = pointer_at(out, DTYPE, B)
    lane = tl.arange(0, UNITS)
    stride = tl.num_programs(0).to(tl.int64) * UNITS
    if looks > 0:
        for at in range(low * row + tl.program_id(0).to(tl.int64) * UNITS, high * row, stride):
            inside = lane < tl.minimum(high * row - at, UNITS).to(tl.int32)
            total = tl.zeros([UNITS], tl.float32)
            for turn in tl.static_range(W):
                addends = buffer_of(channel, who[0] + turn, 0, DTYPE) + (begin * row + at) + lane
                total += tl.load(addends, mask=inside).to(tl.float32)
            tl.store(result + at + lane, total.to(DTYPE), mask=inside)
        arrive(flags[0], who, epoch + 1, tag, W, W_POW2)
        leave(channel, epoch + 1, tag)
        looks, missing, named = wait(flags[1], who, epoch + 1, tag, looks, W, W_POW2)
        report(table, channel, epoch + 1, missing, named)
    else:
        fill(result, low * row, high * row, float("nan"), DTYPE, UNITS)
        leave(channel, epoch + 1, tag)
    fill(result, held_by(plan, who[1] // REPLICAS, ON_DEVICE) * row, out_rows.to(tl.int64) * row, 0.0, DTYPE, UNITS)
