"""The peer kernels as calls of numbers: who takes part, how rows are cut, and what can be settled before a call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rocm_dp.kernels.launch import I32, I64, Prepared

peer_triton: ModuleType | None
try:
    from rocm_dp.kernels import combine_triton, copied_triton, gather_triton, peer_triton, pull_triton
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    peer_triton = None

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    import torch

HEAD = 5  # words of a channel in the table, before the addresses of buffers and pads
MAX_RANKS = 8  # counts travel with a launch, two in each of four words
MAX_FIELDS = 4
THREADS = {
    "gather_rows": 256,
    "combine_rows": 512,
    "pull_rows": 512,
    "open_slot": 64,
    "meet": 64,
    "sum_rows": 512,
    "give_up": 64,
    "write_counts": 64,
    "look": 256,
}
_BLOCK = 16384  # bytes that a block moves at once
_INTERPRETED_BLOCK = 512
_WIDEST = 16  # bytes of an access
# The numbers that each kernel takes, of 64 bits or of 32: table, place, counts, four words each of counts and
# starts, first, rank, tag, rows, most, looks; then of each field its rows, offset and vectors, or the numbers of a
# combine.
_COMMON = (I64, I64, I64, *[I64] * 8, *[I32] * 5, I64)
NUMBERS = {
    "gather_rows": (*_COMMON, *[I64, I64, I32] * MAX_FIELDS),
    "combine_rows": (*_COMMON, I64, I64, I64, *[I32] * 5),
    "pull_rows": (*_COMMON, I64, I32, I32),
    "open_slot": (I64, I64, I32, I32, I32, I64),
    "meet": (*_COMMON, *[I64, I64, I32] * MAX_FIELDS),
    "sum_rows": (*[I64] * 11, *[I32] * 4, I64, I64, I64, *[I32] * 3),
    "give_up": (I64, I32, I32),
    "write_counts": (I64,) * 5,
    "look": (I64, I32, I64),
}


@dataclass(frozen=True, slots=True)
class Party:
    """The ``size`` ranks from ``first`` on that take part in a call, ``rank`` (its world rank) among them.

    ``ranks`` share the memory; the ``replicas`` ranks of each of the ``dp`` dp ranks hold the same rows.
    """

    first: int
    size: int
    rank: int
    ranks: int
    dp: int
    replicas: int

    @property
    def constants(self) -> dict[str, int]:
        """The compile-time numbers of the kernels."""
        return {
            "W": self.size,
            "W_POW2": _power_of_2(self.size),
            "R": self.ranks,
            "DP_POW2": _power_of_2(self.dp),
            "REPLICAS": self.replicas,
        }


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a call: ``counts`` and ``starts`` of all dp ranks, or with ``on_device`` where int32 counts lie.

    ``rows`` of the global buffer; ``most`` that one dp rank holds.
    """

    counts: tuple[int, ...]
    starts: tuple[int, ...]
    rows: int
    most: int
    on_device: int = 0

    def words(self) -> tuple[int, ...]:
        """Return the address of the counts, then counts and starts, two to a word."""
        return (self.on_device, *two_a_word(self.counts), *two_a_word(self.starts))


def two_a_word(numbers: Sequence[int]) -> tuple[int, int, int, int]:
    """Pack up to eight numbers of 31 bits into four int64."""
    padded = [*numbers, *[0] * (MAX_RANKS - len(numbers))]
    low, high = padded[::2], padded[1::2]
    a, b, c, d = (x | y << 32 for x, y in zip(low, high, strict=True))
    return a, b, c, d


def vector_bytes(*numbers: int) -> int:
    """Return the widest access, in bytes, that addresses and row sizes of these numbers of bytes allow."""
    return math.gcd(_WIDEST, *numbers)


def usable(device: torch.device) -> str:
    """Return why the kernels can't run on ``device``; empty when they can."""
    if peer_triton is None:
        return "triton is not installed"
    if device.type == "cpu" and not peer_triton.INTERPRETED:
        return "needs GPUs, or TRITON_INTERPRET=1 on CPU ranks"
    if device.type == "cuda" and peer_triton.INTERPRETED:
        return "TRITON_INTERPRET is set"
    return ""


def gather_constants(party: Party, widths: Sequence[int], *, on_device: bool) -> dict[str, Any]:
    """Return the compile-time numbers of a gather of fields whose rows allow accesses of ``widths`` bytes."""
    fields = [*widths, *[0] * (MAX_FIELDS - len(widths))]
    constants = {f"B{index}": width for index, width in enumerate(fields)}
    return {**constants, "BLOCK": block_bytes(), **party.constants, "ON_DEVICE": on_device}


def combine_constants(
    party: Party, width: int, dtype: torch.dtype, *, on_device: bool, stepped: bool = False
) -> dict[str, Any]:
    """Return the compile-time numbers of a combine of rows that allow accesses of ``width`` bytes."""
    unit = getattr(_kernels().tl, str(dtype).removeprefix("torch."))
    return {
        "STEPPED": stepped,
        "DTYPE": unit,
        "B": width,
        "BLOCK": block_bytes(),
        **party.constants,
        "ON_DEVICE": on_device,
    }


def gather_form(party: Party, widths: Sequence[int], *, on_device: bool) -> Prepared:
    """Return the gather of up to four fields whose rows allow accesses of ``widths`` bytes."""
    return _prepared("gather_rows", gather_constants(party, widths, on_device=on_device))


def combine_form(party: Party, width: int, dtype: torch.dtype, *, on_device: bool, stepped: bool) -> Prepared:
    """Return the combine of rows of ``dtype`` that allow accesses of ``width`` bytes."""
    constants = combine_constants(party, width, dtype, on_device=on_device, stepped=stepped)
    return _prepared("combine_rows", constants)


def pull_constants(party: Party, width: int, dtype: torch.dtype, *, on_device: bool) -> dict[str, Any]:
    """Return the compile-time numbers of a pull of rows that allow accesses of ``width`` bytes."""
    constants = combine_constants(party, width, dtype, on_device=on_device)
    del constants["STEPPED"]
    return constants


def pull_form(party: Party, width: int, dtype: torch.dtype, *, on_device: bool) -> Prepared:
    """Return the pull of rows of ``dtype`` that allow accesses of ``width`` bytes."""
    return _prepared("pull_rows", pull_constants(party, width, dtype, on_device=on_device))


def open_constants(party: Party) -> dict[str, Any]:
    """Return the compile-time numbers of what makes a slot safe to write."""
    return {name: party.constants[name] for name in ("W", "W_POW2", "R")}


def open_form(party: Party) -> Prepared:
    """Return what makes a slot safe to write, ahead of copies."""
    return _prepared("open_slot", open_constants(party))


def meet_form(party: Party, widths: Sequence[int]) -> Prepared:
    """Return what waits for the peers behind the copies of up to four fields."""
    return _prepared("meet", gather_constants(party, widths, on_device=False))


def sum_constants(party: Party, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the compile-time numbers of a sum of rows of ``dtype`` that copies have brought."""
    constants = pull_constants(party, width, dtype, on_device=False)
    del constants["W_POW2"], constants["R"]
    return constants


def sum_form(party: Party, width: int, dtype: torch.dtype) -> Prepared:
    """Return the sum of rows of ``dtype`` that copies have brought."""
    return _prepared("sum_rows", sum_constants(party, width, dtype))


def give_up_form(ranks: int, lanes: int) -> Prepared:
    """Return the kernel that tells ``ranks`` ranks, in ``lanes`` places of every channel, that this one is gone."""
    return _prepared("give_up", {"LANES": lanes, "R": ranks})


def counts_form(dp: int) -> Prepared:
    """Return the kernel that writes counts of the launch to the device."""
    return _prepared("write_counts", {"DP": dp, "DP_POW2": _power_of_2(dp)})


def look_form(ranks: int) -> Prepared:
    """Return the kernel that waits in vain for the flags of ``ranks`` ranks."""
    return _prepared("look", {"W": ranks, "W_POW2": _power_of_2(ranks)})


def blocks_for(nbytes: int, most: int) -> int:
    """Return how many blocks move ``nbytes``, ``most`` at most; the same on every rank."""
    return max(1, min(most, -(-nbytes // block_bytes())))


def block_bytes() -> int:
    """Return what a block moves at once."""
    return _INTERPRETED_BLOCK if _kernels().INTERPRETED else _BLOCK


def _prepared(name: str, constants: dict[str, Any]) -> Prepared:
    kernels = _kernels()
    return Prepared(kernel(name), NUMBERS[name], constants, threads=THREADS[name], interpreted=kernels.INTERPRETED)


def kernel(name: str) -> Any:
    """Return the kernel of this name."""
    homes = {"gather_rows": gather_triton, "combine_rows": combine_triton, "pull_rows": pull_triton}
    homes.update(dict.fromkeys(("open_slot", "meet", "sum_rows"), copied_triton))
    return getattr(homes.get(name, _kernels()), name)


def _kernels() -> Any:
    assert peer_triton is not None
    return peer_triton


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()
