"""The outcome of a soak: every verdict, what was wrong, and whether it passes."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING

from rocm_dp.soak.counters import priority
from rocm_dp.soak.diagnosis import Diagnosis, diagnose
from rocm_dp.soak.gates import Status, Verdict, judge, worst_first

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_dp.soak.log import SoakLog

_MOST_SAID = 160  # characters of a problem in the headline


@dataclass(frozen=True, slots=True)
class Outcome:
    """``verdicts``: those that failed first. ``problems``: everything wrong that no gate tells."""

    verdicts: tuple[Verdict, ...]
    problems: tuple[str, ...]
    diagnosis: Diagnosis | None
    steps: int
    checks: int
    stopped: bool

    @property
    def passed(self) -> bool:
        """Whether every gate passed and nothing else was wrong."""
        return not self.problems and all(verdict.passed for verdict in self.verdicts)

    @property
    def cause(self) -> str:
        """What leaks, in the words of ``--inject``; empty when nothing does."""
        return cause_of(self.verdicts)

    @property
    def headline(self) -> str:
        """One line: clean or not, and why."""
        ran = f"{self.steps:,} steps, {self.checks:,} results checked" + (", stopped early" if self.stopped else "")
        if self.passed:
            gates = sum(verdict.status is Status.FLAT for verdict in self.verdicts)
            return f"CLEAN: {ran}; {gates} gates, all flat"
        leaks = [verdict for verdict in self.verdicts if not verdict.passed]
        names = ", ".join(dict.fromkeys(f"{v.name} {v.status.value}" for v in leaks[:4]))
        looks = f"; looks like a leak of kind {self.cause}" if self.cause else ""
        reasons = [*(shorten(text, _MOST_SAID) for text in self.problems[:1]), *([names] if names else [])]
        return f"FAILED: {ran}; {'; '.join(reasons)}{looks}"


def cause_of(verdicts: Sequence[Verdict]) -> str:
    """Return the kind of leak that explains the verdicts: the failed counter furthest up in the table."""
    leaks = [verdict for verdict in verdicts if verdict.status is Status.LEAK]
    return min(leaks, key=lambda v: priority(v.name)).counter.cause if leaks else ""


def judge_all(log: SoakLog) -> list[Verdict]:
    """Return the verdict on each counter of each rank, those that failed first."""
    limits = log.limits
    return worst_first([judge(series, limit=limits.get(series.name)) for series in log.series()])


def conclude(log: SoakLog, *, ranks: int, required: Sequence[str]) -> Outcome:
    """Judge all that was said; a rank or a ``required`` sampler that is missing fails, never passes."""
    problems = [log.error] if log.error else []
    problems += log.mismatches
    for rank in range(ranks):
        said = log.ranks.get(rank)
        if said is None or said.started is None or not said.samples:
            problems.append(f"rank {rank} sent no sample")
            continue
        absent = said.started.absent
        problems += [f"rank {rank}: {name} is needed: {absent[name]}" for name in required if name in absent]
        if said.ended is not None:
            problems += [f"rank {rank}: {text}" for text in said.ended.sampler_failures]
    lasts = [said.samples[-1].values for said in log.ranks.values() if said.samples]
    checks = int(sum(values.get("program.checks", 0.0) for values in lasts))
    if not checks and not log.about.get("seed_system"):
        problems.append("no result was checked")
    return Outcome(
        verdicts=tuple(judge_all(log)),
        problems=tuple(problems),
        diagnosis=_diagnosis(log),
        steps=log.step,
        checks=checks,
        stopped=log.stopped,
    )


def _diagnosis(log: SoakLog) -> Diagnosis | None:
    """Of the rank on which most was used up."""
    lasts = [said.last for said in log.ranks.values()]
    names = {name for values in lasts for name in values}
    worst = {name: max(values.get(name, 0.0) for values in lasts) for name in names}
    return diagnose(log.error, worst, log.limits) if log.error else None
