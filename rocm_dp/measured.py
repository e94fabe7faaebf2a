"""What was measured on this machine: how long a layer takes over each transport, overlapped or not. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from rocm_dp.errors import ConfigError

_FORMAT = 1
_LEAST, _MOST = 1e-9, 1e12  # microseconds, and skews: beyond is no measurement


@dataclass(frozen=True, slots=True)
class Measured:
    """Microseconds of a layer of ``rows`` rows in all, the largest dp rank's ``skew`` times the mean of them.

    ``graph``: replayed from a graph. ``times``: (transport, overlapped, microseconds); overlapped in two halves,
    else all rows at once.
    """

    graph: bool
    rows: int
    skew: float
    times: tuple[tuple[str, bool, float], ...]


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """All that ``rocm-dp tune`` measured for one machine, layout and kind of rows."""

    entries: tuple[Measured, ...] = ()

    @property
    def names(self) -> set[str]:
        """The transports that were measured."""
        return {name for one in self.entries for name, _, _ in one.times}

    def times(self, rows: int, skew: float, *, graph: bool) -> dict[tuple[str, bool], float]:
        """Return the microseconds of a layer by (transport, overlapped); empty when nothing like it was measured.

        Of the skews measured the nearest is taken. Between two numbers of rows the logarithm of the time is
        interpolated over that of the rows; beyond the ends the nearest counts.
        """
        alike = [one for one in self.entries if one.graph is graph]
        if not alike:
            return {}
        nearest = min({one.skew for one in alike}, key=lambda other: (abs(other - skew), other))
        curve = sorted((one for one in alike if one.skew == nearest), key=lambda one: one.rows)
        below = max((one for one in curve if one.rows <= rows), key=lambda one: one.rows, default=curve[0])
        above = min((one for one in curve if one.rows >= rows), key=lambda one: one.rows, default=curve[-1])
        low, high = _by_kind(below), _by_kind(above)
        return {
            kind: _between(rows, (below.rows, low[kind]), (above.rows, high[kind])) for kind in low if kind in high
        }

    def to_json(self) -> str:
        """Return it as text for ``from_json``."""
        entries = [[one.graph, one.rows, one.skew, [list(time) for time in one.times]] for one in self.entries]
        return json.dumps({"format": _FORMAT, "entries": entries}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> MeasuredTable:
        """Return the table that ``to_json`` wrote; ConfigError for anything else."""
        try:
            plain = json.loads(text)
            if plain["format"] != _FORMAT:
                raise ConfigError(f"a measured table must be of format {_FORMAT}, got {plain['format']!r}")
            return cls(tuple(_entry(*one) for one in plain["entries"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"not a measured table: {type(error).__name__}: {error}") from error


def _entry(graph: object, rows: object, skew: object, times: list[list[object]]) -> Measured:
    if type(graph) is not bool or type(rows) is not int or rows < 0 or not _positive(skew):
        raise ConfigError(f"an entry must begin with a bool, rows and a skew above 0, got {(graph, rows, skew)}")
    for name, overlapped, us in times:
        if type(name) is not str or type(overlapped) is not bool or not _positive(us):
            raise ConfigError(f"a time must be a name, a bool and microseconds, got {(name, overlapped, us)}")
    kept = tuple((str(name), bool(overlapped), float(us)) for name, overlapped, us in times)  # type: ignore[arg-type]
    return Measured(graph, rows, float(skew), kept)  # type: ignore[arg-type]


def _positive(number: object) -> bool:
    return type(number) in {int, float} and _LEAST < number < _MOST  # type: ignore[operator]


def _by_kind(entry: Measured) -> dict[tuple[str, bool], float]:
    return {(name, overlapped): us for name, overlapped, us in entry.times}


def _between(rows: int, low: tuple[int, float], high: tuple[int, float]) -> float:
    """Interpolate between two (rows, microseconds).

    >>> _between(3, (1, 10.0), (7, 40.0))
    20.0
    """
    (first, us), (last, other) = low, high
    if first >= last or rows <= first:
        return us
    if rows >= last:
        return other
    share = (math.log(rows + 1) - math.log(first + 1)) / (math.log(last + 1) - math.log(first + 1))
    return round(us * math.exp(share * math.log(other / us)), 6)
