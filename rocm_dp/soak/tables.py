"""What a soak tells a person on a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rocm_dp.soak.gates import Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from rocm_dp.soak.log import SoakLog
    from rocm_dp.soak.outcome import Outcome
    from rocm_dp.soak.selftest import Trial

_MOST_PROBLEMS = 10
_GIGA = 1e9
_STYLES = {Status.LEAK: "bold red", Status.MISSING: "red", Status.SHORT: "yellow", Status.FLAT: "green"}
COLUMNS = (
    "counter",
    "rank",
    "verdict",
    "baseline",
    "final",
    "per million steps",
    "hours left",
    "would catch / M",
    "why",
)


def number(value: float) -> str:
    """Write a number so that a person can read it."""
    if not math.isfinite(value):
        return "–"
    if value == 0 or (abs(value) >= 100 and abs(value) < 1e6):
        return f"{value:,.0f}"
    return f"{value:,.3g}" if abs(value) < 1e6 else f"{value:.3g}"


def cells(verdict: Verdict) -> tuple[str, ...]:
    """Return the row of a verdict, as COLUMNS has it."""
    unit = verdict.counter.unit
    return (
        f"{verdict.name} ({unit})" if unit else verdict.name,
        str(verdict.rank),
        verdict.status.value,
        number(verdict.baseline),
        number(verdict.final),
        number(verdict.per_million),
        number(verdict.hours_left),
        number(verdict.power * 1e6),
        verdict.why,
    )


def worst_of_each(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return one verdict for each counter: the rank that failed, or the one with the weakest gate."""
    worst: dict[str, Verdict] = {}
    for verdict in verdicts:  # those that failed come first
        held = worst.setdefault(verdict.name, verdict)
        if held.passed and verdict.power > held.power:
            worst[verdict.name] = verdict
    return list(worst.values())


def _is_dull(verdict: Verdict) -> bool:
    """Whether nobody would miss its line: only shown, flat at zero, or one of the many types of objects."""
    if verdict.status is Status.FLAT:
        by_type = verdict.name.startswith("objects.") and verdict.name not in ("objects.all", "objects.Tensor")
        return by_type or verdict.baseline == verdict.final == 0
    return verdict.status is Status.SHOWN


def render(outcome: Outcome) -> RenderableType:
    """Return the verdicts, one line for each counter that says something."""
    table = Table(*COLUMNS[:-1], title="Verdicts, worst rank of each counter")
    why, dull = [], 0
    for verdict in worst_of_each(outcome.verdicts):
        if _is_dull(verdict):
            dull += verdict.status is Status.FLAT
            continue
        table.add_row(*cells(verdict)[:-1], style=_STYLES.get(verdict.status, ""))
        if verdict.why:
            why.append(f"{verdict.name}, rank {verdict.rank}: {verdict.why}")
    lines = [f"and {dull} more counters, all flat"] if dull else []
    lines += [*why, *_reserved_and_live(outcome), *outcome.problems[:_MOST_PROBLEMS]]
    if outcome.diagnosis is not None:
        lines.append(outcome.diagnosis.text)
    style = "bold green" if outcome.passed else "bold red"
    return Group(table, Text("\n".join(lines)), Text(outcome.headline, style=style))


def _reserved_and_live(outcome: Outcome) -> list[str]:
    """Return a line for each GPU rank: what the allocator holds, and what of it is used."""
    finals = {(verdict.rank, verdict.name): verdict.final for verdict in outcome.verdicts}
    return [
        f"rank {rank}: {held / _GIGA:,.2f} GB reserved, {finals[rank, 'torch.allocated'] / _GIGA:,.2f} GB live"
        for (rank, name), held in sorted(finals.items())
        if name == "torch.reserved"
    ]


def live(log: SoakLog, total: str) -> RenderableType:
    """Return the dashboard: for each gated counter the first, the last and the limit, on the fullest rank."""
    table = Table("counter", "at first", "now", "limit", title=f"step {log.step:,} of {total}")
    limits = log.limits
    shown: dict[str, tuple[float, float]] = {}
    for said in log.ranks.values():
        if said.samples:
            first, last = said.samples[0].values, said.samples[-1].values
            for name, value in last.items():
                if value >= shown.get(name, (0.0, -math.inf))[1]:
                    shown[name] = first.get(name, math.nan), value
    for name in sorted(shown):
        first_value, value = shown[name]
        if _worth_a_line(name, first_value, value):
            table.add_row(name, number(first_value), number(value), number(limits.get(name, math.nan)))
    return table


def _worth_a_line(name: str, first: float, last: float) -> bool:
    """Objects and kinds of fds only when they changed: there are many, and most never do."""
    return first != last if name.startswith(("objects.", "fds.")) else True


def render_trials(trials: Sequence[Trial], left_out: dict[str, str]) -> RenderableType:
    """Return the confusion table of a self-test."""
    table = Table("run", "seed", "named as", "right", "gates that failed", title="Self-test")
    for trial in trials:
        leaks = sorted({v.name for v in trial.outcome.verdicts if not v.passed})
        table.add_row(
            trial.injected or "clean",
            str(trial.seed),
            trial.named or "clean",
            "yes" if trial.right else "NO",
            ", ".join(leaks),
            style="green" if trial.right else "bold red",
        )
    notes = [f"left out: {kind}: {why}" for kind, why in left_out.items()]
    clean = [trial for trial in trials if not trial.injected]
    false_alarms = sum(not trial.right for trial in clean)
    missed = sum(not trial.right for trial in trials if trial.injected)
    leaks_made = len(trials) - len(clean)
    summary = f"{false_alarms} false alarms in {len(clean)} clean runs, {missed} of {leaks_made} leaks missed"
    style = "bold green" if not false_alarms + missed else "bold red"
    return Group(table, Text("\n".join(notes)), Text(summary, style=style))
