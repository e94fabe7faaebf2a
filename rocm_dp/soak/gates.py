"""Gates: from a series of samples to a verdict that says how small a leak it would have caught."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from rocm_dp.errors import ConfigError
from rocm_dp.soak.counters import Counter, Kind, counter_of, priority
from rocm_dp.soak.trend import theil_sen, warmup_end

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_dp.soak.trend import Floats

MIN_SAMPLES = 8  # after warm-up
CONFIDENCE = 0.9999  # of one slope: a run has some fifty gates on each rank, and samples are not quite independent
_WINDOW = 4  # the first and the last quarter are compared


class Status(Enum):
    """What a gate found; all but FLAT and SHOWN fail the soak."""

    FLAT = "flat"
    LEAK = "LEAK"
    MISSING = "MISSING"
    SHORT = "TOO SHORT"
    SHOWN = "shown"


@dataclass(frozen=True, slots=True)
class Series:
    """One counter of one rank. ``values`` are NaN where a sample lacks it."""

    rank: int
    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    seconds_per_step: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate of one series found.

    ``warm_up``: the step at which it was over. ``baseline`` and ``final``: medians of the first and the last
    quarter after it. ``slope`` with its confidence interval ``low`` to ``high``, in units a step; an exact counter
    has no interval. ``power``: the smallest steady leak, in units a step, that this gate would have caught in
    this very run. ``hours_left`` until ``limit`` at the pace of the run; infinity without a leak.
    """

    rank: int
    name: str
    counter: Counter
    status: Status
    warm_up: int = 0
    baseline: float = math.nan
    final: float = math.nan
    slope: float = 0.0
    low: float = 0.0
    high: float = 0.0
    power: float = math.inf
    limit: float | None = None
    hours_left: float = math.inf
    why: str = ""

    @property
    def passed(self) -> bool:
        """Whether this gate lets the run pass."""
        return self.status in (Status.FLAT, Status.SHOWN)

    @property
    def per_million(self) -> float:
        """What the slope comes to in a million steps."""
        return self.slope * 1e6


def judge(series: Series, *, limit: float | None = None, confidence: float = CONFIDENCE) -> Verdict:
    """Return the verdict on one series. Raises ConfigError for steps that don't increase or lengths that differ."""
    if len(series.steps) != len(series.values) or any(np.diff(series.steps) <= 0):
        raise ConfigError(f"{series.name}: steps must increase, one for each of {len(series.values)} values")
    counter = counter_of(series.name)
    plain = Verdict(series.rank, series.name, counter, Status.SHOWN, limit=limit)
    steps, values = np.asarray(series.steps, dtype=np.float64), np.asarray(series.values, dtype=np.float64)
    there = values[np.isfinite(values)]
    if counter.kind is Kind.SHOWN:
        return replace(plain, baseline=float(there[0]), final=float(there[-1])) if len(there) else plain
    if len(there) < len(values) or not len(values):
        why = f"{len(values) - len(there)} of {len(values)} samples lack it"
        return replace(plain, status=Status.MISSING, why=why)
    start = warmup_end(steps, values)
    plain = replace(plain, warm_up=series.steps[start])
    if len(values) - start < MIN_SAMPLES:
        why = f"{len(values) - start} samples after warm-up, {MIN_SAMPLES} are needed"
        return replace(plain, status=Status.SHORT, why=why)
    first, last = _quarters(values[start:])
    plain = replace(plain, baseline=float(np.median(first)), final=float(np.median(last)))
    if counter.kind is Kind.EXACT:
        found = _judge_exactly(plain, steps, values, start)
    elif counter.kind is Kind.BOUND:
        found = _judge_bound(plain, steps[start:], values[start:])
    else:
        found = _judge_slope(plain, steps[start:], values[start:], confidence)
    return replace(found, hours_left=_hours_left(found, series.seconds_per_step))


def _quarters(values: Floats) -> tuple[Floats, Floats]:
    size = max(2, len(values) // _WINDOW)
    return values[:size], values[-size:]


def _judge_exactly(plain: Verdict, steps: Floats, values: Floats, start: int) -> Verdict:
    """Compare the highest of the first quarter with the lowest of the last: what ends higher never came back."""
    first, last = _quarters(values[start:])
    grown = float(last.min() - first.max())
    # Where the units of a leak fall decides where its warm-up seems to end: half of the series is the worst.
    power = max(_exact_power(steps[cut:], values[cut:]) for cut in (start, len(values) // 2))
    if grown <= 0:
        return replace(plain, status=Status.FLAT, power=power)
    early, late = (part.mean() for part in _quarters(steps[start:]))
    slope = float((last.mean() - first.mean()) / (late - early))
    unit = plain.counter.unit
    why = f"never back to {first.max():,.0f} {unit} after warm-up, at least {last.min():,.0f} at the end"
    return replace(plain, status=Status.LEAK, slope=slope, low=slope, high=slope, power=power, why=why)


def _exact_power(steps: Floats, values: Floats) -> float:
    """A leak of p a step adds p * gap to what is compared, in whole units: gap steps lie between the quarters."""
    (first, last), (early, late) = _quarters(values), _quarters(steps)
    return (1.0 - min(float(last.min() - first.max()), 0.0)) / float(late[0] - early[-1])


def _judge_bound(plain: Verdict, steps: Floats, values: Floats) -> Verdict:
    """Compare every value with the bound; a leak of p a step adds p times the step to each."""
    bound = plain.counter.effect
    over = float(values.max())
    if over <= bound:
        return replace(plain, status=Status.FLAT, power=float(((bound - values) / steps).min()))
    why = f"{over:.3g} {plain.counter.unit}, {bound:.3g} are allowed"
    return replace(plain, status=Status.LEAK, power=0.0, why=why)


def _judge_slope(plain: Verdict, steps: Floats, values: Floats, confidence: float) -> Verdict:
    """Fit by Theil-Sen. A leak climbs in the whole, in each half, and would in a half to come.

    A single step climbs in no half; what settles climbs less and less, and the change from one half's slope to the
    other's, carried on, ends it.
    """
    effect = plain.counter.effect / float(steps[-1] - steps[0])
    if plain.counter.kind is Kind.DRIFT:
        effect *= plain.baseline
    slope, low, high = theil_sen(steps, values, confidence)
    half = len(values) // 2
    first, second = (theil_sen(steps[cut], values[cut])[0] for cut in (slice(half), slice(half, None)))
    # b * step added to the series adds b to each of these, so this power is exactly what would have been caught.
    surely = min(low, first, second, 2 * second - first)
    found = replace(plain, slope=slope, low=low, high=high)
    if surely <= effect:
        return replace(found, status=Status.FLAT, power=effect - surely)
    why = f"at least {low:.4g} {plain.counter.unit} a step, {effect:.4g} are allowed"
    return replace(found, status=Status.LEAK, power=effect, why=why)


def _hours_left(verdict: Verdict, seconds_per_step: float) -> float:
    leaks = verdict.status is Status.LEAK and verdict.slope > 0
    if not leaks or verdict.limit is None or seconds_per_step <= 0:
        return math.inf
    return max(verdict.limit - verdict.final, 0.0) / verdict.slope * seconds_per_step / 3600


def worst_first(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts, those that failed first."""
    order = {Status.LEAK: 0, Status.MISSING: 1, Status.SHORT: 2, Status.FLAT: 3, Status.SHOWN: 4}
    return sorted(verdicts, key=lambda v: (order[v.status], priority(v.name), v.name, v.rank))
