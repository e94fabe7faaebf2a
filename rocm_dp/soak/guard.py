"""LeakGuard: the soak's samplers and gates around any loop of this process."""

from __future__ import annotations

import gc
import time
from array import array
from statistics import median
from typing import TYPE_CHECKING

from rocm_dp.errors import ConfigError
from rocm_dp.soak.config import SAMPLES
from rocm_dp.soak.gates import MIN_SAMPLES, Series, judge, worst_first
from rocm_dp.soak.host import host_limits
from rocm_dp.soak.probes import add_device, add_exchange, host_probe
from rocm_dp.soak.sample import Columns
from rocm_dp.soak.trend import check_scipy

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from typing_extensions import Self

    from rocm_dp.exchange import TokenExchange
    from rocm_dp.soak.gates import Verdict


_SHORTEST = 20e-6  # seconds: of shorter steps a timer and a scheduler make more than the share that is judged


class LeakGuard:
    """Samples this process while ``steps()`` is iterated over; ``finish`` says what leaked.

    ``count``: how many steps there are. ``device``: a GPU to sample too. A context manager: what is alive when
    it is entered is not counted among the objects. Raises ConfigError for too few steps, or without scipy.
    """

    def __init__(self, count: int, *, device: torch.device | None = None) -> None:
        least = 4 * MIN_SAMPLES
        if type(count) is not int or count < least:
            raise ConfigError(f"steps must be an int of at least {least}, got {count!r}")
        check_scipy()
        self._count, self._done, self._device = count, 0, device
        self._limits = host_limits()
        self._samples = Columns()

    def __enter__(self) -> Self:
        gc.collect()
        gc.freeze()
        self._probe, self._objects = host_probe()
        if self._device is not None:
            add_device(self._probe, self._device)
        return self

    def __exit__(self, *error: object) -> None:
        gc.unfreeze()

    def watch(self, exchange: TokenExchange) -> None:
        """Also sample what ``exchange`` counts itself; before ``steps()``."""
        if self._done:
            raise ConfigError(f"watch() must come before the first step, got it after {self._done}")
        add_exchange(self._probe, exchange)

    def limit(self, name: str, value: float) -> None:
        """Say how far the counter ``name`` may grow, for the hours that are left."""
        self._limits[name] = value

    def steps(self) -> Iterator[int]:
        """Yield the number of each step; what the loop does between is one step of it."""
        self._sample(1.0)
        self._objects.restart()
        every, seconds, first = max(1, self._count // SAMPLES), array("d"), 0.0
        for step in range(self._count):
            began = time.perf_counter()
            yield step
            self._done = step + 1
            seconds.append(time.perf_counter() - began)
            if self._done % every == 0 or self._done == self._count:
                now = max(median(seconds), _SHORTEST)
                first = first or now
                self._sample(now / first)
                del seconds[:]

    def _sample(self, drift: float) -> None:
        self._samples.add(self._probe.read(self._done, (("latency.drift", drift),)))

    def verdicts(self) -> list[Verdict]:
        """Return the verdict on each counter, those that failed first."""
        steps, pace = tuple(self._samples.steps), self._samples.seconds / max(1, self._done)
        series = [Series(0, name, steps, tuple(values), pace) for name, values in self._samples.columns.items()]
        return worst_first([judge(one, limit=self._limits.get(one.name)) for one in series])

    def finish(self) -> str:
        """Return what is wrong, a line for each counter that failed; empty when nothing is."""
        if self._done < self._count:
            return f"leak_guard.steps() was left after {self._done} of {self._count} steps: nothing can be said"
        lines = list(self._probe.failures)
        for verdict in self.verdicts():
            if not verdict.passed:
                about = f"{verdict.per_million:,.4g} {verdict.counter.unit} in a million steps"
                lines.append(f"{verdict.name} {verdict.status.value}: {verdict.why} ({about})")
        if lines:
            grown = ", ".join(f"{name} +{more}" for name, more in self._objects.grown())
            lines += [f"objects that grew most: {grown}"] if grown else []
        return "\n".join(lines)
