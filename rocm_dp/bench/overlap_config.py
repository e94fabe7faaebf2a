"""What a run of ``bench overlap`` is told, and its cases: the counts of both halves of a batch. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from rocm_dp.bench.cases import parse_counts, parse_sweep, short
from rocm_dp.bench.config import BenchConfig
from rocm_dp.errors import ConfigError

Pair = tuple[tuple[int, ...], tuple[int, ...]]

DEFAULTS = {
    True: "32+17/24+20,256+128/200+180,2048+1024/1800+1300,4096+4096/4096+4096",
    False: "3+2/2+4,16+9/12+12",
}
"""By whether it runs on GPUs; cut to the dp size at hand."""


@dataclass(frozen=True, slots=True)
class OverlapConfig(BenchConfig):
    """A run of ``layers`` synthetic layers; ``cases`` holds the first and the second half of each case in turn.

    ``intermediate``: K of the two matmuls of attention, [L, H] x [H, K] and [L, K] x [K, H], and of those of the
    experts. ``calls`` 0: no graphs. ``trace``: rank 0 also records when each stage of one forward began and ended.
    ``auto``: an exchange that is left to itself is measured too.

    Raises ConfigError for values that can't be right.
    """

    layers: int = 2
    intermediate: int = 64
    trace: bool = False
    auto: bool = True

    def __post_init__(self) -> None:
        BenchConfig.__post_init__(self)
        for name in ("layers", "intermediate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if len(self.cases) % 2:
            raise ConfigError(f"cases must be pairs of halves, got {len(self.cases)} halves")

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The cases, each the counts of its two halves."""
        return tuple(pairwise(self.cases))[::2]


@dataclass(frozen=True, slots=True)
class TuneConfig(OverlapConfig):
    """A run of ``rocm-dp tune``; ``skews``: of each case the largest dp rank's rows over the mean, as asked for."""

    skews: tuple[float, ...] = ()


def parse_pairs(text: str, dp: int) -> tuple[Pair, ...]:
    """Return the cases in ``text``; a half shorter than ``dp`` is repeated.

    >>> parse_pairs("32+17/24+20,8/4", 2)
    (((32, 17), (24, 20)), ((8, 8), (4, 4)))

    Raises ConfigError for text that is no such list, more counts than dp ranks, and a half without a row.
    """
    return tuple(_pair(part, dp) for part in text.split(","))


def default_pairs(dp: int, *, gpu: bool) -> tuple[Pair, ...]:
    """Return the built-in cases, cut to ``dp`` ranks; each once."""
    halves = (part.split("/") for part in DEFAULTS[gpu].split(","))
    cut = ("/".join("+".join(half.split("+")[:dp]) for half in pair) for pair in halves)
    return tuple(dict.fromkeys(_pair(part, dp) for part in cut))


def sweep_pairs(text: str, dp: int) -> tuple[Pair, ...]:
    """Return one case for each number of ``min:max:factor``: so many tokens a rank, split in two.

    >>> sweep_pairs("3:12:2", 2)
    (((2, 2), (1, 1)), ((3, 3), (3, 3)), ((6, 6), (6, 6)))

    Raises ConfigError for text that is no sweep, and for fewer than 2 tokens, one for each half.
    """
    totals = [counts[0] for counts in parse_sweep(text, 1, 1.0)]
    if totals[0] < 2:
        raise ConfigError(f"--sweep needs at least 2 tokens a rank, one for each half, got {text!r}")
    return tuple(((total - total // 2,) * dp, (total // 2,) * dp) for total in totals)


def parse_queues(text: str | None) -> tuple[int | None, ...]:
    """Return the numbers of hardware queues to measure with; None is the environment as it is.

    >>> parse_queues("2,8"), parse_queues(None)
    ((2, 8), (None,))

    Raises ConfigError for anything but whole numbers above 0.
    """
    if text is None:
        return (None,)
    entries = [entry.strip() for entry in text.split(",")]
    if not all(entry.isdecimal() and int(entry) for entry in entries):
        raise ConfigError(f"--hw-queues must be whole numbers above 0, like 2,8, got {text!r}")
    return tuple(dict.fromkeys(map(int, entries)))


def pair_name(pair: Pair) -> str:
    """Return a case as one writes it, a repeated pattern once.

    >>> pair_name(((32, 17), (24, 20))), pair_name(((8, 8, 8), (4, 4, 4)))
    ('32+17/24+20', '3x8/3x4')
    """
    return "/".join(map(short, pair))


def _pair(text: str, dp: int) -> Pair:
    halves = text.split("/")
    if len(halves) != 2:
        raise ConfigError(f"a case of --counts must be two halves, like 32+17/24+20, got {text!r}")
    first, second = (parse_counts(half, dp)[0] for half in halves)
    return first, second
