"""Gather and combine over peer-mapped memory, with one wait for the peers in each call.

Shapes: L local rows, G global rows, R ranks that share the memory, W of them that take part in a call (``first`` to
``first + W - 1``: all of them, or those of one dp rank or attention-tp group), V vectors of B bytes in a row. All
that take part launch the same grid. Addresses and numbers are int64.

**The table**, int64 on the own device. Row 0 is shared: [0] whether a wait ever ran out, [1] the address of a word
that the host reads. Every other row is a channel, one for each (verb, batch): [0] its epoch, [1] the blocks of this
call that are done with it, [2] the tag used last, [3] the epoch of a wait that ran out, [4] a mask of the ranks
that were missing, then the addresses of every rank's buffer and of its pad.

**Epochs.** A call's epochs follow the channel's. All of its blocks read that one, and the last block to come behind
its part advances it, so a replayed graph goes on counting. Of int64 it never wraps.

**One flag for each lane and peer.** Block b of rank r, having written its part to every peer, stores the epoch and
the call's tag into place (b, r) of each peer's pad (release) and waits until all places of its own lane have it
(acquire). A peer that is in the same epoch with another tag made another call: it counts as missing. One that is an
epoch ahead has seen this rank's flag before that, and told.
Equal blocks of all ranks wait for each other only, and blocks start in order, so a grid larger than the device
advances too.

**Two slots** make a second wait at the entry needless. A rank writes into a slot only after its call before
ended, so after every peer arrived in that one. A peer launches a call behind all that reads the result of the one
before it on the channel: nobody reads what is older. So it is enough that two calls in a row differ in their
slot. The host takes turns. Where turns don't add up (a graph with an odd number of calls is replayed) the slot is
the one used last, and the call first waits until all peers are in it, which is when they have read it. This holds
while a result is read only until the next call on its channel, on the stream that launches it.

**A wait that runs out** marks the missing ranks and the table; from then on no kernel of this rank writes to peers,
arrives or waits. What such a call returns is 0xFF in every byte that did not come: NaN in every float dtype.

**A rank that gives up** (an error left its part of the work undone) sets the places of all channels at its peers to
GONE: no wait for it lasts, now or later, and it counts as missing.

Within the kernels a ``plan`` is (counts on the device, four words of counts, four of starts, most rows of a dp
rank); a ``field`` is (its rows, where its area begins in a buffer, V); ``who`` is (first, rank); a ``tag`` is what
must be alike in the calls of all ranks: twice the blocks, and the slot in bit 0.
"""

import triton
import triton.language as tl

HEAD = tl.constexpr(5)  # words of a channel before its addresses
SPAN = tl.constexpr(512)  # flags of an epoch, one for each tag
GONE = tl.constexpr(2**62)  # above the flag of any epoch


@triton.jit
def two_a_word(a, b, c, d, index):
    """Number ``index`` of those of 31 bits that the host packed two to a word."""
    word = tl.where(index < 2, a, tl.where(index < 4, b, tl.where(index < 6, c, d)))
    return (word >> ((index % 2) * 32).to(tl.int64)) & 0x7FFFFFFF


@triton.jit
def pointer_at(address, UNIT: tl.constexpr, B: tl.constexpr):
    """A pointer to units at an address that is a multiple of B bytes."""
    return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(UNIT)), B)


@triton.jit
def held_by(plan, dp, ON_DEVICE: tl.constexpr):
    """How many rows dp rank ``dp`` holds."""
    if ON_DEVICE:
        held = tl.load(pointer_at(plan[0], tl.int32, 4) + dp).to(tl.int64)
        held = tl.minimum(tl.maximum(held, 0), plan[9])
    else:
        held = two_a_word(plan[1], plan[2], plan[3], plan[4], dp)
    return held


@triton.jit
def start_of(plan, dp, DP_POW2: tl.constexpr, ON_DEVICE: tl.constexpr):
    """Where the rows of dp rank ``dp`` begin in the global buffer."""
    if ON_DEVICE:
        each = tl.arange(0, DP_POW2)
        before = tl.load(pointer_at(plan[0], tl.int32, 4) + each, mask=each < dp, other=0)
        start = tl.sum(tl.minimum(tl.maximum(before.to(tl.int64), 0), plan[9]))
    else:
        start = two_a_word(plan[5], plan[6], plan[7], plan[8], dp)
    return start


@triton.jit
def share_of(plan, rank, origin, rows, DP_POW2: tl.constexpr, REPLICAS: tl.constexpr, ON_DEVICE: tl.constexpr):
    """Where a rank's dp rank begins behind ``origin``, and which of its rows are the rank's share: [low, high)."""
    dp, part = rank // REPLICAS, rank % REPLICAS
    held = held_by(plan, dp, ON_DEVICE)
    begin = start_of(plan, dp, DP_POW2, ON_DEVICE) - origin
    return begin, part * held // REPLICAS, tl.minimum((part + 1) * held // REPLICAS, rows - begin)


@triton.jit
def buffer_of(channel, rank, offset, UNIT: tl.constexpr):
    """Where a rank's buffer lies, ``offset`` bytes in."""
    return pointer_at(tl.load(channel + HEAD + rank) + offset, UNIT, 16)


@triton.jit
def flags_of(channel, who, W: tl.constexpr, W_POW2: tl.constexpr, R: tl.constexpr):
    """The places that this block sets at its peers, and those that they set here."""
    first, rank = who
    lane = tl.program_id(0).to(tl.int64) * R
    pads = channel + HEAD
    own = pointer_at(tl.load(pads + (R + rank)), tl.int64, 8)
    if W == 2:
        peers = 2 * first + 1 - rank
        theirs = pointer_at(tl.load(pads + (R + peers)), tl.int64, 8)
    else:
        each = tl.arange(0, W_POW2)
        peers = first + each
        theirs = pointer_at(tl.load(pads + (R + peers), mask=each < W, other=0), tl.int64, 8)
    return theirs + (lane + rank), own + (lane + peers)


@triton.jit
def arrive(theirs, who, epoch, tag, W: tl.constexpr, W_POW2: tl.constexpr):
    """Tell all peers that this block's part of ``epoch`` is with them."""
    flag = epoch * SPAN + tag
    tl.debug_barrier()
    if W == 2:
        tl.atomic_xchg(theirs, flag, sem="release", scope="sys")
    else:
        each = tl.arange(0, W_POW2)
        others = (each < W) & (who[0] + each != who[1])
        tl.atomic_xchg(theirs, tl.zeros([W_POW2], tl.int64) + flag, mask=others, sem="release", scope="sys")


@triton.jit
def wait(mine, who, epoch, tag, looks, W: tl.constexpr, W_POW2: tl.constexpr):
    """Wait until all peers' parts of ``epoch`` are here, for ``looks`` looks at most.

    Returns the looks that are left, none after one that was in vain, a mask of the ranks that did not come, and one
    of those to name: if a rank is gone, nobody waits longer for the others, who are not to blame.
    """
    first, rank = who
    least, none = epoch * SPAN, epoch * 0
    # Tags are compared in 32 bits: on AMD registers are short here, and a peer lags by one epoch, not by 2**23.
    if W == 2:
        seen = tl.atomic_add(mine, none, sem="acquire", scope="sys")
        while (seen < least) & (looks > 0):
            seen = tl.atomic_add(mine, none, sem="acquire", scope="sys")
            looks -= 1
        ahead = seen - least
        astray = ((ahead < SPAN) & (ahead.to(tl.int32) != tag)) | (seen >= GONE)
        missing = tl.where(astray, (none + 1) << (2 * first + 1 - rank), 0)
        gone = none
    else:
        # One look at all flags at once, and the acquire when all are there.
        each = tl.arange(0, W_POW2)
        others = (each < W) & (first + each != rank)
        seen = tl.load(mine, mask=others, other=least, volatile=True)
        while (tl.min(tl.where(others, seen, least)) < least) & (tl.max(seen) < GONE) & (looks > 0):
            seen = tl.load(mine, mask=others, other=least, volatile=True)
            looks -= 1
        tl.atomic_add(mine, tl.zeros([W_POW2], tl.int64), mask=others, sem="acquire", scope="sys")
        bit = (tl.zeros([W_POW2], tl.int64) + 1) << (first + each)
        ahead = seen - least
        astray = ((ahead < SPAN) & (ahead.to(tl.int32) != tag)) | (seen >= GONE)
        missing = tl.sum(tl.where(others & astray, bit, 0))
        gone = tl.sum(tl.where(others & (seen >= GONE), bit, 0))
    tl.debug_barrier()
    return tl.where(missing == 0, tl.maximum(looks, 1), 0), missing, tl.where(gone != 0, gone, missing)


@triton.jit
def enter(table, channel, flags, who, tag, looks, W: tl.constexpr, W_POW2: tl.constexpr):
    """Return the epoch that this call builds on, and its looks: none once a wait has run out."""
    epoch = tl.load(channel)
    looks = tl.where(tl.load(table) == 0, looks.to(tl.int64), 0)
    if (((tl.load(channel + 2) ^ tag) & 1) == 0) & (looks > 0):
        epoch += 1
        arrive(flags[0], who, epoch, tag, W, W_POW2)
        looks, missing, named = wait(flags[1], who, epoch, tag, looks, W, W_POW2)
        report(table, channel, epoch, missing, named)
    return epoch, looks


@triton.jit
def report(table, channel, epoch, missing, named):
    """Tell the later calls and the host that ranks did not come, and which to name."""
    if missing != 0:
        tl.store(channel + 3, epoch)
        tl.atomic_or(channel + 4, named)
        tl.store(table, 1)
        tl.store(pointer_at(tl.load(table + 1), tl.int64, 8), 1)


@triton.jit
def leave(channel, epoch, tag):
    """Advance the channel if this block is the last to come here: then all have read it."""
    done = tl.atomic_add(channel + 1, epoch * 0 + 1, sem="release", scope="gpu")
    if done == tl.num_programs(0) - 1:
        tl.store(channel + 1, 0)
        tl.store(channel + 2, tag)
        tl.store(channel, epoch)


@triton.jit
def fill(to, begin, end, VALUE: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr):
    """Write VALUE to this block's part of ``to[begin:end]``."""
    lane = tl.arange(0, UNITS)
    stride = tl.num_programs(0).to(tl.int64) * UNITS
    for at in range(begin + tl.program_id(0).to(tl.int64) * UNITS, end, stride):
        inside = lane < tl.minimum(end - at, UNITS).to(tl.int32)
        tl.store(to + at + lane, tl.full([UNITS], VALUE, UNIT), mask=inside)


@triton.jit(do_not_specialize=["table", "words", "rank"])
def give_up(table, words, rank, LANES: tl.constexpr, R: tl.constexpr):
    """Tell all peers that this rank comes to no call any more: a block for each channel, ``words`` words apart."""
    table = pointer_at(table, tl.int64, 8)
    channel = table + (tl.program_id(0).to(tl.int64) + 1) * words.to(tl.int64)
    lane = tl.arange(0, LANES).to(tl.int64) * R + rank.to(tl.int64)
    tl.debug_barrier()
    for turn in range(R):
        pad = pointer_at(tl.load(channel + HEAD + R + turn), tl.int64, 8)
        if turn != rank:
            tl.atomic_xchg(pad + lane, tl.full([LANES], GONE, tl.int64), sem="release", scope="sys")


@triton.jit(do_not_specialize=["to", "h0", "h1", "h2", "h3"])
def write_counts(to, h0, h1, h2, h3, DP: tl.constexpr, DP_POW2: tl.constexpr):
    """Write counts that came with the launch, two to a word, to int32 [DP]: no memory of the host is read."""
    each = tl.arange(0, DP_POW2)
    tl.store(pointer_at(to, tl.int32, 4) + each, two_a_word(h0, h1, h2, h3, each).to(tl.int32), mask=each < DP)


@triton.jit(do_not_specialize=["flag", "rank", "looks"])
def look(flag, rank, looks, W: tl.constexpr, W_POW2: tl.constexpr):
    """Wait for flags that don't come, ``looks`` looks at them, to time a look."""
    rank = rank.to(tl.int64)
    mine = pointer_at(flag, tl.int64, 8)
    if W > 2:
        mine += tl.arange(0, W_POW2)
    wait(mine, (rank * 0, rank), rank * 0 + 1, 0, looks.to(tl.int64), W, W_POW2)


INTERPRETED = not isinstance(look, triton.JITFunction)
