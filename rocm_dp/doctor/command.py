"""``rocm-dp doctor``: look at a machine, or at a recording of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rocm_dp.doctor.checks import Severity

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.console import RenderableType

    from rocm_dp.doctor.diagnosis import Row
    from rocm_dp.doctor.machine import Source

_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan", Severity.FINE: "green"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rocm-dp doctor``."""
    parser.add_argument("--only", metavar="CHECK", action="append", default=[], help="make this check; repeatable")
    parser.add_argument("--all", action="store_true", help="show what is fine too")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")
    parser.add_argument("--record", metavar="DIR", type=Path, help="also write what was read of this machine there")
    parser.add_argument("--from", metavar="DIR", type=Path, dest="source", help="judge what --record wrote")


def run(args: argparse.Namespace, console: Console) -> int:
    """Diagnose and print; return 0 when there is no problem, else 1. What can't be looked at raises (2)."""
    from rocm_dp.doctor.diagnosis import diagnose
    from rocm_dp.doctor.recorded import record

    machine = _source(args.source).describe()
    if args.record:
        console.print(f"recorded in {record(machine, args.record)}; it holds paths and settings", markup=False)
    rows = diagnose(machine, args.only)
    if args.json:
        Console(soft_wrap=True, highlight=False).out(json.dumps(as_dict(rows), indent=1))
    else:
        Console().print(_render(rows, everything=args.all))
    return 1 if any(row.severity.is_problem for row in rows) else 0


def _source(folder: Path | None) -> Source:
    from rocm_dp.doctor.live import LiveMachine
    from rocm_dp.doctor.recorded import RecordedMachine

    return LiveMachine() if folder is None else RecordedMachine(folder)


def as_dict(rows: Sequence[Row]) -> dict[str, object]:
    """Return the report as plain values: ``fine``, how many findings of each severity, and the findings."""
    return {
        "fine": not any(row.severity.is_problem for row in rows),
        "counts": {severity.value: sum(row.severity is severity for row in rows) for severity in Severity},
        "findings": [row.as_dict() for row in rows],
    }


def _render(rows: Sequence[Row], *, everything: bool) -> RenderableType:
    table = Table("", "check", "seen", "why it matters, and what to do", show_lines=True)
    order = list(Severity)
    for row in sorted(rows, key=lambda row: order.index(row.severity)):
        if row.severity is Severity.FINE and not everything:
            continue
        name = Text(row.severity.value, style=_STYLES[row.severity])
        what = Text(row.check.why)
        if row.finding.advice:
            what.append(f"\n-> {row.finding.advice}", style="bold")
        table.add_row(name, Text(row.check.name), Text(row.finding.seen), what)
    counts = {severity: sum(row.severity is severity for row in rows) for severity in Severity}
    line = Text(f"{len({row.check.name for row in rows})} checks: ")
    line.append(", ".join(f"{counts[one]} {one.value}" for one in order))
    return Group(table, line) if table.row_count else line
