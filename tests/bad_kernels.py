"""Kernels as they must not be: the gate's negative controls."""

import triton
import triton.language as tl


@triton.jit
def spills(dst, src, BLOCK: tl.constexpr):
    """One wave holds more than its registers take."""
    lane = tl.arange(0, BLOCK)
    a = tl.load(src + lane)
    b = tl.load(src + BLOCK + lane)
    c = tl.load(src + 2 * BLOCK + lane)
    d = tl.load(src + 3 * BLOCK + lane)
    tl.debug_barrier()
    tl.store(dst + lane, a * b + c)
    tl.store(dst + BLOCK + lane, b - c * d)
    tl.store(dst + 2 * BLOCK + lane, c * d - a)
    tl.store(dst + 3 * BLOCK + lane, d * a - b)


@triton.jit(do_not_specialize=["start", "rows"])
def narrow_product(dst, src, start, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The row times the width is an int32: wrong from 2**31 elements on, though the sums after it are wide."""
    lane = tl.arange(0, BLOCK)
    row = start + tl.program_id(0)
    place = (row * WIDTH).to(tl.int64)
    inside = (lane < WIDTH) & (row < rows)
    tl.store(dst + place + lane, tl.load(src + place + lane, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["start"])
def narrow_step(dst, src, start, BLOCK: tl.constexpr):
    """The place is made in 64 bits and then cut to 32."""
    lane = tl.arange(0, BLOCK)
    place = start.to(tl.int64) * BLOCK
    tl.store(dst + place.to(tl.int32) + lane, tl.load(src + place + lane))


@triton.jit
def near_flags(flags, out, BLOCK: tl.constexpr):
    """A hand-over whose flags other GPUs need not see."""
    lane = tl.arange(0, BLOCK)
    tl.store(out + lane, lane.to(tl.int64))
    tl.debug_barrier()
    tl.atomic_xchg(flags, 1, sem="release", scope="gpu")
    while tl.atomic_add(flags + 1, 0, sem="acquire", scope="gpu") < 1:
        pass


@triton.jit
def no_wait(mine, who, epoch, tag, looks, W: tl.constexpr, W_POW2: tl.constexpr):
    """In place of a wait for the peers: all of them are said to be there."""
    return looks, looks * 0, looks * 0
