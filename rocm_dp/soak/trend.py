"""The slope of a series, robust to outliers, and where the series' warm-up ends."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from rocm_dp.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_MOST_POINTS = 400  # Theil-Sen looks at all pairs
_MOST_WARM_UP = 0.5  # of the series: past it MSER's own estimate is of too few samples to be trusted


def check_scipy() -> None:
    """Raise ConfigError, naming the extra to install, without scipy: better before a soak than after it."""
    if find_spec("scipy") is None:
        raise ConfigError("the soak's gates need scipy: pip install 'rocm-dp[soak]'")


def theil_sen(steps: Floats, values: Floats, confidence: float = 0.95) -> tuple[float, float, float]:
    """Return the median slope of all pairs and its confidence interval (Sen 1968), by scipy.

    Of a long series every n-th point is taken.
    """
    check_scipy()
    from scipy.stats import theilslopes

    stride = -(-len(values) // _MOST_POINTS)
    found = theilslopes(values[::stride], steps[::stride], alpha=confidence)
    return float(found[0]), float(found[2]), float(found[3])


def warmup_end(steps: Floats, values: Floats) -> int:
    """Return how many of the first samples to leave out: the MSER rule, on what is left beside the trend.

    It is the ``d`` that makes ``sum((v[d:] - mean(v[d:]))**2) / (n - d)**2`` least, at most half of the series
    (K. P. White Jr., An effective truncation heuristic for bias reduction in simulation output, 1997). The trend of
    the second half is taken away first, so that a leak does not pass for a warm-up, and the end that is found does
    not depend on how fast something leaks.
    """
    most = int(len(values) * _MOST_WARM_UP)
    if most < 2:
        return 0
    slope = theil_sen(steps[most:], values[most:])[0]
    rest = values - slope * (steps - steps[-1])
    rest = (rest - rest[-1])[::-1]  # bytes squared would lose the small differences
    count = np.arange(1, len(rest) + 1, dtype=np.float64)
    spread = np.maximum(np.cumsum(rest**2) - np.cumsum(rest) ** 2 / count, 0.0) / count**2
    candidates = spread[::-1][: most + 1]
    # Rounding must not move the end of what is level from its start.
    return int(np.argmax(candidates <= candidates.min() * (1 + 1e-9) + 1e-12))
