"""Synthetic request traces: a small model fitted to a real trace, and two models fitted to public ones."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from rocm_dp.errors import ConfigError
from rocm_dp.plan import MAX_ROWS
from rocm_dp.workload.traces import MAX_SECONDS, Request, Trace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_NANO = 10**9
_MILLION = 10**6

KNOTS = (
    *(0, 1_000, 10_000),
    *range(50_000, 1_000_000, 50_000),
    *(980_000, 990_000, 993_000, 996_000, 998_000, 999_000, 999_500, 999_900, _MILLION),
)
"""Probabilities in millionths at which a model keeps quantiles: close in the upper tails, which are long."""


@dataclass(frozen=True, slots=True)
class TraceModel:
    """Three distributions as quantiles at ``KNOTS``, linear in between, and one correlation.

    ``gaps`` are nanoseconds between arrivals; ``contexts`` and ``generated`` are tokens. Gaps are drawn
    independently: bursts and lulls come from how widely gaps spread, and a rate that swings over minutes is
    not kept. ``correlation`` is Spearman's, between context and generated: with that probability a request
    takes both from the same quantile (from opposite ones when negative), else from independent quantiles.

    Raises ConfigError for quantiles that aren't non-decreasing ints in range, one for each of ``KNOTS``, or a
    ``correlation`` outside [-1, 1].
    """

    name: str
    gaps: tuple[int, ...]
    contexts: tuple[int, ...]
    generated: tuple[int, ...]
    correlation: float = 0.0

    def __post_init__(self) -> None:
        for field, table, least, most in (
            ("gaps", self.gaps, 0, MAX_SECONDS * _NANO),
            ("contexts", self.contexts, 1, MAX_ROWS),
            ("generated", self.generated, 1, MAX_ROWS),
        ):
            if len(table) != len(KNOTS) or any(type(value) is not int for value in table):
                raise ConfigError(f"{field} must be {len(KNOTS)} ints, got {table}")
            if table[0] < least or table[-1] > most or any(low > high for low, high in pairwise(table)):
                raise ConfigError(f"{field} must not decrease and lie in [{least}, {most}], got {table}")
        if not -1 <= self.correlation <= 1:
            raise ConfigError(f"correlation must lie in [-1, 1], got {self.correlation}")

    def generate(self, count: int, *, seed: int) -> Trace:
        """Draw a trace of ``count`` requests, the first at 0 seconds.

        The same ``seed`` gives the same trace on every machine, since only the raw PCG64 stream and integer
        arithmetic are used; and a longer trace starts with the shorter one.

        Raises ConfigError for a ``count`` below 1 or a ``seed`` below 0.
        """
        if type(count) is not int or count < 1:
            raise ConfigError(f"count must be an int of at least 1, got {count!r}")
        if type(seed) is not int or seed < 0:
            raise ConfigError(f"seed must be an int of at least 0, got {seed!r}")
        # The remainder favours low values by 5e-14 of their probability.
        draws = (np.random.PCG64(seed).random_raw(4 * count) % _MILLION).astype(np.int64)
        gap, context, generated, coin = draws.reshape(count, 4).T
        twin = context if self.correlation >= 0 else _MILLION - 1 - context
        generated = np.where(coin < round(abs(self.correlation) * _MILLION), twin, generated)
        gaps = _interpolated(self.gaps, gap)
        requests = zip(
            accumulate(gaps[1:], initial=0),
            _interpolated(self.contexts, context),
            _interpolated(self.generated, generated),
            strict=True,
        )
        return Trace(f"{self.name}-{seed}", tuple(Request(ns / _NANO, ctx, gen) for ns, ctx, gen in requests))


def fit(trace: Trace) -> TraceModel:
    """Fit a model to a trace: order statistics at ``KNOTS``, and Spearman's rank correlation.

    Raises ConfigError for a trace of fewer than two requests.
    """
    if len(trace.requests) < 2:
        raise ConfigError(f"a fit takes at least 2 requests, got {len(trace.requests)}")
    arrivals = [round(request.arrival * _NANO) for request in trace.requests]
    contexts = [request.context for request in trace.requests]
    generated = [request.generated for request in trace.requests]
    return TraceModel(
        trace.name,
        _quantiles(after - before for before, after in pairwise(arrivals)),
        _quantiles(contexts),
        _quantiles(generated),
        _spearman(contexts, generated),
    )


def _quantiles(values: Iterable[int]) -> tuple[int, ...]:
    ordered = sorted(values)
    return tuple(ordered[(knot * (len(ordered) - 1) + _MILLION // 2) // _MILLION] for knot in KNOTS)


def _interpolated(table: tuple[int, ...], draws: Ints) -> list[int]:
    """Return the quantiles at ``draws`` (probabilities in millionths, below a million)."""
    knots, values = np.asarray(KNOTS, np.int64), np.asarray(table, np.int64)
    left = np.searchsorted(knots, draws, side="right") - 1
    offset, width, rise = draws - knots[left], np.diff(knots)[left], np.diff(values)[left]
    # rise * offset / width to the nearest int, in an order that can't overflow.
    quantiles = values[left] + rise // width * offset + (rise % width * offset + width // 2) // width
    return [int(quantile) for quantile in quantiles]


def _spearman(first: list[int], second: list[int]) -> float:
    """Return Spearman's rank correlation to four places, or 0 when one of the two is constant."""
    ranks = [_ranks(first), _ranks(second)]
    centred = [rank - rank.mean() for rank in ranks]
    norm = np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum())
    return round(float((centred[0] * centred[1]).sum() / norm), 4) if norm else 0.0


def _ranks(values: list[int]) -> NDArray[np.float64]:
    """Return ranks from 0; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[inverse]


# fmt: off
CODE = TraceModel(
    name="azure-code-2023",
    gaps=(
        6_000, 6_000, 22_000, 88_000, 209_000, 885_000, 1_184_000, 2_077_000, 3_292_000, 5_345_000,
        15_117_000, 38_222_000, 63_812_000, 89_551_000, 94_988_000, 97_943_000, 100_130_000, 103_998_000,
        160_092_000, 198_814_000, 272_778_000, 400_764_000, 798_791_000, 2_205_167_000, 3_699_249_000,
        17_576_489_000, 40_301_603_000, 78_444_134_000, 138_720_782_000, 173_521_702_000, 217_168_952_000
    ),
    contexts=(
        3, 7, 17, 75, 147, 232, 386, 578, 770, 938, 1075, 1261, 1469, 1690, 1909, 2164, 2433, 2745, 3192,
        3919, 5186, 7302, 7436, 7436, 7436, 7436, 7436, 7437, 7437, 7437, 7437
    ),
    generated=(
        6, 6, 6, 6, 7, 7, 8, 9, 9, 10, 11, 12, 13, 14, 16, 18, 20, 24, 29, 39, 55, 90, 172, 252, 295, 403,
        666, 824, 895, 1276, 1899
    ),
    correlation=-0.0215,
)
"""Code completion: bursts, long prompts, short answers (median context 1469, generated 13 tokens).

What ``fit`` returns for the 8,819 requests of the code file of the Azure LLM inference trace 2023 by
Microsoft (Azure Public Dataset, CC-BY 4.0; Patel et al., 'Splitwise', ISCA 2024). Variance over mean of the
requests in a minute: 160 in that trace, about 120 in those drawn.
"""

CONVERSATION = TraceModel(
    name="azure-conversation-2023",
    gaps=(
        2_000, 7_000, 551_000, 6_320_000, 16_129_000, 26_427_000, 36_523_000, 48_272_000, 60_722_000,
        73_455_000, 87_254_000, 101_943_000, 118_424_000, 137_611_000, 158_670_000, 183_172_000,
        213_606_000, 246_733_000, 288_810_000, 345_900_000, 420_740_000, 565_234_000, 749_287_000,
        888_997_000, 961_597_000, 1_087_672_000, 1_248_170_000, 1_430_997_000, 1_796_213_000,
        3_102_731_000, 4_314_579_000
    ),
    contexts=(
        2, 8, 29, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130, 1189, 1315,
        1876, 2735, 4083, 4098, 4142, 4232, 5022, 5652, 6212, 6472, 7650, 14050
    ),
    generated=(
        7, 12, 16, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411, 424, 451,
        540, 601, 621, 658, 916, 954, 1000, 1000, 1000
    ),
    correlation=0.0728,
)
"""Conversation: an even flow of requests (median context 1020, generated 129 tokens).

What ``fit`` returns for the 19,366 requests of the conversation file of the Azure LLM inference trace 2023 by
Microsoft (Azure Public Dataset, CC-BY 4.0; Patel et al., 'Splitwise', ISCA 2024). Variance over mean of the
requests in a minute: 21 in that trace, where the rate drifts, and about 2.5 in those drawn.
"""
# fmt: on
