"""From what the ranks found of two-batch overlap to one line for each contender, case and mode."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from rocm_dp.bench import overlap_figures as figures
from rocm_dp.bench.overlap_config import pair_name
from rocm_dp.bench.overlap_measure import slowest
from rocm_dp.bench.overlap_ways import GROUPED
from rocm_dp.bench.timeline import trace_events

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rocm_dp.bench.about import About
    from rocm_dp.bench.overlap_config import OverlapConfig
    from rocm_dp.bench.overlap_rank import Finding, RankFindings
    from rocm_dp.bench.timeline import Span

_SHARED_UP_TO = 4  # hardware queues: torch, RCCL and we make several streams, and each takes the next queue in turn


@dataclass(frozen=True, slots=True)
class Line:
    """One contender on one case in one mode: the slowest rank's times, in us of a layer, and what they mean.

    ``compute`` to ``slowdown`` as in ``OverlapTimes``; ``hidden``, ``of_ideal`` and ``x_bound`` as in
    ``overlap_figures``. ``pays``: whether the library would overlap, where it was asked. ``x_best``: the better of
    whole and overlap, or what the library chose of them, over the least that any contender has in this mode.
    ``x_grouped``: overlap over that of the library's grouped collectives, of ours only. ``hw_queues``: what the
    ranks were told, None if nothing.
    """

    counts: str
    mode: str
    contender: str
    ours: bool
    hw_queues: int | None = None
    compute: float | None = None
    comm: float | None = None
    serial: float | None = None
    overlap: float | None = None
    whole: float | None = None
    hidden: float | None = None
    of_ideal: float | None = None
    x_bound: float | None = None
    host: float | None = None
    slowdown: float | None = None
    x_best: float | None = None
    x_grouped: float | None = None
    wrong: int | None = None
    pays: bool | None = None
    reason: str | None = None

    @property
    def best(self) -> float | None:
        """What the library chose of whole and overlap; of the others, the better."""
        if self.pays is not None:
            return self.overlap if self.pays else self.whole
        return min((us for us in (self.whole, self.overlap) if us is not None), default=None)


@dataclass(frozen=True, slots=True)
class Section:
    """One measurement of everything; ``asked``: the hardware queues that the ranks were told, ``seen``: theirs."""

    asked: int | None
    seen: int
    about: About
    lines: tuple[Line, ...]
    forwards: tuple[tuple[str, tuple[Span, ...]], ...]

    @property
    def warning(self) -> str | None:
        """What a person must know of these figures: on HIP both streams may share one hardware queue."""
        if "HIP" not in self.about.versions or self.seen > _SHARED_UP_TO:
            return None
        return (
            f"GPU_MAX_HW_QUEUES is {self.seen} (4 if unset): the compute and the comm stream may share a hardware "
            f"queue, and nothing then overlaps; compare with --hw-queues {self.seen},8"
        )


@dataclass(frozen=True, slots=True)
class OverlapReport:
    """The whole run, one section for each setting of the hardware queues."""

    config: OverlapConfig
    sections: tuple[Section, ...]

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines of all sections."""
        return tuple(line for section in self.sections for line in section.lines)

    @property
    def wrong(self) -> int:
        """All wrong elements."""
        return sum(line.wrong or 0 for line in self.lines)

    @property
    def checked(self) -> int:
        """How many lines were checked."""
        return sum(line.wrong is not None for line in self.lines)

    def as_dict(self) -> dict[str, object]:
        """Return everything but the stages as plain values for JSON."""
        sections = [
            {
                "hw_queues": {"asked": section.asked, "seen": section.seen},
                "warning": section.warning,
                "about": asdict(section.about),
                "results": [asdict(line) for line in section.lines],
            }
            for section in self.sections
        ]
        return {"config": asdict(self.config), "runs": sections}

    def trace(self) -> dict[str, object]:
        """Return the stages of all forwards for a trace viewer."""
        several = len(self.sections) > 1
        return trace_events(
            (f"{name}, {section.asked} hardware queues" if several else name, spans)
            for section in self.sections
            for name, spans in section.forwards
        )


def make_section(ranks: Sequence[RankFindings], config: OverlapConfig, asked: int | None) -> Section:
    """Join the findings of all ranks, which are in the same order on each."""
    joined = [_join(same, config, asked) for same in zip(*(rank.findings for rank in ranks), strict=True)]
    lines: list[Line] = []
    for case in dict.fromkeys(line.counts for line in joined):
        for mode in dict.fromkeys(line.mode for line in joined):
            same = [line for line in joined if (line.counts, line.mode) == (case, mode)]
            lines += _with_ratios(sorted(same, key=lambda line: _place(line, config)))
    seen = min(rank.hw_queues for rank in ranks)
    return Section(asked, seen, ranks[0].about, tuple(lines), ranks[0].forwards)


def _join(same: Sequence[Finding], config: OverlapConfig, asked: int | None) -> Line:
    first = same[0]
    line = Line(pair_name(config.pairs[first.case]), first.mode, first.name, first.ours, asked, reason=first.reason)
    found = [one.times for one in same if one.times is not None]
    if len(found) < len(same):
        return line
    times = slowest(found)
    alone = times.compute, times.comm
    return replace(
        line,
        **asdict(times),
        pays=first.pays,
        hidden=figures.hidden(*alone, times.serial, times.overlap),
        of_ideal=figures.of_ideal(*alone, times.serial, times.overlap),
        x_bound=figures.times_bound(*alone, times.overlap),
    )


def _place(line: Line, config: OverlapConfig) -> tuple[int, str]:
    """Where a contender stands: ours first, as asked for, whatever the order in which they were measured."""
    names = config.transports
    known = line.ours and line.contender in names
    return names.index(line.contender) if known else len(names) + (not line.ours), line.contender


def _with_ratios(lines: Sequence[Line]) -> list[Line]:
    """Add how long each takes compared with the best, and ours with the library's grouped collectives."""
    least = min((best for line in lines if (best := line.best) is not None), default=None)
    grouped = next((line.overlap for line in lines if line.contender == GROUPED), None)
    return [
        replace(
            line,
            x_best=_ratio(line.best, least),
            x_grouped=_ratio(line.overlap, grouped) if line.ours else None,
        )
        for line in lines
    ]


def _ratio(us: float | None, other: float | None) -> float | None:
    return us / other if us is not None and other else None


def by_queues(lines: Iterable[Line]) -> dict[tuple[str, str, str], dict[int | None, float | None]]:
    """Return overlap by the hardware queues asked for, for each (counts, mode, contender)."""
    found: dict[tuple[str, str, str], dict[int | None, float | None]] = {}
    for line in lines:
        found.setdefault((line.counts, line.mode, line.contender), {})[line.hw_queues] = line.overlap
    return found
