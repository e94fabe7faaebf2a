"""What checks the row kernels, on any device: an oracle that moves one row at a time, and rows on guard."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rocm_dp.kernels import rows

GUARD = 64
DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int32,
    torch.int64,
    torch.bool,
)
WIDTHS = (1, 3, 6, 7, 8, 16, 129)
# (rows of src, rows of dst, start, count), from the field.
WRITES = ((5, 20, 3, 5), (2, 64, 10, 40), (2, 64, 30, 34))
READS = ((20, 5, 3, 5), (64, 2, 10, 40), (64, 2, 30, 34))
EXTREMES = (-(2**63), -(2**31), -70, -1, 0, 1, 2**31 - 1, 2**62, 2**63 - 1)


@dataclass(frozen=True)
class Move:
    """One call of write_rows, place_rows or read_rows."""

    verb: str
    src_rows: int
    dst_rows: int
    start: int
    count: int
    dtype: torch.dtype = torch.bfloat16
    width: int = 8
    offset: int = 0  # elements by which dst misses its alignment
    src_offset: int = 0
    index: torch.dtype = torch.int64

    def wanted(self, src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
        """The result by the definition, row by row."""
        out = dst.clone()
        for row in range(self.dst_rows):
            from_row = self.start + row if self.verb == "read_rows" else row - self.start
            place = row if self.verb == "read_rows" else from_row
            if 0 <= place < self.count and 0 <= from_row < self.src_rows:
                out[row] = src[from_row]
            elif self.verb != "write_rows":
                out[row] = torch.zeros_like(out[row])
        return out

    @property
    def fits(self) -> bool:
        here, there = (self.dst_rows, self.src_rows) if self.verb == "read_rows" else (self.src_rows, self.dst_rows)
        return self.start >= 0 and 0 <= self.count <= here and self.start + self.count <= there


def some_rows(number: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (number, width), generator=generator).bool()
    return torch.randint(0, 256, (number, width * dtype.itemsize), dtype=torch.uint8, generator=generator).view(
        dtype
    )


def guarded(rows_: torch.Tensor, offset: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """``rows_`` on ``device`` between guard rows, ``offset`` elements off; and all of that memory, as bytes."""
    number, width = rows_.shape
    memory = some_rows(1, (number + 2 * GUARD) * width + offset, rows_.dtype, seed=99).view(-1).to(device)
    inner = memory[offset + GUARD * width : offset + (GUARD + number) * width].view(number, width)
    inner.copy_(rows_)
    return inner, memory.view(torch.uint8)


def check_move(move: Move, device: str) -> None:
    """Check one call: the result, the guard rows, the untouched source, and what the status says."""
    src_rows = some_rows(move.src_rows, move.width, move.dtype, seed=1)
    dst_rows = some_rows(move.dst_rows, move.width, move.dtype, seed=2)
    src, src_memory = guarded(src_rows, move.src_offset, device)
    dst, dst_memory = guarded(dst_rows, move.offset, device)
    before, around = src_memory.clone(), dst_memory.clone()
    status = rows.new_status(device)
    start, count = (torch.tensor(n, dtype=move.index, device=device) for n in (move.start, move.count))
    getattr(rows, move.verb)(dst, src, start=start, count=count, status=status)
    assert torch.equal(src_memory, before), f"the source was written: {move}"
    got = dst.cpu().clone()
    dst.copy_(dst_rows)
    assert torch.equal(dst_memory, around), f"a guard row was written: {move}"
    wanted = move.wanted(src_rows, dst_rows)
    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), f"rows differ: {move}"
    said = [0, 0, 0] if move.fits else [1, move.start, move.count]
    assert status.tolist() == said, f"the status says {status.tolist()}, not {said}: {move}"


@dataclass(frozen=True)
class Repack:
    """One call each of compact_rows and expand_rows."""

    counts: tuple[int, ...]
    size: int
    packed_rows: int
    align: int = 1
    dtype: torch.dtype = torch.bfloat16
    width: int = 8
    index: torch.dtype = torch.int64

    @property
    def held(self) -> list[int]:
        return [min(max(count, 0), self.size) for count in self.counts]

    @property
    def starts(self) -> list[int]:
        starts, at = [], 0
        for count in self.held:
            starts.append(at)
            at += -(-count // self.align) * self.align
        return [*starts, at]

    @property
    def fits(self) -> bool:
        return list(self.counts) == self.held and self.starts[-1] <= self.packed_rows


def check_repack(case: Repack, device: str) -> None:
    """Check both directions: the results, the guard rows, the status."""
    padded_rows = some_rows(len(case.counts) * case.size, case.width, case.dtype, seed=3)
    packed_rows = some_rows(case.packed_rows, case.width, case.dtype, seed=4)
    compacted, expanded = torch.zeros_like(packed_rows), torch.zeros_like(padded_rows)
    for rank, (count, start) in enumerate(zip(case.held, case.starts, strict=False)):
        for row in range(count):
            if start + row < case.packed_rows:
                compacted[start + row] = padded_rows[rank * case.size + row]
                expanded[rank * case.size + row] = packed_rows[start + row]
    counts = torch.tensor(case.counts, dtype=case.index, device=device)
    for verb, source, wanted in (
        (rows.compact_rows, padded_rows, compacted),
        (rows.expand_rows, packed_rows, expanded),
    ):
        src, src_memory = guarded(source, 0, device)
        dst, dst_memory = guarded(some_rows(wanted.shape[0], case.width, case.dtype, seed=5), 0, device)
        before, around, held = src_memory.clone(), dst_memory.clone(), dst.clone()
        status = rows.new_status(device)
        verb(dst, src, counts=counts, align=case.align, status=status)
        got = dst.cpu().clone()
        assert torch.equal(src_memory, before), f"{verb.__name__} wrote its source: {case}"
        dst.copy_(held)
        assert torch.equal(dst_memory, around), f"{verb.__name__} wrote a guard row: {case}"
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), f"{verb.__name__} differs: {case}"
        said = [0, 0, 0] if case.fits else [1, sum(case.counts), max(case.counts)]
        assert status.tolist() == said, f"{verb.__name__}'s status says {status.tolist()}, not {said}: {case}"


def matrix(device: str) -> int:
    """Every dtype and width, the cases from the field, the extremes; aligned and not. Returns how many."""
    moves = [
        Move(verb, *shape, dtype=dtype, width=width, offset=offset, src_offset=src_offset)
        for dtype in DTYPES
        for width in WIDTHS
        for offset, src_offset in ((0, 0), (1, 1), (0, 2), (1, 0))
        for verb, shape in (
            ("write_rows", (4, 9, 2, 3)),
            ("place_rows", (4, 9, 2, 3)),
            ("read_rows", (9, 4, 2, 3)),
        )
    ]
    moves += [Move(verb, *shape) for verb in ("write_rows", "place_rows") for shape in WRITES + READS]
    moves += [Move("read_rows", *shape) for shape in READS + WRITES]
    moves += [
        Move(verb, 3, 5, start, count)
        for verb in ("write_rows", "place_rows", "read_rows")
        for start in EXTREMES
        for count in EXTREMES
    ]
    moves += [
        Move(verb, *shape, torch.float8_e4m3fn, 2, offset, src_offset, torch.int32)
        for verb in ("write_rows", "place_rows", "read_rows")
        for shape in ((0, 0, 0, 0), (0, 4, 0, 0), (4, 0, 0, 0), (0, 4, 1, 2), (4, 0, 1, 2), (3, 3, 0, 3))
        for offset, src_offset in ((0, 0), (1, 0), (0, 1))
    ]
    for move in moves:
        check_move(move, device)
    packs = [
        Repack(counts, size, packed, align, dtype, width, index)
        for counts, size, packed in (
            ((3, 0, 5, 1), 5, 12),
            ((0, 0, 0), 4, 6),
            ((4, 4), 4, 8),
            ((2, 7, -1), 4, 9),
            ((-1, -2, -1), 4, 9),
            ((4, 4, 4), 4, 6),
            ((1,), 3, 1),
            ((0, 2), 0, 4),
            ((5, 3, 2, 0, 1, 4, 5), 5, 40),
        )
        for align in (1, 4)
        for dtype, width, index in (
            (torch.bfloat16, 8, torch.int64),
            (torch.int32, 6, torch.int32),
            (torch.int8, 3, torch.int64),
        )
    ]
    for pack in packs:
        check_repack(pack, device)
    return len(moves) + len(packs)


def any_move(device: str, examples: int) -> None:
    """Hypothesis over moves and repacks."""
    numbers = st.integers(-3, 40) | st.sampled_from(EXTREMES)

    @settings(max_examples=examples, deadline=None)
    @given(
        verb=st.sampled_from(["write_rows", "place_rows", "read_rows"]),
        src_rows=st.integers(0, 30),
        dst_rows=st.integers(0, 30),
        start=numbers,
        count=numbers,
        dtype=st.sampled_from(DTYPES),
        width=st.integers(1, 40),
        offset=st.integers(0, 3),
        src_offset=st.integers(0, 3),
    )
    def moves(**fields: object) -> None:
        check_move(Move(**fields), device)  # type: ignore[arg-type]

    @settings(max_examples=examples, deadline=None)
    @given(
        counts=st.lists(st.integers(-2, 8), min_size=1, max_size=8).map(tuple),
        size=st.integers(0, 6),
        packed_rows=st.integers(0, 40),
        align=st.integers(1, 5),
        dtype=st.sampled_from(DTYPES),
        width=st.integers(1, 20),
    )
    def repacks(**fields: object) -> None:
        check_repack(Repack(**fields), device)  # type: ignore[arg-type]

    moves()
    repacks()


def which_code_runs() -> str:
    """Tell whether tensors of the CPU are moved by the interpreted kernels or by plain torch."""
    return "triton" if rows._by_triton(torch.zeros(1)) else "torch"
