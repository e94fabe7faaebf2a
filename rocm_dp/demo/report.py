"""What the demo found, as plain values for JSON and as tables for a person."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rocm_dp.plan import PaddingMode, Phase, TokenPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from rocm_dp.demo.run import DemoConfig, RankReport

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_FLAT = (
    "slots",
    "buffers_made",
    "buffer_bytes",
    "growths",
    "events_made",
    "events_held",
    "streams_made",
    "pendings",
)
_PARTS = ("attention", "gather", "experts", "combine")
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Summary:
    """The whole run. ``padding``: rows and wasted share of each layout; ``grown``: what was not flat, by rank."""

    ranks: int
    dp: int
    device: str
    steps: dict[str, int]
    tokens: dict[str, int]
    overlapped: int
    skew_mean: float
    skew_max: float
    padding: dict[str, dict[str, float]]
    seconds: dict[str, float]
    checks: int
    failures: list[str]
    worst_sum_error: float
    resources: dict[str, int]
    grown: list[str]

    @property
    def passed(self) -> bool:
        """Whether at least one check was made, all held, and no resource grew."""
        return self.checks > 0 and not self.failures and not self.grown


def summarise(reports: Sequence[RankReport], config: DemoConfig) -> Summary:
    """Add up the reports of all ranks."""
    first = reports[0]
    plans = [TokenPlan(s.counts, s.padding, s.phase, s.align) for s in first.steps]
    skews = [plan.skew for plan in plans if plan.total]
    return Summary(
        ranks=config.ranks,
        dp=config.dp,
        device=first.device,
        steps={phase.name: sum(s.phase is phase for s in first.steps) for phase in Phase},
        tokens={phase.name: sum(sum(s.counts) for s in first.steps if s.phase is phase) for phase in Phase},
        overlapped=sum(s.overlap for s in first.steps),
        skew_mean=sum(skews) / max(1, len(skews)),
        skew_max=max(skews, default=1.0),
        padding=_padding(plans, config),
        seconds={part: max(r.seconds.get(part, 0.0) for r in reports) for part in _PARTS},
        checks=sum(report.checks for report in reports),
        failures=[*_disagreements(reports), *(failure for report in reports for failure in report.failures)],
        worst_sum_error=max(report.worst_sum_error for report in reports),
        resources={name: getattr(first.end, name) for name in (*_FLAT, "records_in_flight")},
        grown=_grown(reports),
    )


def _padding(plans: Sequence[TokenPlan], config: DemoConfig) -> dict[str, dict[str, float]]:
    layouts = {
        "MAX_LEN": [replace(plan, padding=PaddingMode.MAX_LEN) for plan in plans],
        "SUM_LEN": [replace(plan, padding=PaddingMode.SUM_LEN) for plan in plans],
        "exact gatherv": [replace(plan, padding=PaddingMode.SUM_LEN, align=1) for plan in plans],
        "as agreed": list(plans),
    }
    # Every layer gathers each row once and combines it once.
    row_bytes = config.hidden * _ITEMSIZE[config.dtype] * 2 * config.model.layers
    real = sum(plan.total for plan in plans)
    table: dict[str, dict[str, float]] = {}
    for name, laid_out in layouts.items():
        rows = sum(plan.rows for plan in laid_out)
        table[name] = {"rows": rows, "bytes": rows * row_bytes, "wasted": 1 - real / rows if rows else 0.0}
    return table


def _disagreements(reports: Sequence[RankReport]) -> list[str]:
    return [f"rank {r.rank} took other steps than rank 0" for r in reports if r.steps != reports[0].steps]


def _grown(reports: Sequence[RankReport]) -> list[str]:
    return [
        f"rank {report.rank}: {name} {getattr(report.warm, name)} -> {getattr(report.end, name)}"
        for report in reports
        for name in _FLAT
        if getattr(report.warm, name) != getattr(report.end, name)
    ]


def render(summary: Summary) -> RenderableType:
    """Return the tables that a person sees."""
    return Group(
        f"\n{summary.ranks} ranks ({summary.device}), dp {summary.dp}: skew (max/mean) {summary.skew_mean:.2f} on "
        f"average, {summary.skew_max:.2f} at most; {summary.overlapped} steps overlapped",
        _steps_table(summary),
        "\nRows of the global buffer, and MiB to gather and combine them in all layers",
        _padding_table(summary),
        "\nSeconds of the slowest rank, checking left out",
        _time_table(summary),
        _resource_line(summary),
        _verdict(summary),
    )


def _table(*columns: str) -> Table:
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def _steps_table(summary: Summary) -> Table:
    table = _table("phase", "steps", "tokens")
    for phase, steps in summary.steps.items():
        if steps:
            table.add_row(phase.lower(), f"{steps:,}", f"{summary.tokens[phase]:,}")
    return table


def _padding_table(summary: Summary) -> Table:
    table = _table("layout", "rows", "MiB", "wasted on padding")
    for name, row in summary.padding.items():
        table.add_row(name, f"{row['rows']:,.0f}", f"{row['bytes'] / _MIB:,.1f}", f"{row['wasted']:.1%}")
    return table


def _time_table(summary: Summary) -> Table:
    table = _table("part of the layers", "seconds")
    for part, seconds in summary.seconds.items():
        table.add_row(part, f"{seconds:.3f}")
    return table


def _resource_line(summary: Summary) -> Text:
    made = summary.resources
    flat = "all flat after warm-up" if not summary.grown else "NOT FLAT: " + "; ".join(summary.grown)
    return Text(
        f"\nResources of a rank: {made['events_made']} events, {made['streams_made']} streams, "
        f"{made['slots']} slots, {made['buffers_made']} buffers ({made['buffer_bytes'] / _MIB:.1f} MiB): {flat}",
        style="bold red" if summary.grown else "",
    )


def _verdict(summary: Summary) -> Text:
    if summary.passed:
        return Text(
            f"PASSED: {summary.checks:,} checks against the oracle; gathers equal bit for bit, the largest error "
            f"of a sum was {summary.worst_sum_error:.2f} of what rounding may cause",
            style="bold green",
        )
    shown = "\n  ".join(summary.failures[:10]) or "; ".join(summary.grown) or "no check was made"
    return Text(f"FAILED: {len(summary.failures)} of {summary.checks:,} checks\n  {shown}", style="bold red")
