"""Which kernels are compiled ahead of time: each in the forms that the library launches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from rocm_dp.aot.target import WAVE, Pointer
from rocm_dp.kernels import rows, rows_triton

if TYPE_CHECKING:
    from collections.abc import Iterator

# Rows in use: hidden states, expert ids, token ids, top-k weights, block scales, logits of an odd vocabulary, fp8.
ROWS = (
    ("bf16", 2, 7168),
    ("fp8", 1, 7168),
    ("int32", 4, 6),
    ("int64", 8, 1),
    ("bf16", 2, 6),
    ("fp32", 4, 56),
    ("bf16", 2, 32001),
    ("fp8", 1, 7),
)
WORLDS = (2, 4, 8)
VERBS = {"write_rows": (False, False), "place_rows": (False, True), "read_rows": (True, True)}


@dataclass(frozen=True, slots=True)
class Form:
    """One form of a kernel: what it is for, and the arguments that make Triton compile it.

    ``vec_bytes``: the widest access that the rows allow; ``large``: for buffers of more than 2 GiB.
    """

    verb: str
    rows: str
    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]
    vec_bytes: int
    large: bool

    def compile(self) -> Any:
        """Compile for the target in force and return Triton's compiled kernel."""
        return self.kernel.warmup(*self.args, **self.constants, num_warps=rows._THREADS // WAVE, grid=(1,))


def row_forms() -> Iterator[Form]:
    """Yield the forms of the row kernels: every verb, kind of row, and buffers up to and above 2 GiB."""
    for (name, itemsize, width), large in product(ROWS, (False, True)):
        shape = rows.shape_for(width * itemsize)
        pointer = Pointer(shape.dtype, large=large)
        label = f"[{width}] {name}"
        common = {"REPORT": True, "VEC": shape.vec, "BLOCK": shape.block}
        row_vecs = width * itemsize // shape.vec_bytes
        status, number = Pointer(torch.int64), Pointer(torch.int32)
        for verb, (read, fill) in VERBS.items():
            args: tuple[Any, ...] = (pointer, pointer, number, number, status, 4096, 8192, row_vecs)
            constants = {"READ": read, "FILL": fill, "ON_DEVICE": True, **common}
            yield Form(verb, label, rows_triton.move_rows, args, constants, shape.vec_bytes, large)
        for verb, world in product(("compact_rows", "expand_rows"), WORLDS):
            args = (pointer, pointer, number, status, 512, 4096, row_vecs, 1)
            constants = {"EXPAND": verb == "expand_rows", "RANKS": world, "RANKS_POW2": world, **common}
            named = f"{verb}, {world} ranks"
            yield Form(named, label, rows_triton.repack_rows, args, constants, shape.vec_bytes, large)
