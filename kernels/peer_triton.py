"""Gather and combine over peer-mapped memory, with one wait for the peers in each call.

Shapes: L local rows, G global rows, R ranks that share the memory, W of them that take part in a call (``first`` to
``first + W - 1``: all of them, or those of one dp rank or attention-tp group), V vectors of B bytes in a row. All
that take part launch the same grid. Addresses and numbers are int64.

**The table**, int64 on the own device. Row 0 is shared: [0] whether a wait ever ran out, [1] the address of a word
that the host reads. Every other row is a channel, one for each (verb, batch): [0] its epoch, [1] the blocks of this
call that are done with it, [2] the slot used last, [3] the epoch of a wait that ran out, [4] a mask of the ranks
that were missing, then the addresses of every rank's buffer and of its pad.

**Epochs.** A call's epochs follow the channel's. All of its blocks read that one, and the last block to come behind
its part advances it, so a replayed graph goes on counting. Of int64 it never wraps.

**One flag for each lane and peer.** Block b of rank r, having written its part to every peer, stores the epoch and
its slot into place (b, r) of each peer's pad (release) and waits until all places of its own lane have reached it
(acquire). A peer that is in the same epoch with the other slot made other calls: it counts as missing.
Equal blocks of all ranks wait for each other only, and blocks start in order, so a grid larger than the device
advances too.

**Two slots** make a second wait at the entry needless. A rank writes into a slot only after its call before
ended, so after every peer arrived in that one. A peer launches a call behind all that reads the result of the one
before it on the channel: nobody reads what is older. So it is enough that two calls in a row differ in their
slot. The host takes turns. Where turns don't add up (a graph with an odd number of calls is replayed) the slot is
the one used last, and the call first waits until all peers are in it, which is when they have read it. This holds
while a result is read only until the next call on its channel, on the stream that launches it.

**A wait that runs out** marks the missing ranks and the table; from then on no call of this rank writes to peers,
arrives or waits. What such a call returns is 0xFF in every byte that did not come: NaN in every float dtype.

Within the kernels a ``plan`` is (counts on the device, four words of counts, four of starts, most rows of a dp
rank); a ``field`` is (its rows, where its area begins in a buffer, V); ``who`` is (first, rank).
"""

import triton
import triton.language as tl

HEAD = tl.constexpr(5)  # words of a channel before its addresses


@triton.jit
def _two_a_word(a, b, c, d, index):
    """Number ``index`` of those of 31 bits that the host packed two to a word."""
    word = tl.where(index < 2, a, tl.where(index < 4, b, tl.where(index < 6, c, d)))
    return (word >> ((index % 2) * 32).to(tl.int64)) & 0x7FFFFFFF


@triton.jit
def _at(address, UNIT: tl.constexpr, B: tl.constexpr):
    """A pointer to units at an address that is a multiple of B bytes."""
    return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(UNIT)), B)


@triton.jit
def _held(plan, dp, ON_DEVICE: tl.constexpr):
    """How many rows dp rank ``dp`` holds."""
    if ON_DEVICE:
        held = tl.load(_at(plan[0], tl.int32, 4) + dp).to(tl.int64)
        held = tl.minimum(tl.maximum(held, 0), plan[9])
    else:
        held = _two_a_word(plan[1], plan[2], plan[3], plan[4], dp)
    return held


@triton.jit
def _start(plan, dp, DP_POW2: tl.constexpr, ON_DEVICE: tl.constexpr):
    """Where the rows of dp rank ``dp`` begin in the global buffer."""
    if ON_DEVICE:
        each = tl.arange(0, DP_POW2)
        before = tl.load(_at(plan[0], tl.int32, 4) + each, mask=each < dp, other=0)
        start = tl.sum(tl.minimum(tl.maximum(before.to(tl.int64), 0), plan[9]))
    else:
        start = _two_a_word(plan[5], plan[6], plan[7], plan[8], dp)
    return start


@triton.jit
def _share(plan, rank, origin, rows, DP_POW2: tl.constexpr, REPLICAS: tl.constexpr, ON_DEVICE: tl.constexpr):
    """Where a rank's dp rank begins behind ``origin``, and which of its rows are the rank's share: [low, high)."""
    dp, part = rank // REPLICAS, rank % REPLICAS
    held = _held(plan, dp, ON_DEVICE)
    begin = _start(plan, dp, DP_POW2, ON_DEVICE) - origin
    return begin, part * held // REPLICAS, tl.minimum((part + 1) * held // REPLICAS, rows - begin)


@triton.jit
def _buffer(channel, rank, offset, UNIT: tl.constexpr):
    """Where a rank's buffer lies, ``offset`` bytes in."""
    return _at(tl.load(channel + HEAD + rank) + offset, UNIT, 16)


@triton.jit
def _flags(channel, who, W: tl.constexpr, W_POW2: tl.constexpr, R: tl.constexpr):
    """The places that this block sets at its peers, and those that they set here."""
    first, rank = who
    lane = tl.program_id(0).to(tl.int64) * R
    pads = channel + HEAD
    own = _at(tl.load(pads + (R + rank)), tl.int64, 8)
    if W == 2:
        peers = 2 * first + 1 - rank
        theirs = _at(tl.load(pads + (R + peers)), tl.int64, 8)
    else:
        each = tl.arange(0, W_POW2)
        peers = first + each
        theirs = _at(tl.load(pads + (R + peers), mask=each < W, other=0), tl.int64, 8)
    return theirs + (lane + rank), own + (lane + peers)


@triton.jit
def _arrive(theirs, who, epoch, slot, W: tl.constexpr, W_POW2: tl.constexpr):
    """Tell all peers that this block's part of ``epoch``, in ``slot``, is with them."""
    flag = epoch * 2 + slot
    tl.debug_barrier()
    if W == 2:
        tl.atomic_xchg(theirs, flag, sem="release", scope="sys")
    else:
        each = tl.arange(0, W_POW2)
        others = (each < W) & (who[0] + each != who[1])
        tl.atomic_xchg(theirs, tl.zeros([W_POW2], tl.int64) + flag, mask=others, sem="release", scope="sys")


@triton.jit
def _wait(mine, who, epoch, slot, looks, W: tl.constexpr, W_POW2: tl.constexpr):
    """Wait until all peers' parts of ``epoch`` are here, for ``looks`` looks at most.

    Returns the looks that are left, none after one that was in vain, and a mask of the ranks that did not come.
    """
    first, rank = who
    least, none = epoch * 2, epoch * 0
    if W == 2:
        seen = tl.atomic_add(mine, none, sem="acquire", scope="sys")
        while (seen < least) & (looks > 0):
            seen = tl.atomic_add(mine, none, sem="acquire", scope="sys")
            looks -= 1
        astray = (seen < least) | (seen == least + (1 - slot))
        missing = tl.where(astray, (none + 1) << (2 * first + 1 - rank), 0)
    else:
        # One look at all flags at once, and the acquire when all are there.
        each = tl.arange(0, W_POW2)
        others = (each < W) & (first + each != rank)
        seen = tl.load(mine, mask=others, other=least, volatile=True)
        while (tl.min(tl.where(others, seen, least)) < least) & (looks > 0):
            seen = tl.load(mine, mask=others, other=least, volatile=True)
            looks -= 1
        tl.atomic_add(mine, tl.zeros([W_POW2], tl.int64), mask=others, sem="acquire", scope="sys")
        bit = (tl.zeros([W_POW2], tl.int64) + 1) << (first + each)
        astray = (seen < least) | (seen == least + (1 - slot))
        missing = tl.sum(tl.where(others & astray, bit, 0))
    tl.debug_barrier()
    return tl.where(missing == 0, tl.maximum(looks, 1), 0), missing


@triton.jit
def _enter(table, channel, flags, who, slot, looks, W: tl.constexpr, W_POW2: tl.constexpr):
    """Return the epoch that this call builds on, and its looks: none once a wait has run out."""
    epoch = tl.load(channel)
    looks = tl.where(tl.load(table) == 0, looks.to(tl.int64), 0)
    if (tl.load(channel + 2) == slot) & (looks > 0):
        epoch += 1
        _arrive(flags[0], who, epoch, slot, W, W_POW2)
        looks, missing = _wait(flags[1], who, epoch, slot, looks, W, W_POW2)
        _report(table, channel, epoch, missing)
    return epoch, looks


@triton.jit
def _report(table, channel, epoch, missing):
    """Tell the later calls and the host of ranks that did not come."""
    if missing != 0:
        tl.store(channel + 3, epoch)
        tl.atomic_or(channel + 4, missing)
        tl.store(table, 1)
        tl.store(_at(tl.load(table + 1), tl.int64, 8), 1)


@triton.jit
def _leave(channel, epoch, slot):
    """Advance the channel if this block is the last to come here: then all have read it."""
    done = tl.atomic_add(channel + 1, epoch * 0 + 1, sem="release", scope="gpu")
    if done == tl.num_programs(0) - 1:
        tl.store(channel + 1, 0)
        tl.store(channel + 2, slot)
        tl.store(channel, epoch)


@triton.jit
def _fill(to, begin, end, VALUE: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr):
    """Write VALUE to this block's part of ``to[begin:end]``."""
    lane = tl.arange(0, UNITS)
    stride = tl.num_programs(0).to(tl.int64) * UNITS
    for at in range(begin + tl.program_id(0).to(tl.int64) * UNITS, end, stride):
        inside = lane < tl.minimum(end - at, UNITS).to(tl.int32)
        tl.store(to + at + lane, tl.full([UNITS], VALUE, UNIT), mask=inside)


@triton.jit
def _part(field, at, end, B: tl.constexpr, BLOCK: tl.constexpr):
    """Load BLOCK bytes of the local rows of ``field`` from unit ``at`` on, up to unit ``end``."""
    UNIT: tl.constexpr = tl.int32 if B >= 4 else (tl.int16 if B == 2 else tl.int8)
    UNITS: tl.constexpr = BLOCK // 4 if B >= 4 else BLOCK // B
    lane = tl.arange(0, UNITS)
    return tl.load(_at(field[0], UNIT, B) + at + lane, mask=lane < tl.minimum(end - at, UNITS).to(tl.int32))


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
            tl.store(_buffer(channel, peer, field[1], UNIT) + (begin * row + at) + lane, part, mask=inside)
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
    own = _buffer(channel, who[1], field[1], UNIT)
    lead = who[0] // REPLICAS
    origin = _start(plan, lead, DP_POW2, ON_DEVICE)
    # With counts on the device the rows are packed: there is only the end.
    for turn in range(RANKS - 1 if ON_DEVICE else 0, RANKS):
        behind = _start(plan, lead + turn, DP_POW2, ON_DEVICE) - origin + _held(plan, lead + turn, ON_DEVICE)
        next_one = _start(plan, lead + turn + 1, DP_POW2, ON_DEVICE) - origin
        until = tl.where(turn + 1 < RANKS, tl.minimum(next_one, rows), rows)
        _fill(own, behind * row, until * row, 0, UNIT, UNITS)


@triton.jit
def _spoil(
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
    own = _buffer(channel, who[1], field[1], UNIT)
    origin = _start(plan, who[0] // REPLICAS, DP_POW2, ON_DEVICE)
    for turn in range(W):
        peer = who[0] + turn
        if (missing >> peer) & 1 != 0:
            begin, low, high = _share(plan, peer, origin, rows, DP_POW2, REPLICAS, ON_DEVICE)
            _fill(own, (begin + low) * row, (begin + high) * row, -1, UNIT, UNITS)


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
    origin = _start(plan, first // REPLICAS, DP_POW2, ON_DEVICE)
    lane = tl.arange(0, UNITS)
    stride = tl.num_programs(0).to(tl.int64) * UNITS
    for turn in range(1, W):
        peer = first + (rank - first + turn) % W
        begin, low, high = _share(plan, peer, origin, rows, DP_POW2, REPLICAS, ON_DEVICE)
        size = tl.minimum(high - low, stage) * row
        to = _buffer(channel, peer, offset, DTYPE)
        for at in range(after + tl.program_id(0).to(tl.int64) * UNITS, tl.minimum(size, until), stride):
            inside = lane < tl.minimum(size - at, UNITS).to(tl.int32)
            addends = tl.load(given + ((begin + low) * row + at) + lane, mask=inside)
            tl.store(to + at + lane, addends, mask=inside)


@triton.jit
def _add_up(
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
            addends = _at(tl.where(turn == own, here, staged + turn * stage_bytes), DTYPE, B) + at + lane
            total += tl.load(addends, mask=inside).to(tl.float32)
        tl.store(result + at + lane, total.to(DTYPE), mask=inside)


# fmt: off
@triton.jit(
    do_not_specialize=[
        *("table", "place", "counts", "h0", "h1", "h2", "h3", "s0", "s1", "s2", "s3"),
        *("first", "rank", "slot", "rows", "most", "looks"),
        *("f0", "o0", "v0", "f1", "o1", "v1", "f2", "o2", "v2", "f3", "o3", "v3"),
    ]
)
def gather_rows(
    table, place, counts, h0, h1, h2, h3, s0, s1, s2, s3, first, rank, slot, rows, most, looks,
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
    table = _at(table, tl.int64, 8)
    channel = table + place
    plan = (counts, h0, h1, h2, h3, s0, s1, s2, s3, most.to(tl.int64))
    who = (first.to(tl.int64), rank.to(tl.int64))
    rows = rows.to(tl.int64)
    a, b, c, d = (f0, o0, v0), (f1, o1, v1), (f2, o2, v2), (f3, o3, v3)
    origin = _start(plan, who[0] // REPLICAS, DP_POW2, ON_DEVICE)
    begin, low, high = _share(plan, who[1], origin, rows, DP_POW2, REPLICAS, ON_DEVICE)
    # Under way while the channel is looked at.
    part = _first_part(a, low, high, B0, BLOCK)
    flags = _flags(channel, who, W, W_POW2, R)
    epoch, looks = _enter(table, channel, flags, who, slot, looks, W, W_POW2)
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
        _arrive(flags[0], who, epoch, slot, W, W_POW2)
        _leave(channel, epoch, slot)
        _zero_gaps(a, channel, plan, who, rows, B0, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)
        if B1 > 0:
            _zero_gaps(b, channel, plan, who, rows, B1, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)
        if B2 > 0:
            _zero_gaps(c, channel, plan, who, rows, B2, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)
        if B3 > 0:
            _zero_gaps(d, channel, plan, who, rows, B3, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)
        looks, missing = _wait(flags[1], who, epoch, slot, looks, W, W_POW2)
        _report(table, channel, epoch, missing)
    else:
        _leave(channel, epoch, slot)
    if missing != 0:
        _spoil(a, channel, plan, who, rows, missing, B0, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)
        if B1 > 0:
            _spoil(b, channel, plan, who, rows, missing, B1, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)
        if B2 > 0:
            _spoil(c, channel, plan, who, rows, missing, B2, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)
        if B3 > 0:
            _spoil(d, channel, plan, who, rows, missing, B3, BLOCK, W, DP_POW2, REPLICAS, ON_DEVICE)


# fmt: off
@triton.jit(
    do_not_specialize=[
        *("table", "place", "counts", "h0", "h1", "h2", "h3", "s0", "s1", "s2", "s3"),
        *("first", "rank", "slot", "rows", "most", "looks"),
        *("partial", "out", "offset", "vecs", "stage_rows", "out_rows", "steps", "turns"),
    ]
)
def combine_rows(
    table, place, counts, h0, h1, h2, h3, s0, s1, s2, s3, first, rank, slot, rows, most, looks,
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
    table = _at(table, tl.int64, 8)
    channel = table + place
    plan = (counts, h0, h1, h2, h3, s0, s1, s2, s3, most.to(tl.int64))
    who = (first.to(tl.int64), rank.to(tl.int64))
    own = who[1] - who[0]
    rows, stage = rows.to(tl.int64), stage_rows.to(tl.int64)
    row = vecs.to(tl.int64) * (B // SIZE)
    stage_bytes = (stage * row * SIZE + 15) // 16 * 16
    to = offset + own * stage_bytes
    flags = _flags(channel, who, W, W_POW2, R)
    epoch, looks = _enter(table, channel, flags, who, slot, looks, W, W_POW2)
    origin = _start(plan, who[0] // REPLICAS, DP_POW2, ON_DEVICE)
    begin, low, high = _share(plan, who[1], origin, rows, DP_POW2, REPLICAS, ON_DEVICE)
    size = tl.minimum(high - low, stage) * row
    given, result = _at(partial, DTYPE, B), _at(out, DTYPE, B)
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
                _arrive(flags[0], who, epoch + step + 1, slot, W, W_POW2)
            if step == 0:
                _leave(channel, epoch + steps, slot)
            else:
                if missing == 0:
                    looks, missing = _wait(flags[1], who, epoch + step, slot, looks, W, W_POW2)
                    _report(table, channel, epoch + step, missing)
                spoilt = tl.where(missing != 0, float("nan"), 0.0)
                until = tl.minimum(size, after)
                _add_up(
                    *(result + low * row, here, staged, stage_bytes, own, spoilt, after - reach, until),
                    *(DTYPE, B, UNITS, W),
                )
    else:
        if missing == 0:
            _push_addends(
                *(given, channel, plan, who, to, stage, rows, row, low * 0, rows * row),
                *(DTYPE, UNITS, W, DP_POW2, REPLICAS, ON_DEVICE),
            )
            _arrive(flags[0], who, epoch + 1, slot, W, W_POW2)
            _leave(channel, epoch + 1, slot)
            looks, missing = _wait(flags[1], who, epoch + 1, slot, looks, W, W_POW2)
            _report(table, channel, epoch + 1, missing)
        else:
            _leave(channel, epoch + 1, slot)
        spoilt = tl.where(missing != 0, float("nan"), 0.0)
        _add_up(
            *(result + low * row, here, staged, stage_bytes, own, spoilt, low * 0, size),
            *(DTYPE, B, UNITS, W),
        )
    _fill(result, _held(plan, who[1] // REPLICAS, ON_DEVICE) * row, out_rows.to(tl.int64) * row, 0.0, DTYPE, UNITS)


# fmt: on
@triton.jit(do_not_specialize=["to", "h0", "h1", "h2", "h3"])
def write_counts(to, h0, h1, h2, h3, DP: tl.constexpr, DP_POW2: tl.constexpr):
    """Write counts that came with the launch, two to a word, to int32 [DP]: no memory of the host is read."""
    each = tl.arange(0, DP_POW2)
    tl.store(_at(to, tl.int32, 4) + each, _two_a_word(h0, h1, h2, h3, each).to(tl.int32), mask=each < DP)


@triton.jit(do_not_specialize=["flag", "rank", "looks"])
def look(flag, rank, looks, W: tl.constexpr, W_POW2: tl.constexpr):
    """Wait for flags that don't come, ``looks`` looks at them, to time a look."""
    rank = rank.to(tl.int64)
    mine = _at(flag, tl.int64, 8)
    if W > 2:
        mine += tl.arange(0, W_POW2)
    _wait(mine, (rank * 0, rank), rank * 0 + 1, 0, looks.to(tl.int64), W, W_POW2)


INTERPRETED = not isinstance(gather_rows, triton.JITFunction)
