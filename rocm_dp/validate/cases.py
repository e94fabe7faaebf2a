"""Counts that made other libraries hang, crash or return wrong rows, as kinds that fit any number of dp ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice

from rocm_dp.plan import PaddingMode, TokenPlan

# Each pattern is repeated over the dp ranks.
_PATTERNS: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = (
    ("all ranks idle", ((0,),)),
    ("a sum that is equal in another order", ((3, 5), (5, 3))),
    ("sizes that change from one call to the next", ((3, 5), (2, 4))),
    ("rows that attention tp does not divide", ((4,), (12,), (20,), (28,))),
    ("odd and uneven", ((1, 3, 5, 7), (7, 5, 3, 1))),
    ("a small bucket beside a large one", ((8, 256),)),
    ("a large padded buffer with few real rows", ((2048, 1),)),
    ("decode beside a long prefill", ((1, 1, 1, 700),)),
    ("the last requests finish", ((2, 1, 0), (1, 0, 0))),
)
_BUSY, _ONE_TOKEN = 5, 1
REPLAYS = ((3, 5), (2, 4), (0, 1), (5, 3), (0, 0))  # one graph serves these, one after the other


@dataclass(frozen=True, slots=True)
class FieldCase:
    """The counts of all dp ranks, and the ``kind`` of failure they are known for."""

    kind: str
    counts: tuple[int, ...]

    def plans(self, align: int) -> tuple[TokenPlan, ...]:
        """Return the plans to check: packed, packed and aligned to the ranks of a dp rank, and padded."""
        layouts = {(PaddingMode.SUM_LEN, 1), (PaddingMode.SUM_LEN, align), (PaddingMode.MAX_LEN, align)}
        return tuple(
            TokenPlan(self.counts, padding, align=each)
            for padding, each in sorted(layouts, key=lambda one: (one[0].value, one[1]))
        )


def spread(pattern: tuple[int, ...], dp_size: int) -> tuple[int, ...]:
    """Return a pattern repeated, or cut, to one count for each dp rank.

    >>> spread((3, 5), 3)
    (3, 5, 3)
    """
    return tuple(islice(cycle(pattern), dp_size))


def field_cases(dp_size: int) -> tuple[FieldCase, ...]:
    """Return every case for this many dp ranks; each rank is idle once, and busy alone once."""
    cases = [FieldCase(kind, spread(each, dp_size)) for kind, patterns in _PATTERNS for each in patterns]
    for odd in range(dp_size):
        others = [3 + rank for rank in range(dp_size)]
        cases.append(FieldCase("one rank idle", (*others[:odd], 0, *others[odd + 1 :])))
        for rows, kind in ((_BUSY, "one rank busy"), (_ONE_TOKEN, "one token in all")):
            cases.append(FieldCase(kind, tuple(rows if rank == odd else 0 for rank in range(dp_size))))
    return tuple(dict.fromkeys(cases))
