"""What every rank agrees on for one step: counts, padding, sizes, starts, digest. Ints only, no torch."""

from __future__ import annotations

import hashlib
import operator
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, SupportsIndex

from rocm_dp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_ROWS = 2**31 - 1  # a count travels as int32 to the device


class PaddingMode(Enum):
    """How the rows of the ranks lie in the global buffer."""

    MAX_LEN = 1
    """Every rank's rows take as much room as those of the largest: equal-size collectives."""
    SUM_LEN = 2
    """The rows are packed one rank after the other: nothing is moved for rows that don't exist."""


class Phase(Enum):
    """What a forward does. A mixed batch is PREFILL."""

    PREFILL = 1
    DECODE = 2
    IDLE = 3


def checked_counts(counts: Iterable[int]) -> tuple[int, ...]:
    """Return ``counts`` as a tuple of ints; raise ConfigError naming the rank whose count is out of range."""
    checked = []
    for dp_rank, count in enumerate(counts):
        if isinstance(count, bool) or not isinstance(count, SupportsIndex):
            raise ConfigError(f"counts[{dp_rank}] must be an int, got {count!r}")
        value = operator.index(count)
        if not 0 <= value <= MAX_ROWS:
            raise ConfigError(f"counts[{dp_rank}] must lie in [0, {MAX_ROWS}], got {value}")
        checked.append(value)
    if not checked:
        raise ConfigError("counts must name at least one dp rank, got none")
    return tuple(checked)


def choose_padding(
    counts: Iterable[int],
    *,
    phase: Phase,
    capturing: bool = False,
    hybrid_ssm: bool = False,
    sum_len_in_graphs: bool = False,
) -> PaddingMode:
    """Choose the padding of a step from facts that every rank knows.

    In a graph: MAX_LEN, unless ``sum_len_in_graphs``. One dp rank: MAX_LEN. Prefill: SUM_LEN, but MAX_LEN when
    the model is a hybrid SSM and some rank is idle. Otherwise MAX_LEN while at least half of the padded
    buffer is real (``2 * sum(counts) >= max(counts) * dp``), else SUM_LEN.

    >>> choose_padding([3, 5], phase=Phase.DECODE)
    <PaddingMode.MAX_LEN: 1>

    Raises ConfigError for counts that are not ints in range, or a phase that is none.
    """
    counts = checked_counts(counts)
    if not isinstance(phase, Phase):
        raise ConfigError(f"phase must be a Phase, got {phase!r}")
    if capturing:
        max_len = not sum_len_in_graphs
    elif len(counts) == 1:
        max_len = True
    elif phase is Phase.PREFILL:
        max_len = hybrid_ssm and 0 in counts
    else:
        max_len = 2 * sum(counts) >= max(counts) * len(counts)
    return PaddingMode.MAX_LEN if max_len else PaddingMode.SUM_LEN


def split_rows(rows: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Cut ``rows`` into ``parts`` (start, stop) shares whose sizes differ by at most one.

    >>> split_rows(5, 2)
    ((0, 2), (2, 5))
    """
    return tuple((part * rows // parts, (part + 1) * rows // parts) for part in range(parts))


@dataclass(frozen=True, slots=True)
class TokenPlan:
    """One step's rows, equal on every rank: agree on it once, then pass it to every call.

    ``counts``: real rows of each dp rank. ``align``: each rank's rows are rounded up to a multiple of it
    (usually the attention tp size). The global buffer has ``rows`` rows; dp rank ``d`` owns the ``sizes[d]``
    rows from ``starts[d]`` on, of which the first ``counts[d]`` are real and the others padding.

    >>> plan = TokenPlan((3, 0, 2), PaddingMode.MAX_LEN, align=2)
    >>> plan.sizes, plan.starts, plan.rows, plan.total
    ((4, 4, 4), (0, 4, 8), 12, 5)
    >>> TokenPlan((3, 0, 2), PaddingMode.SUM_LEN).starts
    (0, 3, 3)

    Raises ConfigError for counts that are not ints in range, an ``align`` below 1, or IDLE with rows.
    """

    counts: tuple[int, ...]
    padding: PaddingMode
    phase: Phase = Phase.PREFILL
    align: int = 1
    sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    rows: int = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        counts = checked_counts(self.counts)
        if not isinstance(self.padding, PaddingMode):
            raise ConfigError(f"padding must be a PaddingMode, got {self.padding!r}")
        if not isinstance(self.phase, Phase):
            raise ConfigError(f"phase must be a Phase, got {self.phase!r}")
        if type(self.align) is not int or not 1 <= self.align <= MAX_ROWS:
            raise ConfigError(f"align must be an int in [1, {MAX_ROWS}], got {self.align!r}")
        if self.phase is Phase.IDLE and any(counts):
            raise ConfigError(f"an IDLE plan has no rows, got counts {counts}")
        padded = (max(counts),) * len(counts) if self.padding is PaddingMode.MAX_LEN else counts
        sizes = tuple(-(-size // self.align) * self.align for size in padded)
        # Derived once: every verb of every layer reads them.
        for name, value in (
            ("counts", counts),
            ("sizes", sizes),
            ("starts", (0, *accumulate(sizes[:-1]))),
            ("rows", sum(sizes)),
            # Of ints alone: a plan may be sent to another process.
            ("_hash", hash((counts, self.padding.value, self.phase.value, self.align))),
        ):
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return self._hash

    @property
    def total(self) -> int:
        """Real rows over all dp ranks."""
        return sum(self.counts)

    @property
    def skew(self) -> float:
        """Largest count over the mean count: 1.0 when all ranks are equal (or all are idle)."""
        return max(self.counts) * len(self.counts) / self.total if self.total else 1.0

    def halves(self) -> tuple[TokenPlan, TokenPlan]:
        """Cut every rank's rows at the midpoint, for two-batch overlap; the second half of a rank may be empty.

        >>> [half.counts for half in TokenPlan((5, 1, 0), PaddingMode.SUM_LEN).halves()]
        [(3, 1, 0), (2, 0, 0)]
        """
        first = tuple((count + 1) // 2 for count in self.counts)
        second = tuple(count // 2 for count in self.counts)
        return replace(self, counts=first), replace(self, counts=second)

    @property
    def digest(self) -> int:
        """A 64-bit hash of the whole plan, the same on every machine, in every process and Python version.

        BLAKE2b with an 8-byte digest over the fields as little-endian int64, read as a signed int64.
        """
        words = (self.padding.value, self.phase.value, self.align, *self.counts)
        return digest64(b"".join(word.to_bytes(8, "little", signed=True) for word in words))


def digest64(data: bytes) -> int:
    """Return BLAKE2b of ``data`` with an 8-byte digest, as a signed little-endian int64."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)
