"""Gather and combine over peer-mapped memory, with one wait for the peers in each call.

Shapes: L local rows, G global rows, W ranks, V vectors of VEC units in a row. Every rank launches the same grid.

**Epochs.** ``state`` [4] int64 lies on the own device, one for each channel: the calls finished, the blocks of this
call that are done, and after a timeout the epoch and a mask of the missing ranks. A call's epoch is one more than
the calls finished; all of its blocks read it, and the last block to finish advances it, so a replayed graph goes on
counting. Of int64 it never wraps. After a timeout the ranks' epochs differ: the channel must not be used again.

**One flag for each lane and peer.** Block b of rank r, having written its part to every peer, stores the epoch into
place (b, r) of each peer's pad (release) and waits until all places of its own lane have reached it (acquire).
Equal blocks of all ranks wait for each other only, and blocks start in order, so a grid larger than the device
advances too.

**Two slots** by the epoch's parity make a second wait at the entry needless. A rank writes epoch e + 2 into the
slot of epoch e only after its call e + 1 ended, so after every peer arrived in e + 1. A peer launches e + 1 behind
all that reads the result of e on its stream: nobody reads the slot any more. This holds while a result is read only
until the next call on its channel, on the stream that launches it.
"""

import triton
import triton.language as tl


@triton.jit
def _share(counts, dp, part, parts, DP: tl.constexpr, DP_POW2: tl.constexpr):
    """Where dp rank ``dp`` starts in the packed buffer, and which of its rows are share ``part`` of ``parts``."""
    each = tl.arange(0, DP_POW2)
    held = tl.maximum(tl.load(counts + each, mask=each < DP, other=0).to(tl.int64), 0)
    before = tl.sum(tl.where(each < dp, held, 0))
    rows = tl.sum(tl.where(each == dp, held, 0))
    return before, part * rows // parts, (part + 1) * rows // parts


@triton.jit
def _arrive_and_wait(pads, state, epoch, rank, spins, WORLD: tl.constexpr):
    """Tell all peers that this block's part of ``epoch`` is with them; wait until theirs is here.

    Each wait is bounded by ``spins`` looks; a peer that is not seen in time is marked in ``state``.
    """
    lane = tl.program_id(0).to(tl.int64) * WORLD
    tl.debug_barrier()
    for turn in tl.static_range(WORLD):
        peer = ((rank + turn) % WORLD).to(tl.int64)
        pad = tl.load(pads + peer).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(pad + lane + rank, epoch, sem="release", scope="sys")
    own = tl.load(pads + rank).to(tl.pointer_type(tl.int64))
    none = epoch * 0
    for turn in tl.static_range(WORLD):
        peer = ((rank + turn) % WORLD).to(tl.int64)
        seen = tl.atomic_add(own + lane + peer, none, sem="acquire", scope="sys")
        looks = spins * 0
        while (seen < epoch) & (looks < spins):
            seen = tl.atomic_add(own + lane + peer, none, sem="acquire", scope="sys")
            looks += 1
        if seen < epoch:
            tl.store(state + 2, epoch)
            tl.atomic_or(state + 3, (none + 1) << peer)


@triton.jit
def _finish(state, epoch):
    """Advance the channel's epoch if this block is the last of the call."""
    done = tl.atomic_add(state + 1, epoch * 0 + 1, sem="acq_rel", scope="gpu")
    if done == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        tl.store(state, epoch)


@triton.jit(do_not_specialize=["rank", "row_vecs", "capacity", "slot_rows", "spins"])
def gather_rows(
    local,
    buffers,
    pads,
    counts,
    state,
    rank,
    row_vecs,
    capacity,
    slot_rows,
    spins,
    UNIT: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    WORLD: tl.constexpr,
    DP: tl.constexpr,
    DP_POW2: tl.constexpr,
):
    """Push this rank's share of its dp rank's rows into every rank's buffer; zero the own rows behind the last.

    ``local`` [L, V * VEC] units; ``buffers``, ``pads`` int64 [W] addresses; ``counts`` [DP], the own one included.
    The ranks of a dp rank push a share each, so no row crosses a link twice. Rows beyond ``capacity`` are dropped.
    The result lies in slot ``epoch % 2`` of the own buffer: row ``sum(counts[:dp]) + i`` is row i of dp rank dp.
    Example: counts (2, 0, 1), capacity 4: rows a0 a1 c0 and a row of zeros on every rank.
    """
    rank = rank.to(tl.int64)
    row = row_vecs.to(tl.int64) * VEC
    epoch = tl.load(state) + 1
    slot = (epoch % 2) * slot_rows.to(tl.int64) * row
    rows = capacity.to(tl.int64) * row
    replicas: tl.constexpr = WORLD // DP
    before, low, high = _share(counts, rank // replicas, rank % replicas, replicas, DP, DP_POW2)
    end = tl.minimum(high * row, rows - before * row)
    total, _, _ = _share(counts, DP, 0, 1, DP, DP_POW2)
    lane = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    for at in range(low * row + first, end, stride):
        inside = lane < tl.minimum(end - at, BLOCK).to(tl.int32)
        part = tl.load(local + at + lane, mask=inside)
        for turn in tl.static_range(WORLD):
            # Each rank starts with itself and goes round, so that no two of them crowd one link.
            peer = ((rank + turn) % WORLD).to(tl.int64)
            to = tl.multiple_of(tl.load(buffers + peer).to(tl.pointer_type(UNIT)), 16)
            tl.store(to + (slot + before * row + at) + lane, part, mask=inside)
    own = tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(UNIT)), 16) + slot
    for at in range(total * row + first, rows, stride):
        tl.store(own + at + lane, tl.zeros([BLOCK], UNIT), mask=lane < tl.minimum(rows - at, BLOCK).to(tl.int32))
    _arrive_and_wait(pads, state, epoch, rank, spins, WORLD)
    _finish(state, epoch)


@triton.jit(do_not_specialize=["rank", "row_vecs", "capacity", "slot_rows", "stage_rows", "spins"])
def combine_rows(
    out,
    partial,
    buffers,
    pads,
    counts,
    state,
    rank,
    row_vecs,
    capacity,
    slot_rows,
    stage_rows,
    spins,
    DTYPE: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    WORLD: tl.constexpr,
    DP: tl.constexpr,
    DP_POW2: tl.constexpr,
):
    """Push each owner's rows of ``partial`` into its staging area; sum what arrived in rank order, in float32.

    ``partial`` [G, V * VEC] and ``out`` [stage_rows, ...] of DTYPE. Rank r's staging in slot ``epoch % 2`` of its
    buffer is [W, stage_rows, ...]: part k is from rank k. Every rank sums its share of its dp rank's rows: row i of
    ``out`` is row ``low + i`` of them. The order of the sum is the same on all ranks and in every run.
    """
    rank = rank.to(tl.int64)
    row = row_vecs.to(tl.int64) * VEC
    epoch = tl.load(state) + 1
    slot = (epoch % 2) * slot_rows.to(tl.int64) * row
    stage = stage_rows.to(tl.int64) * row
    rows = capacity.to(tl.int64) * row
    replicas: tl.constexpr = WORLD // DP
    lane = tl.arange(0, BLOCK)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    for turn in tl.static_range(WORLD):
        peer = ((rank + turn) % WORLD).to(tl.int64)
        before, low, high = _share(counts, peer // replicas, peer % replicas, replicas, DP, DP_POW2)
        begin = (before + low) * row
        size = tl.minimum(tl.minimum((high - low) * row, stage), rows - begin)
        to = tl.multiple_of(tl.load(buffers + peer).to(tl.pointer_type(DTYPE)), 16) + (slot + rank * stage)
        for at in range(first, size, stride):
            inside = lane < tl.minimum(size - at, BLOCK).to(tl.int32)
            tl.store(to + at + lane, tl.load(partial + (begin + at) + lane, mask=inside), mask=inside)
    _arrive_and_wait(pads, state, epoch, rank, spins, WORLD)
    before, low, high = _share(counts, rank // replicas, rank % replicas, replicas, DP, DP_POW2)
    size = tl.minimum(tl.minimum((high - low) * row, stage), rows - (before + low) * row)
    own = tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(DTYPE)), 16) + slot
    for at in range(first, size, stride):
        inside = lane < tl.minimum(size - at, BLOCK).to(tl.int32)
        total = tl.zeros([BLOCK], tl.float32)
        for source in tl.static_range(WORLD):
            total += tl.load(own + source * stage + at + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at + lane, total.to(DTYPE), mask=inside)
    _finish(state, epoch)
