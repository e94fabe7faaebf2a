"""What the ranks have said so far: kept in memory, and line by line in a file that survives the soak."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, TextIO, TypeAlias

from rocm_dp.errors import ConfigError
from rocm_dp.files import read_bounded
from rocm_dp.soak.gates import Series
from rocm_dp.soak.rank import Ended, Mismatch, Started
from rocm_dp.soak.sample import Sample, absent_value

if TYPE_CHECKING:
    from pathlib import Path

    from rocm_dp.soak.config import SoakConfig

Said: TypeAlias = Started | Sample | Mismatch | Ended
MOST_BYTES = 1 << 28  # a sample takes about 1.3 kB: 25,000 of each of eight ranks
_KINDS = {kind.__name__.lower(): kind for kind in (Started, Sample, Mismatch, Ended)}


@dataclass(slots=True)
class RankLog:
    """What one rank has said."""

    started: Started | None = None
    samples: list[Sample] = field(default_factory=list)
    ended: Ended | None = None

    @property
    def last(self) -> dict[str, float]:
        """The counters at the moment of an error, or else of the last sample."""
        if self.ended is not None and self.ended.last:
            return self.ended.last
        return self.samples[-1].values if self.samples else {}


@dataclass(slots=True)
class SoakLog:
    """What all ranks have said. ``about``: the soak's configuration as plain values; ``error``: what ended it."""

    about: dict[str, object]
    ranks: dict[int, RankLog] = field(default_factory=lambda: defaultdict(RankLog))
    mismatches: list[str] = field(default_factory=list)
    error: str = ""
    stopped: bool = False

    def add(self, rank: int, said: Said) -> None:
        """Note what ``rank`` has said."""
        log = self.ranks[rank]
        if isinstance(said, Started):
            log.started = said
        elif isinstance(said, Sample):
            log.samples.append(said)
        elif isinstance(said, Mismatch):
            self.mismatches.append(said.text)
        else:
            log.ended = said

    @property
    def step(self) -> int:
        """The last step that was sampled on any rank."""
        return max((log.samples[-1].step for log in self.ranks.values() if log.samples), default=0)

    @property
    def limits(self) -> dict[str, float]:
        """The limits of the counters, as rank 0 or the first other one has them."""
        return next((log.started.limits for log in self.ranks.values() if log.started), {})

    def series(self) -> list[Series]:
        """Return every counter of every rank; one that another rank has is NaN where it is missing."""
        found = []
        names = dict.fromkeys(n for log in self.ranks.values() for sample in log.samples for n in sample.values)
        for rank, log in sorted(self.ranks.items()):
            steps = tuple(sample.step for sample in log.samples)
            pace = _seconds_per_step(log.samples)
            for name in names:
                values = tuple(sample.values.get(name, absent_value(name)) for sample in log.samples)
                found.append(Series(rank, name, steps, values, pace))
        return found


def _seconds_per_step(samples: list[Sample]) -> float:
    if len(samples) < 2:
        return 0.0
    return (samples[-1].seconds - samples[0].seconds) / max(1, samples[-1].step - samples[0].step)


def about(config: SoakConfig) -> dict[str, object]:
    """Return the configuration as plain values; of a trace, its name."""
    names = [name for name in config.__slots__ if name != "trace"]
    trace = config.trace.name if config.trace is not None else None
    return {**{name: getattr(config, name) for name in names}, "trace": trace}


class Journal:
    """Writes a log as JSON lines while it grows; each line is in the file before the next note is taken."""

    def __init__(self, stream: TextIO | None, plain: dict[str, object]) -> None:
        self._stream = stream
        self.write("config", plain)

    def note(self, rank: int, said: Said) -> None:
        """Write what a rank has said."""
        self.write(type(said).__name__.lower(), {"rank": rank, **asdict(said)})

    def write(self, kind: str, plain: dict[str, object]) -> None:
        """Write one line of ``kind``."""
        if self._stream is not None:
            print(json.dumps({"kind": kind, **plain}), file=self._stream, flush=True)


def read_log(path: Path) -> SoakLog:
    """Read what a Journal wrote, also of a soak that was killed: a last line that is cut short is left out.

    Raises ConfigError for a file that is none or that is larger than MOST_BYTES, and OSError when it can't be read.
    """
    log = None
    lines = read_bounded(path.resolve(), MOST_BYTES).splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            plain = json.loads(line)
            kind = plain.pop("kind")
            if kind == "config":
                log = SoakLog(plain)
            elif log is None:
                raise ConfigError(f"{path}, line {number}: the first line must be of kind config, got {kind!r}")
            elif kind in _KINDS:
                log.add(plain.pop("rank"), _KINDS[kind](**plain))
            elif kind == "outcome":
                log.error, log.stopped = plain["error"], plain["stopped"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if number == len(lines) and not isinstance(error, ConfigError):
                break
            raise ConfigError(f"{path}, line {number} is none of a soak: {error}") from error
    if log is None:
        raise ConfigError(f"{path} holds no soak")
    return log
