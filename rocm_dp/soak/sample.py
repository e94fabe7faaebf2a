"""What a sampler is, and a set of them that are read together."""

from __future__ import annotations

import math
import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class AbsentError(Exception):
    """This machine or process has no such thing to sample; the message says why."""


class Sampler(Protocol):
    """Reads some counters of this process or machine."""

    name: str

    def read(self) -> dict[str, float]:
        """Return the value of each counter by its full name, ``name`` and a dot in front."""


@dataclass(frozen=True, slots=True)
class Sample:
    """All counters at one quiet point: after ``step`` steps, ``seconds`` after the start."""

    step: int
    seconds: float
    values: dict[str, float]


def absent_value(name: str) -> float:
    """Return what a counter is in a sample that lacks it: no object of a type is none, all else is unknown."""
    return 0.0 if name.startswith("objects.") and name != "objects.all" else math.nan


class Columns:
    """Samples of this very process, in arrays: kept as objects, they would themselves look like a leak."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.columns: dict[str, array[float]] = {}
        self.seconds = 0.0

    def add(self, sample: Sample) -> None:
        """Add one sample."""
        for name in sample.values:
            if name not in self.columns:
                self.columns[name] = array("d", [absent_value(name)] * len(self.steps))
        for name, column in self.columns.items():
            column.append(sample.values.get(name, absent_value(name)))
        self.steps.append(sample.step)
        self.seconds = sample.seconds


@dataclass(slots=True)
class Probe:
    """The samplers of one process. ``absent``: why each of the others is not there, known from the start.

    A sampler that is there and fails later leaves its counters out of that sample: the gates then fail closed.
    """

    samplers: list[Sampler] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    _started: float = field(default_factory=time.monotonic)

    def add(self, name: str, make: Callable[[], Sampler]) -> None:
        """Add what ``make`` makes, once it was read without an error; else note why ``name`` is absent."""
        try:
            sampler = make()
            sampler.read()
        except Exception as error:
            self.absent[name] = str(error) if isinstance(error, AbsentError) else f"{type(error).__name__}: {error}"
        else:
            self.samplers.append(sampler)

    def read(self, step: int, extra: Iterable[tuple[str, float]] = ()) -> Sample:
        """Read everything now; ``extra`` are counters that the caller has measured itself."""
        values = dict(extra)
        for sampler in self.samplers:
            try:
                values.update(sampler.read())
            except Exception as error:
                self.failures.append(f"step {step}: {sampler.name}: {type(error).__name__}: {error}")
        return Sample(step, time.monotonic() - self._started, values)
