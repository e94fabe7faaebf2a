"""Gather over peer-mapped memory: every rank pushes its rows to all.

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


@triton.jit
def _part(field, at, end, B: tl.constexpr, BLOCK: tl.constexpr):
    """Load BLOCK bytes of the local rows of ``field`` from unit ``at`` on, up to unit ``end``."""
    UNIT: tl.constexpr = tl.int32 if B >= 4 else (tl.int16 if B == 2 else tl.int8)
    UNITS: tl.constexpr = BLOCK // 4 if B >= 4 else BLOCK // B
    lane = tl.arange(0, UNITS)
    return tl.load(pointer_at(field[0], UNIT, B) + at + lane, mask=lane < tl.minimum(end - at, UNITS).to(tl.int32))


@triton.jit
def _first_part(field, low, high, B: tl.constexpr, BLOCK: tl.constexpr):
    """Load what this block pushes first of rows ``low`` to ``high``."""
    UNITS: tl.constexpr = BLOCK // 4 if B >= 4 else BLOCK // B
    row = field[2].to(tl.int64) * (B // 4 if B >= 4 else 1)
    return _part(field, low * row + tl.program_id(0).to(tl.int64) * UNITS, high * row, B, BLOCK)


@triton.jit
def _push(field, part, channel, who, begin, low, high, B: tl.constexpr, BLOCK: tl.constexpr, W: tl.constexpr):
    """Write this block's part of rows ``low`` to ``high`` to row ``begin + low`` of every participant's field.

    ``part`` is what it writes first; while one part is written, the next is on its way.
    """
    UNIT: tl.constexpr = tl.int32 if B >= 4 else (tl.int16 if B == 2 else tl.int8)
    UNITS: tl.constexpr = BLOCK // 4 if B >= 4 else BLOCK // B
    row = field[2].to(tl.int64) * (B // 4 if B >= 4 else 1)
    first, rank = who
    lane = tl.arange(0, UNITS)
    stride = tl.num_programs(0).to(tl.int64) * UNITS
    end = high * row
    for at in range(low * row + tl.program_id(0).to(tl.int64) * UNITS, end, stride):
        inside = lane < tl.minimum(end - at, UNITS).to(tl.int32)
        behind = _part(field, at + stride, end, B, BLOCK)
        for turn in tl.static_range(1, W + 1):
            # Each rank goes round, itself last, so that no two of them crowd one link.
            peer = first + (rank - first + turn) % W
            tl.store(buffer_of(channel, peer, field[1], UNIT) + (begin * row + at) + lane, part, mask=inside)
        part = behind


@triton.jit
def _zero_gaps(
    field,
    channel,
    plan,
    who,
    rows,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
    W: tl.constexpr,
    DP_POW2: tl.constexpr,
    REPLICAS: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """Zero the rows of the own field that nobody holds: behind each dp rank's, and behind the last."""
    UNIT: tl.constexpr = tl.int32 if B >= 4 else (tl.int16 if B == 2 else tl.int8)
    UNITS: tl.constexpr = BLOCK // 4 if B >= 4 else BLOCK // B
    RANKS: tl.constexpr = W // REPLICAS
    row = field[2].to(tl.int64) * (B // 4 if B >= 4 else 1)
    own = buffer_of(channel, who[1], field[1], UNIT)
    lead = who[0] // REPLICAS
    origin = start_of(plan, lead, DP_POW2, ON_DEVICE)
    # With counts on the device the rows are packed: there is only the end.
    for turn in range(RANKS - 1 if ON_DEVICE else 0, RANKS):
        behind = start_of(plan, lead + turn, DP_POW2, ON_DEVICE) - origin + held_by(plan, lead + turn, ON_DEVICE)
        next_one = start_of(plan, lead + turn + 1, DP_POW2, ON_DEVICE) - origin
        until = tl.where(turn + 1 < RANKS, tl.minimum(next_one, rows), rows)
        fill(own, behind * row, until * row, 0, UNIT, UNITS)


@triton.jit
def spoil(
    field,
    channel,
    plan,
    who,
    rows,
    missing,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
    W: tl.constexpr,
    DP_POW2: tl.constexpr,
    REPLICAS: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """Write 0xFF over what the ``missing`` ranks should have brought of this block's part of the own field."""
    UNIT: tl.constexpr = tl.int32 if B >= 4 else (tl.int16 if B == 2 else tl.int8)
    UNITS: tl.constexpr = BLOCK // 4 if B >= 4 else BLOCK // B
    row = field[2].to(tl.int64) * (B // 4 if B >= 4 else 1)
    own = buffer_of(channel, who[1], field[1], UNIT)
    origin = start_of(plan, who[0] // REPLICAS, DP_POW2, ON_DEVICE)
    for turn in range(W):
        peer = who[0] + turn
        if (missing >> peer) & 1 != 0:
            begin, low, high = share_of(plan, peer, origin, rows, DP_POW2, REPLICAS, ON_DEVICE)
            fill(own, (begin + low) * row, (begin + high) * row, -1, UNIT, UNITS)


# fmt: off
@triton.jit(
    do_not_specialize=[
        *("table", "place", "counts", "h0", "h1", "h2", "h3", "s0", "s1", "s2", "s3"),
        *("first", "rank", "tag", "rows", "most", "looks"),
        *("f0", "o0", "v0", "f1", "o1", "v1", "f2", "o2", "v2", "f3", "o3", "v3"),
    ]
)
def gather_rows(
    table, place, counts, h0, h1, h2, h3, s0, s1, s2, s3, first, rank, tag, rows, most, looks,
    f0, o0, v0, f1, o1, v1, f2, o2, v2, f3, o3, v3,
    B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, B3: tl.constexpr, BLOCK: tl.constexpr,
    W: tl.constexpr, W_POW2: tl.constexpr, R: tl.constexpr, DP_POW2: tl.constexpr, REPLICAS: tl.constexpr,
    ON_DEVICE: tl.constexpr,
):
    """Push this rank's share of its dp rank's rows into every participant's buffer; zero the rows of nobody.

    ``table`` and the ``place`` (words) of the channel in it; ``most``: rows of a dp rank, at most. ``counts``
    int32 [dp ranks] on the device (ON_DEVICE), or ``h`` and ``s``: counts and starts of all dp ranks, two to a
    word. Of each of up to four fields: where its local rows lie (``f``), where its area begins in the buffer
    (``o``, bytes) and its vectors in a row (``v``), of B bytes; B 0: no field. A block moves BLOCK bytes at once.

    The ranks of a dp rank push a share each, so no row crosses a link twice. The result [rows, ...] lies in the own
    buffer; what does not fit is dropped. Example: counts (2, 0, 1), rows 4: a0 a1 c0 and a row of zeros everywhere.
    """
    table = pointer_at(table, tl.int64, 8)
    channel = table + place
    plan = (counts, h0, h1, h2, h3, s0, s1, s2, s3, most.to(tl.int64))
    who = (first.to(tl.int64), rank.to(tl.int64))
    rows = rows.to(tl.int64)
    a, b, c, d = (f0, o0, v0), (f1, o1, v1), (f2, o2, v2), (f3, o3, v3)
    origin = start_of(plan, who[0] // REPLICAS, DP_POW2, ON_DEVICE)
    begin, low, high = share_of(plan, who[1], origin, rows, DP_POW2, REPLICAS, ON_DEVICE)
    # Under way while the channel is looked at.
    part = _first_part(a, low, high, B0, BLOCK)
    flags = flags_of(channel, who, W, W_POW2, R)
    epoch, looks = enter(table, channel, flags, who, tag, looks, W, W_POW2)
    epoch += 1
    missing = epoch * 0 - 1
    if looks > 0:
        _push(a, part, channel, who, begin, low, high, B0, BLOCK, W)
        if B1 > 0:
            _push(b, _first_part(b, low, high, B1, BLOCK), channel, who, begin, low, high, B1, BLOCK, W)
        if B2 > 0:
            _push(c, _first_part(c, low, high, B2, BLOCK), channel, who, begin, low, high, B2, BLOCK, W)
        if B3 > 0:
            _push(d, _first_part(d, low, high, B3, BLOCK), channel, who, begin, low, high, B3, BLOCK, W)
        arrive(flags[0], who, epoch, tag, W, W_POW2)
        leave(channel, epoch, tag)
        _zero_gaps(a, channel, plan, who, rows, B0, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)
        if B1 > 0:
            _zero_gaps(b, channel, plan, who, rows, B1, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)
        if B2 > 0:
            _zero_gaps(c, channel, plan, who, rows, B2, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)
        if B3 > 0:
            _zero_gaps(d, channel, plan, who, rows, B3, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)
        looks, missing, named = wait(flags[1], who, epoch, tag, looks, W, W_POW2)
        report(table, channel, epoch, missing, named)
    else:
        leave(channel, epoch, tag)
    if missing != 0:
        spoil(a, channel, plan, who, rows, missing, B0, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)
        if B1 > 0:
            spoil(b, channel, plan, who, rows, missing, B1, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)
        if B2 > 0:
            spoil(c, channel, plan, who, rows, missing, B2, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)
        if B3 > 0:
            spoil(d, channel, plan, who, rows, missing, B3, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)
