"""The cases of a run, each the counts of all dp ranks: from a list, a sweep or a trace. Ints only, no torch."""

from __future__ import annotations

import math
from itertools import cycle, islice
from typing import TYPE_CHECKING

from rocm_dp.errors import ConfigError
from rocm_dp.plan import checked_counts

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    Counts = tuple[int, ...]

DEFAULTS = {
    ("gather", True): "1+0,32+17,128+64,512+300,4096+1024,8192+8192",
    ("combine", True): "1+0,32+17,128+64,512+300,4096+1024,8192+8192",
    ("host", True): "32+17",
    ("gather", False): "1+0,3+2,16+9",
    ("combine", False): "1+0,3+2,16+9",
    ("host", False): "3+2",
}
"""By verb and by whether it runs on GPUs; cut to the dp size at hand."""
_TRACE_TOKENS = {True: 8192, False: 64}  # the most that a rank processes in a step of a trace
_MOST_CASES = 1000
_TRACE_STEPS_READ = 100_000  # then a trace has shown what it has


def parse_counts(text: str, dp: int) -> tuple[Counts, ...]:
    """Return the cases in ``text``; one shorter than ``dp`` is repeated.

    >>> parse_counts("32+17,8", 4)
    ((32, 17, 32, 17), (8, 8, 8, 8))

    Raises ConfigError for text that is no such list, more counts than dp ranks, and a case without a row.
    """
    return tuple(_case(part, dp) for part in text.split(","))


def default_cases(verb: str, dp: int, *, gpu: bool) -> tuple[Counts, ...]:
    """Return the built-in cases of ``verb``, cut to ``dp`` ranks; each once."""
    short = ("+".join(part.split("+")[:dp]) for part in DEFAULTS[verb, gpu].split(","))
    return tuple(dict.fromkeys(_case(part, dp) for part in short))


def _case(text: str, dp: int) -> Counts:
    entries = text.split("+")
    if not all(entry.strip().isdecimal() for entry in entries):
        raise ConfigError(f"--counts must be like 32+17,128+64, got {text!r}")
    if len(entries) > dp:
        raise ConfigError(f"--counts {text} has {len(entries)} counts, but there are {dp} dp ranks")
    counts = checked_counts(islice(cycle(map(int, entries)), dp))
    if not any(counts):
        raise ConfigError(f"each case of --counts must have a row, got {text}")
    return counts


def parse_sweep(text: str, dp: int, skew: float) -> tuple[Counts, ...]:
    """Return one case for each total of ``min:max:factor``, its rows spread as ``spread`` does.

    >>> parse_sweep("2:32:4", 2, 1.5)
    ((2, 0), (6, 2), (24, 8))

    Raises ConfigError for text that is no sweep.
    """
    try:
        low_text, high_text, factor_text = text.split(":")
        low, high, factor = int(low_text), int(high_text), float(factor_text)
    except ValueError:
        raise ConfigError(f"--sweep must be min:max:factor, like 2:16384:2, got {text!r}") from None
    if not (1 <= low <= high and 1 < factor < math.inf):
        raise ConfigError(f"--sweep needs 1 <= min <= max and a factor above 1, got {text!r}")
    if math.log(high / low) / math.log(factor) >= _MOST_CASES:
        raise ConfigError(f"--sweep may have {_MOST_CASES} cases at most, got {text!r}")
    totals, total = [], float(low)
    while round(total) <= high:
        totals.append(round(total))
        total *= factor
    return tuple(spread(total, dp, skew) for total in dict.fromkeys(totals))


def spread(total: int, dp: int, skew: float) -> Counts:
    """Return ``total`` rows over ``dp`` ranks: the first has ``skew`` times the mean, the others share the rest.

    Raises ConfigError for a ``skew`` outside [1, dp].
    """
    if not 1 <= skew <= dp:
        raise ConfigError(f"--skew must lie in [1, dp {dp}], got {skew:g}")
    largest = min(total, max(-(-total // dp), round(skew * total / dp)))
    rest = total - largest
    return (largest, *((rest + dp - 2 - other) // (dp - 1) for other in range(dp - 1)))


def trace_cases(path: Path, dp: int, steps: int, *, speed: float, gpu: bool) -> tuple[Counts, ...]:
    """Return the first ``steps`` different counts that a continuous-batching scheduler makes of a trace.

    Raises what ``read_trace`` does, and ConfigError for a number of steps below 1.
    """
    from rocm_dp.workload import SchedulerConfig, read_trace, schedule

    if steps < 1:
        raise ConfigError(f"--steps must be at least 1, got {steps}")
    scheduler = SchedulerConfig(dp_size=dp, token_budget=_TRACE_TOKENS[gpu])
    trace = read_trace(path).at_speed(speed)
    return _first_different(
        (step.counts for step in islice(schedule(trace.requests, scheduler), _TRACE_STEPS_READ)), steps
    )


def _first_different(cases: Iterable[Counts], most: int) -> tuple[Counts, ...]:
    found: dict[Counts, None] = {}
    for counts in cases:
        found.setdefault(counts)
        if len(found) == most:
            break
    return tuple(found)


def short(counts: Counts) -> str:
    """Return counts as one writes them, a repeated pattern once.

    >>> short((32, 17)), short((32, 17, 32, 17)), short((8, 8, 8, 8))
    ('32+17', '2x(32+17)', '4x8')
    """
    size = len(counts)
    period = next(p for p in range(1, size + 1) if size % p == 0 and counts == counts[:p] * (size // p))
    once = "+".join(map(str, counts[:period]))
    if size <= 2 or period == size:
        return "+".join(map(str, counts))
    return f"{size // period}x{once}" if period == 1 else f"{size // period}x({once})"
