"""Combine over peer-mapped memory: addends are pushed to the owner of their rows, who sums.

How the ranks meet, and the terms used, stand in ``peer_triton``.
"""

import triton
import triton.language as tl
from rocm_dp.kernels.peer_triton import (
    HEAD,
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


@triton.jit
def _push_addends(
    given,
    channel,
    plan,
    who,
    offset,
    stage,
    rows,
    row,
    after,
    until,
    DTYPE: tl.constexpr,
    UNITS: tl.constexpr,
    W: tl.constexpr,
    DP_POW2: tl.constexpr,
    REPLICAS: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """Write this block's part of each peer's rows, units ``after`` to ``until`` of them, into its staging area."""
    first, rank = who
    origin = start_of(plan, first // REPLICAS, DP_POW2, ON_DEVICE)
    lane = tl.arange(0, UNITS)
    stride = tl.num_programs(0).to(tl.int64) * UNITS
    for turn in range(1, W):
        peer = first + (rank - first + turn) % W
        begin, low, high = share_of(plan, peer, origin, rows, DP_POW2, REPLICAS, ON_DEVICE)
        size = tl.minimum(high - low, stage) * row
        to = buffer_of(channel, peer, offset, DTYPE)
        for at in range(after + tl.program_id(0).to(tl.int64) * UNITS, tl.minimum(size, until), stride):
            inside = lane < tl.minimum(size - at, UNITS).to(tl.int32)
            addends = tl.load(given + ((begin + low) * row + at) + lane, mask=inside)
            tl.store(to + at + lane, addends, mask=inside)


@triton.jit
def add_up(
    result,
    here,
    staged,
    stage_bytes,
    own,
    spoilt,
    after,
    until,
    DTYPE: tl.constexpr,
    B: tl.constexpr,
    UNITS: tl.constexpr,
    W: tl.constexpr,
):
    """Sum this block's part of units ``after`` to ``until`` of the own rows, in the order of the participants.

    The addends of participant ``own`` lie at the address ``here``, those of k at ``staged + k * stage_bytes``.
    """
    lane = tl.arange(0, UNITS)
    stride = tl.num_programs(0).to(tl.int64) * UNITS
    for at in range(after + tl.program_id(0).to(tl.int64) * UNITS, until, stride):
        inside = lane < tl.minimum(until - at, UNITS).to(tl.int32)
        total = tl.zeros([UNITS], tl.float32) + spoilt
        for turn in tl.static_range(W):
            addends = pointer_at(tl.where(turn == own, here, staged + turn * stage_bytes), DTYPE, B) + at + lane
            total += tl.load(addends, mask=inside).to(tl.float32)
        tl.store(result + at + lane, total.to(DTYPE), mask=inside)


# fmt: off
@triton.jit(
    do_not_specialize=[
        *("table", "place", "counts", "h0", "h1", "h2", "h3", "s0", "s1", "s2", "s3"),
        *("first", "rank", "tag", "rows", "most", "looks"),
        *("partial", "out", "offset", "vecs", "stage_rows", "out_rows", "steps", "turns"),
    ]
)
def combine_rows(
    table, place, counts, h0, h1, h2, h3, s0, s1, s2, s3, first, rank, tag, rows, most, looks,
    partial, out, offset, vecs, stage_rows, out_rows, steps, turns,
    STEPPED: tl.constexpr, DTYPE: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr,
    W: tl.constexpr, W_POW2: tl.constexpr, R: tl.constexpr, DP_POW2: tl.constexpr, REPLICAS: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """Push each owner's rows of ``partial`` into its staging area; sum what arrived in rank order, in float32.

    The first numbers are those of ``gather_rows``. ``partial`` [rows, ...] and ``out`` of DTYPE, ``vecs`` vectors
    of B bytes in a row. Rank r's staging area, ``offset`` bytes into its buffer, has a part for each participant,
    with room for ``stage_rows``, rounded up to 16 bytes. A participant owns its share of its dp rank's rows, and
    writes those of ``out``; it also zeroes ``out`` behind its dp rank's rows, up to ``out_rows``.

    STEPPED, the work is cut into ``steps`` of ``turns`` turns of all blocks: what one step pushed is summed while
    the next is pushed; otherwise it is one. The order of a sum is the same on all ranks and in every run.
    """
    SIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8
    UNITS: tl.constexpr = BLOCK // SIZE
    table = pointer_at(table, tl.int64, 8)
    channel = table + place
    plan = (counts, h0, h1, h2, h3, s0, s1, s2, s3, most.to(tl.int64))
    who = (first.to(tl.int64), rank.to(tl.int64))
    own = who[1] - who[0]
    rows, stage = rows.to(tl.int64), stage_rows.to(tl.int64)
    row = vecs.to(tl.int64) * (B // SIZE)
    stage_bytes = (stage * row * SIZE + 15) // 16 * 16
    to = offset + own * stage_bytes
    flags = flags_of(channel, who, W, W_POW2, R)
    epoch, looks = enter(table, channel, flags, who, tag, looks, W, W_POW2)
    origin = start_of(plan, who[0] // REPLICAS, DP_POW2, ON_DEVICE)
    begin, low, high = share_of(plan, who[1], origin, rows, DP_POW2, REPLICAS, ON_DEVICE)
    size = tl.minimum(high - low, stage) * row
    given, result = pointer_at(partial, DTYPE, B), pointer_at(out, DTYPE, B)
    here = partial.to(tl.int64) + (begin + low) * row * SIZE
    staged = tl.load(channel + HEAD + who[1]) + offset
    missing = tl.where(looks > 0, epoch * 0, -1)
    if STEPPED:
        reach = tl.num_programs(0).to(tl.int64) * UNITS * turns.to(tl.int64)
        for step in range(steps + 1):
            after = step * reach
            if (step < steps) & (missing == 0):
                _push_addends(
                    *(given, channel, plan, who, to, stage, rows, row, after, after + reach),
                    *(DTYPE, UNITS, W, DP_POW2, REPLICAS, ON_DEVICE),
                )
                arrive(flags[0], who, epoch + step + 1, tag, W, W_POW2)
            if step == 0:
                leave(channel, epoch + steps, tag)
            else:
                if missing == 0:
                    looks, missing, named = wait(flags[1], who, epoch + step, tag, looks, W, W_POW2)
                    report(table, channel, epoch + step, missing, named)
                spoilt = tl.where(missing != 0, float("nan"), 0.0)
                until = tl.minimum(size, after)
                add_up(
                    *(result + low * row, here, staged, stage_bytes, own, spoilt, after - reach, until),
                    *(DTYPE, B, UNITS, W),
                )
    else:
        if missing == 0:
            _push_addends(
                *(given, channel, plan, who, to, stage, rows, row, low * 0, rows * row),
                *(DTYPE, UNITS, W, DP_POW2, REPLICAS, ON_DEVICE),
            )
            arrive(flags[0], who, epoch + 1, tag, W, W_POW2)
            leave(channel, epoch + 1, tag)
            looks, missing, named = wait(flags[1], who, epoch + 1, tag, looks, W, W_POW2)
            report(table, channel, epoch + 1, missing, named)
        else:
            leave(channel, epoch + 1, tag)
        spoilt = tl.where(missing != 0, float("nan"), 0.0)
        add_up(
            *(result + low * row, here, staged, stage_bytes, own, spoilt, low * 0, size),
            *(DTYPE, B, UNITS, W),
        )
    fill(result, held_by(plan, who[1] // REPLICAS, ON_DEVICE) * row, out_rows.to(tl.int64) * row, 0.0, DTYPE, UNITS)
