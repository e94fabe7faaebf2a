"""The tables that a person sees, and the lines for a spreadsheet."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict, fields
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from rocm_dp.bench.cases import short
from rocm_dp.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from rocm_dp.bench.about import About
    from rocm_dp.bench.config import BenchConfig
    from rocm_dp.bench.host import HostCost
    from rocm_dp.bench.overlap_report import Line
    from rocm_dp.bench.report import Report, Result

_NONE = "n/a"
_COLUMNS = (
    *(
        "counts",
        "rows",
        "bytes",
        "type",
        "skew",
        "floor us",
        "contender",
        "eager us",
        "p99",
        "p10..p90",
        "graph us",
    ),
    *("algbw", "busbw", "real busbw", "x best", "x graph", "over floor", "wrong"),
)
_LEFT = {"counts", "type", "contender", "note", "call"}
_CAPTION = (
    "us: medians of the slowest rank. algbw, busbw = algbw * (W - 1) / W, in GB/s, with the padding that is moved, "
    "and real busbw, of the real rows: of graph us, else of eager us.\nx best, x graph: time over that of the best "
    "library path, eager and in a graph. floor us: the bytes that the busiest rank must "
    "receive, by peer copies; over floor: us above that. wrong: elements."
)


def print_wide(renderable: RenderableType) -> None:
    """Print to stdout, never narrower than the tables are."""
    console = Console()
    wide = Measurement.get(console, console.options.update(max_width=1000), renderable).maximum
    Console(width=max(console.width, wide)).print(renderable)


def render(report: Report) -> RenderableType:
    """Return the whole report."""
    config = report.config
    return Group(
        *header(report.about, config),
        Text(f"{config.verb}: {config.iters} repeats{_aside(report)}"),
        _results(report),
        Text(_CAPTION),
        *_notes(report),
        _summary(report),
    )


def _aside(report: Report) -> str:
    if report.about.backend != "nccl":
        return "; no GPU, so no graphs and no floor"
    received = _NONE if report.receive_gb_s is None else f"{report.receive_gb_s:.1f} GB/s"
    return f"; graphs of {report.config.calls} calls; copies from all peers reach a GPU at {received}"


def render_host(about: About, config: BenchConfig, costs: Sequence[HostCost]) -> RenderableType:
    """Return the host costs."""
    table = new_table("counts", "call", "us", "least", "most", "note")
    for counts, group in groupby(costs, key=lambda cost: cost.counts):
        for index, cost in enumerate(group):
            times = (_us(cost.p50), _us(cost.least), _us(cost.most))
            table.add_row(_short(counts) if not index else "", cost.what, *times, cost.reason or "")
        table.add_section()
    waits = "" if about.backend == "nccl" else "; on the CPU a call is done when it returns, its waits included"
    repeats = f"host us of one call: median of {config.iters} repeats of {config.calls} calls, slowest rank{waits}"
    return Group(*header(about, config), Text(repeats), table)


def write_csv(path: Path, results: Sequence[Result] | Sequence[HostCost] | Sequence[Line]) -> None:
    """Write one line for each result, its fields as columns."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [field.name for field in fields(results[0])])
    writer.writeheader()
    writer.writerows(asdict(result) for result in results)
    write_atomically(path, text.getvalue())


def header(about: About, config: BenchConfig) -> list[RenderableType]:
    """Return the lines that say where the figures come from."""
    layout = config.layout(0)
    versions = ", ".join(f"{name} {version}" for name, version in about.versions.items())
    where = f"dp {layout.dp_size}, cp {layout.cp_size}, tp {layout.tp_size}, {about.backend}"
    unaligned = ", inputs unaligned" if config.unaligned else ""
    lines = [
        versions,
        f"{config.ranks} ranks ({where}); hidden {config.hidden}, {config.dtype}{unaligned}; seed {config.seed}",
        f"{config.ranks} x {about.device}; {about.topology}",
        *(f"  {name}={value}" for name, value in about.environment.items()),
    ]
    return [Text(line) for line in lines]


def new_table(*columns: str) -> Table:
    """Return an empty table with these columns."""
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in _LEFT else "right", no_wrap=True)
    return table


def _results(report: Report) -> Table:
    table = new_table(*_COLUMNS)
    for _, group in groupby(report.results, key=lambda result: result.counts):
        for index, result in enumerate(group):
            case = _case_cells(result)
            style = "bold red" if result.wrong else "bold" if result.ours else ""
            table.add_row(*(("",) * len(case) if index else case), *_cells(result), style=style)
        table.add_section()
    return table


def _case_cells(result: Result) -> tuple[str, ...]:
    size = (str(result.rows), _bytes(result.bytes), result.type, f"{result.skew:.2f}", _us(result.floor_us))
    return _short(result.counts), *size


def _cells(result: Result) -> list[str]:
    spread = _NONE if result.eager_p10 is None else f"{_us(result.eager_p10)}..{_us(result.eager_p90)}"
    over = _NONE if result.over_floor_us is None else f"{result.over_floor_us:+.1f}"
    return [
        result.contender,
        _us(result.eager_p50),
        _us(result.eager_p99),
        spread,
        _us(result.graph_p50),
        *(number(value, 2) for value in (result.algbw, result.busbw, result.real_busbw)),
        *(number(value, 2) if result.ours else "" for value in (result.ratio_eager, result.ratio_graph)),
        over,
        "-" if result.wrong is None else str(result.wrong),
    ]


def _notes(report: Report) -> list[Text]:
    """Return why there are no times, each reason once for all cases that it stands for."""
    cases: dict[str, list[str]] = {}
    for result in report.results:
        where = _short(result.counts)
        if result.reason is not None:
            cases.setdefault(f"{result.contender}: {_NONE}: {result.reason}", []).append(where)
        elif result.graph_reason is not None and report.about.backend == "nccl":
            cases.setdefault(f"{result.contender}: no graph: {result.graph_reason}", []).append(where)
    return [Text(f"{note} ({', '.join(where)})") for note, where in cases.items()]


def _summary(report: Report) -> RenderableType:
    table = new_table("contender", "cases", "x best", "x graph")
    for one in report.summary:
        ratios = (number(one.ratio_eager, 3), number(one.ratio_graph, 3))
        table.add_row(one.transport, f"{one.cases} of {len(report.config.cases)}", *ratios)
    if not report.checked:
        verdict = Text("nothing was checked")
    elif report.wrong:
        verdict = Text(f"FAILED: {report.wrong} wrong elements", style="bold red")
    else:
        verdict = Text("every result equals the reference", style="bold green")
    return Group(Text("\nGeometric mean over the cases"), table, verdict)


def _short(counts: str) -> str:
    return short(tuple(map(int, counts.split("+"))))


def _us(us: float | None) -> str:
    return number(us, 1)


def number(value: Any, digits: int) -> str:
    """Return the value with so many digits; n/a for None."""
    return _NONE if value is None else f"{value:.{digits}f}"


def _bytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:.2f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.2f} KiB"
