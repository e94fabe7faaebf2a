"""Which kernels are compiled ahead of time: each in the forms that the library launches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from rocm_dp.aot.target import WAVE, Pointer
from rocm_dp.kernels import peer, rows, rows_triton

if TYPE_CHECKING:
    from collections.abc import Iterator

# One kind of row in use for each width of access: only the width is compiled in.
ROWS = (
    ("bf16", 2, 7168),  # hidden states
    ("int32", 4, 6),  # expert ids, top-k 6
    ("bf16", 2, 6),  # their weights
    ("bf16", 2, 32001),  # logits of an odd vocabulary
    ("fp8", 1, 7),
)
# Numbers on the device or the host, with a status or without: the transports launch the last.
CALLS = ((True, True), (True, False), (False, False))
# SGPRs that a gather may keep in lanes of a VGPR, which touch no memory, by its fields: addresses, offsets, counts
# of four fields at 8 ranks are more than there are, and Triton 3.7 has one or two too few for one field as well.
_LANES = {1: 2, 4: 24}
_ROW_THREADS = rows._THREADS
MOST_BYTES = 16  # of an access
WORLDS = (2, 4, 8)  # for narrower rows the last of them stands for all
VERBS = {"write_rows": (False, False), "place_rows": (False, True), "read_rows": (True, True)}


@dataclass(frozen=True, slots=True)
class Form:
    """One form of a kernel: what it is for, and the arguments that make Triton compile it.

    ``lanes``: SGPRs that it may keep in lanes of a VGPR. ``vec_bytes``: the widest access that rows allow (0: it
    moves none); ``large``: for buffers of more than 2 GiB; ``peers``: how many ranks it hands rows to.
    """

    verb: str
    rows: str
    call: str
    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    vec_bytes: int
    large: bool
    peers: int = 0
    threads: int = _ROW_THREADS
    lanes: int = 0

    @property
    def only_rows(self) -> bool:
        """Whether the kernel touches memory for nothing but rows."""
        return not self.constants.get("REPORT", True) and not self.constants.get("ON_DEVICE", True)

    def compile(self) -> Any:
        """Compile for the target in force and return Triton's compiled kernel."""
        return self.kernel.warmup(*self.args, **self.constants, num_warps=self.threads // WAVE, grid=(1,))


def row_forms() -> Iterator[Form]:
    """Yield the forms of the row kernels: every verb and call, rows of each width, buffers up to and above 2 GiB.

    Pointers are aligned to 16 bytes, or to what the rows are; numbers on the device are int32.
    """
    for (name, itemsize, width), large in product(ROWS, (False, True)):
        shape = rows.shape_for(width * itemsize)
        pointer = Pointer(shape.dtype, large=large)
        row_vecs = width * itemsize // shape.vec_bytes
        cut = {"VEC": shape.vec, "BLOCK": shape.block}

        def form(verb: str, call: str, kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> Form:
            label = f"[{width}] {name}"  # noqa: B023 - used at once
            return Form(verb, label, call, kernel, args, {**constants, **cut}, shape.vec_bytes, large)  # noqa: B023

        for (verb, (read, fill)), (on_device, report) in product(VERBS.items(), CALLS):
            number: Any = Pointer(torch.int32) if on_device else 1
            args: tuple[Any, ...]
            args = (pointer, pointer, number, number, _status(report=report), 4096, 8192, row_vecs)
            constants: dict[str, Any]
            constants = {"READ": read, "FILL": fill, "ON_DEVICE": on_device, "REPORT": report}
            yield form(verb, _call(on_device=on_device, report=report), rows_triton.move_rows, args, constants)
        worlds = WORLDS if shape.vec_bytes == MOST_BYTES else WORLDS[-1:]
        for verb, world, report in product(("compact_rows", "expand_rows"), worlds, (True, False)):
            counts = Pointer(torch.int32)
            args = (pointer, pointer, counts, _status(report=report), 512, 4096, row_vecs, 1)
            constants = {"EXPAND": verb == "expand_rows", "RANKS": world, "RANKS_POW2": world, "REPORT": report}
            call = f"{world} ranks, {_call(on_device=True, report=report)}"
            yield form(verb, call, rows_triton.repack_rows, args, constants)


def peer_forms() -> Iterator[Form]:
    """Yield the forms of the peer kernels: bfloat16 rows over 2, 4 and 8 ranks, counts on the device or not.

    Further a gather of four fields, and the two launches that bring the shares of 2 replicas together.
    """
    for world, on_device in product(WORLDS, (False, True)):
        party = peer.Party(0, world, 0, world, world, 1)
        call = f"{world} ranks, {_counts(on_device=on_device)}"
        one = (MOST_BYTES,)
        yield _peer_form("gather_rows", call, peer.gather_constants(party, one, on_device=on_device), world)
        sums = peer.combine_constants(party, MOST_BYTES, torch.bfloat16, on_device=on_device)
        yield _peer_form("combine_rows", call, sums, world)
        pulls = peer.pull_constants(party, MOST_BYTES, torch.bfloat16, on_device=on_device)
        yield _peer_form("pull_rows", call, pulls, world)
        if not on_device:
            yield from _copied_forms(party, world)
    for on_device in (False, True):
        world = WORLDS[-1]
        fields = (MOST_BYTES,) * peer.MAX_FIELDS
        party = peer.Party(0, world, 0, world, world, 1)
        call = f"{world} ranks, 4 fields, {_counts(on_device=on_device)}"
        yield _peer_form("gather_rows", call, peer.gather_constants(party, fields, on_device=on_device), world)
        # Addends of attention tp, and shares of a dp rank: among 2 of 8 ranks, each of 4 dp ranks twice.
        pair = peer.Party(0, 2, 0, world, world // 2, 2)
        call = f"2 of {world} ranks, {_counts(on_device=on_device)}"
        yield _peer_form("gather_rows", call, peer.gather_constants(pair, one, on_device=on_device), 2)
        sums = peer.combine_constants(pair, MOST_BYTES, torch.bfloat16, on_device=on_device)
        yield _peer_form("combine_rows", call, sums, 2)


def _copied_forms(party: peer.Party, world: int) -> Iterator[Form]:
    """Yield what is left to kernels when rows are copied: two that only meet the peers, and the sum."""
    call = f"{world} ranks, copied"
    meets = {"open_slot": peer.open_constants(party), "meet": peer.gather_constants(party, (), on_device=False)}
    for verb, constants in meets.items():
        kernel, threads = peer.kernel(verb), peer.THREADS[verb]
        yield Form(verb, "none", call, kernel, peer.NUMBERS[verb], constants, 0, False, world, threads)
    sums = peer.sum_constants(party, MOST_BYTES, torch.bfloat16)
    kernel, threads = peer.kernel("sum_rows"), peer.THREADS["sum_rows"]
    yield Form(
        "sum_rows", "[7168] bf16", call, kernel, peer.NUMBERS["sum_rows"], sums, MOST_BYTES, False, 0, threads
    )


def _peer_form(verb: str, call: str, constants: dict[str, Any], peers: int) -> Form:
    fields = sum(constants.get(f"B{index}", 0) > 0 for index in range(peer.MAX_FIELDS))
    lanes = _LANES.get(fields, 0)
    kernel = peer.kernel(verb)
    return Form(
        verb,
        "[7168] bf16",
        call,
        kernel,
        peer.NUMBERS[verb],
        constants,
        MOST_BYTES,
        False,
        peers,
        peer.THREADS[verb],
        lanes,
    )


def all_forms() -> Iterator[Form]:
    """Yield the forms of every kernel."""
    yield from row_forms()
    yield from peer_forms()


def _status(*, report: bool) -> Pointer | None:
    return Pointer(torch.int64) if report else None


def _counts(*, on_device: bool) -> str:
    return f"counts on the {'device' if on_device else 'host'}"


def _call(*, on_device: bool, report: bool) -> str:
    return f"numbers on the {'device' if on_device else 'host'}, {'with' if report else 'no'} status"
