"""What all ranks found, for the file that an operator sends and for the screen."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rocm_dp.platform import environment
from rocm_dp.validate.rank import OWN_CHOICE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from rocm_dp.validate.rank import RankResult, ValidateConfig

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Report:
    """The whole run. ``checks`` and ``refused`` by transport; ``missing``: required, and carried nothing.

    ``about``: of each host and device that took part, once; ``error``: what ended the run early.
    """

    config: dict[str, object]
    about: tuple[dict[str, str], ...]
    checks: dict[str, int]
    refused: dict[str, str]
    failures: tuple[str, ...]
    missing: tuple[str, ...]
    environment: dict[str, str]
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether at least one check was made, all held, and nothing that was required is missing."""
        return sum(self.checks.values()) > 0 and not (self.failures or self.missing or self.error)

    def as_dict(self) -> dict[str, object]:
        """Return the report as plain values."""
        return {"passed": self.passed, **asdict(self)}


def make_report(
    results: Sequence[RankResult], config: ValidateConfig, *, required: Sequence[str] = (), error: str = ""
) -> Report:
    """Add up what all ranks found; no results when the run ended with ``error``."""
    labels = (OWN_CHOICE, *config.transports)
    checks = {label: sum(result.checks.get(label, 0) for result in results) for label in labels}
    return Report(
        config=asdict(config),
        about=tuple({str(result.about): result.about for result in results}.values()),
        checks=checks,
        refused=results[0].refused if results else {},
        failures=tuple(failure for result in results for failure in result.failures),
        missing=tuple(name for name in required if not checks.get(name)),
        environment=environment(),
        error=error,
    )


def render(report: Report) -> RenderableType:
    """Return what a person sees."""
    table = Table("transport", "checks", "carried nothing, because")
    for label, checks in report.checks.items():
        table.add_row(label, f"{checks:,}", report.refused.get(label, ""))
    places = [
        f"{about['device']}, torch {about['torch']}, rocm_dp {about['rocm_dp']}, on {about['host']}"
        for about in report.about
    ]
    return Group(*places, table, _verdict(report))


def _verdict(report: Report) -> Text:
    if report.passed:
        return Text(f"PASSED: {sum(report.checks.values()):,} checks against the oracle", style="bold green")
    lines = [*report.failures[:_SHOWN], *(f"{name} was required, and carried nothing" for name in report.missing)]
    lines += [report.error] if report.error else []
    shown = "\n  ".join(lines) or "no check was made"
    return Text(
        f"FAILED: {len(report.failures)} of {sum(report.checks.values()):,} checks\n  {shown}", style="bold red"
    )
