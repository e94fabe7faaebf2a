"""``rocm-dp bench``: what can be measured, and the progress while it is."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from rocm_dp.bench import overlap_command, rows_command
from rocm_dp.bench.arguments import add_run_arguments, build_config
from rocm_dp.bench.on_ranks import on_ranks
from rocm_dp.files import write_atomically

if TYPE_CHECKING:
    from rich.console import Console

_VERBS = {
    "gather": "our transports and the library's ways to gather the rows of all ranks",
    "combine": "our transports and the library's ways to sum rows back to their owners",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what can be measured, and the options of each."""
    measured = parser.add_subparsers(dest="what", required=True)

    def add(name: str, what: str) -> argparse.ArgumentParser:
        formatter = argparse.ArgumentDefaultsHelpFormatter
        return measured.add_parser(name, help=what, description=what, formatter_class=formatter)

    for verb, what in _VERBS.items():
        chosen = add(verb, what)
        add_run_arguments(chosen)
        chosen.add_argument(
            "--graph-calls", type=int, default=20, help="calls in the graph that is replayed; 0: no graphs"
        )
        chosen.add_argument(
            "--check", action=argparse.BooleanOptionalAction, default=True, help="compare with the reference"
        )
        chosen.set_defaults(measure=partial(_verb, verb))
    host = add("host", "what one eager call costs the host, the device not waited for")
    add_run_arguments(host)
    host.add_argument("--calls", type=int, default=300, help="calls in a row that are timed together")
    host.set_defaults(measure=_host)
    overlap = add("overlap", "what two-batch overlap hides of gather and combine, by transport")
    overlap_command.add_arguments(overlap)
    overlap.set_defaults(measure=overlap_command.run)
    rows = add("rows", "the row kernels against torch's own copies, on the GPU at hand")
    rows_command.add_arguments(rows)
    rows.set_defaults(measure=rows_command.run)


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure and print; return 0, or 1 when a checked result was wrong."""
    code: int = args.measure(args, console)
    return code


def _verb(verb: str, args: argparse.Namespace, console: Console) -> int:
    from rocm_dp.bench import rank
    from rocm_dp.bench.report import make_report
    from rocm_dp.bench.table import print_wide, render, write_csv

    config = build_config(args, verb, calls=args.graph_calls, check=args.check)
    report = make_report(on_ranks(rank.run_rank, config, console), config)
    print_wide(render(report))
    if args.json:
        write_atomically(args.json, json.dumps(report.as_dict(), indent=1) + "\n")
    if args.csv:
        write_csv(args.csv, report.results)
    return 1 if report.wrong else 0


def _host(args: argparse.Namespace, console: Console) -> int:
    from rocm_dp.bench.host import join_costs, run_host
    from rocm_dp.bench.table import print_wide, render_host, write_csv

    config = build_config(args, "host", calls=args.calls, check=False)
    found = on_ranks(run_host, config, console)
    about, costs = found[0].about, join_costs(found)
    print_wide(render_host(about, config, costs))
    if args.json:
        plain = {"about": asdict(about), "config": asdict(config), "results": [asdict(cost) for cost in costs]}
        write_atomically(args.json, json.dumps(plain, indent=1) + "\n")
    if args.csv:
        write_csv(args.csv, costs)
    return 0
