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
    tl.debug_barrier()
    tl.store(dst + lane, a * b + c)
    tl.store(dst + BLOCK + lane, a - b * c)
    tl.store(dst + 2 * BLOCK + lane, a * c - b)


@triton.jit(do_not_specialize=["start", "rows"])
def narrow_addresses(dst, src, start, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The row times the width is an int32: wrong from 2**31 elements on."""
    lane = tl.arange(0, BLOCK)
    row = start + tl.program_id(0)
    for at in range(0, WIDTH, BLOCK):
        inside = (at + lane < WIDTH) & (row < rows)
        tl.store(dst + row * WIDTH + at + lane, tl.load(src + at + lane, mask=inside), mask=inside)
