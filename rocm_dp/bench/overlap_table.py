"""The tables of ``rocm-dp bench overlap``."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from rocm_dp.bench.overlap_report import by_queues
from rocm_dp.bench.table import header, new_table, number

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from rocm_dp.bench.overlap_report import Line, OverlapReport, Section

_COLUMNS = (
    *(
        "counts",
        "mode",
        "contender",
        "compute",
        "comm",
        "serial",
        "overlap",
        "whole",
        "hidden",
        "of ideal",
        "x bound",
    ),
    *("host", "slow-down", "x best", "x grouped", "wrong"),
)
_CAPTION = (
    "us of a layer, both halves, medians of the slowest rank. compute, comm: each alone; serial: one half after\n"
    "the other; overlap: in turns; whole: the batch not split. hidden: 1 - (overlap - compute) / comm. of ideal:\n"
    "(serial - overlap) / (serial - bound); bound: max(compute, comm). x bound: overlap / bound. host: launching\n"
    "the overlapped layer. slow-down: time inside the compute stages under overlap over the same alone. x best:\n"
    "min(whole, overlap), of auto what it chose, over the least of the mode. x grouped: overlap over that of\n"
    "torch's grouped collectives. wrong: elements that differ between serial and overlap."
)


def render(report: OverlapReport) -> RenderableType:
    """Return the whole report."""
    parts: list[RenderableType] = []
    for section in report.sections:
        parts += _section(section, report)
    parts.append(Text(_CAPTION))
    if len(report.sections) > 1:
        parts += [Text("\nus of an overlapped layer by hardware queues"), _queues(report)]
    return Group(*parts, _verdict(report))


def _section(section: Section, report: OverlapReport) -> list[RenderableType]:
    config = report.config
    told = "" if section.asked is None else f"; GPU_MAX_HW_QUEUES={section.asked}"
    what = f"overlap: {config.layers} layers, intermediate {config.intermediate}; {config.iters} repeats{told}"
    graphs = [] if section.about.backend == "nccl" else [Text("no GPU, so no graphs, and nothing runs at once")]
    warning = [] if section.warning is None else [Text(section.warning, style="bold yellow")]
    return [*header(section.about, config), Text(what), *graphs, *warning, _lines(section), *_reasons(section)]


def _lines(section: Section) -> Table:
    shown = new_table(*_COLUMNS)
    for _, group in groupby(section.lines, key=lambda line: (line.counts, line.mode)):
        for index, line in enumerate(group):
            where = ("", "") if index else (line.counts, line.mode)
            style = "bold red" if line.wrong else "bold" if line.ours else ""
            chose = "" if line.pays is None else ": overlap" if line.pays else ": whole"
            shown.add_row(*where, line.contender + chose, *_cells(line), style=style)
        shown.add_section()
    return shown


def _cells(line: Line) -> list[str]:
    times = (line.compute, line.comm, line.serial, line.overlap, line.whole)
    return [
        *(number(us, 1) for us in times),
        *(number(value, 2) for value in (line.hidden, line.of_ideal, line.x_bound)),
        number(line.host, 1),
        number(line.slowdown, 2),
        number(line.x_best, 2),
        number(line.x_grouped, 2) if line.ours else "",
        "-" if line.wrong is None else str(line.wrong),
    ]


def _reasons(section: Section) -> list[Text]:
    """Return why there are no times, each reason once for all cases that it stands for."""
    cases: dict[str, list[str]] = {}
    for line in section.lines:
        if line.reason is not None:
            where = cases.setdefault(f"{line.contender}: n/a: {line.reason}", [])
            where.append(f"{line.counts}, {line.mode}")
    return [Text(f"{note} ({'; '.join(where)})") for note, where in cases.items()]


def _queues(report: OverlapReport) -> Table:
    asked = [section.asked for section in report.sections]
    shown = new_table("counts", "mode", "contender", *(str(queues) for queues in asked))
    for where, us in by_queues(report.lines).items():
        shown.add_row(*where, *(number(us.get(queues), 1) for queues in asked))
    return shown


def _verdict(report: OverlapReport) -> Text:
    if not report.checked:
        return Text("nothing was checked")
    if report.wrong:
        return Text(f"FAILED: {report.wrong} wrong elements", style="bold red")
    return Text("every overlapped result equals the serial one bit for bit", style="bold green")
