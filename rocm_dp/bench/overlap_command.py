"""``rocm-dp bench overlap``: its options, and what it writes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_dp.bench import arguments
from rocm_dp.bench.on_ranks import on_ranks
from rocm_dp.bench.overlap_config import (
    OverlapConfig,
    default_pairs,
    parse_pairs,
    parse_queues,
    sweep_pairs,
)
from rocm_dp.files import write_atomically
from rocm_dp.platform import HW_QUEUES

if TYPE_CHECKING:
    from rich.console import Console

    from rocm_dp.bench.overlap_config import Pair

_LAYERS = {True: 20, False: 2}
_INTERMEDIATE = {True: 2048, False: 64}
_REPEATS = {True: 10, False: 5}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rocm-dp bench overlap``."""
    arguments.add_layout_arguments(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--counts",
        help="rows of each dp rank in both halves, case after case: 32+17/24+20,8/4; a short half is repeated",
    )
    which.add_argument("--sweep", metavar="MIN:MAX:FACTOR", help="cases by the tokens of a rank, split in two")
    parser.add_argument("--layers", type=int, help="layers of a forward; else 20, or 2 on the CPU")
    parser.add_argument("--intermediate", type=int, help="width inside a layer; else 2048, or 64 on the CPU")
    parser.add_argument(
        "--graphs", action=argparse.BooleanOptionalAction, default=True, help="on GPUs also measure in graphs"
    )
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare overlapped results with serial ones, bit for bit",
    )
    parser.add_argument("--iters", type=int, help="forwards that medians are of; else 10, or 5 on the CPU")
    parser.add_argument("--warmup", type=int, default=3, help="forwards before the first that counts")
    parser.add_argument(
        "--hw-queues",
        metavar="N,N",
        help=f"measure all with {HW_QUEUES} set to each of these for the ranks, each within --timeout: 2,8",
    )
    parser.add_argument(
        "--trace-out", type=Path, help="write the stages of one overlapped forward here, for ui.perfetto.dev"
    )
    arguments.add_common_arguments(parser)
    arguments.add_output_arguments(parser)


def build_config(args: argparse.Namespace) -> OverlapConfig:
    """Return the run that ``args`` ask for. Raises ConfigError."""
    arguments.check_folders(args, "json", "csv", "trace_out")
    ranks, dp, gpu = arguments.wanted_ranks(args)
    return OverlapConfig(
        verb="overlap",
        ranks=ranks,
        dp=dp,
        cp=args.cp,
        cases=tuple(half for pair in _pairs(args, dp, gpu=gpu) for half in pair),
        transports=arguments.wanted_transports(args.transports),
        hidden=arguments.HIDDEN[gpu] if args.hidden is None else args.hidden,
        dtype=args.dtype,
        iters=_REPEATS[gpu] if args.iters is None else args.iters,
        warmup=args.warmup,
        calls=int(args.graphs),
        check=args.check,
        seed=args.seed,
        timeout=args.timeout,
        layers=_LAYERS[gpu] if args.layers is None else args.layers,
        intermediate=_INTERMEDIATE[gpu] if args.intermediate is None else args.intermediate,
        trace=args.trace_out is not None,
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure and print; return 0, or 1 when an overlapped result differed from the serial one."""
    config, queues = build_config(args), parse_queues(args.hw_queues)

    from rocm_dp.bench import overlap_rank
    from rocm_dp.bench.overlap_report import OverlapReport, make_section
    from rocm_dp.bench.overlap_table import render
    from rocm_dp.bench.table import print_wide, write_csv

    sections = []
    for asked in queues:
        env = None if asked is None else {HW_QUEUES: str(asked)}
        found = on_ranks(overlap_rank.run_rank, config, console, env=env)
        sections.append(make_section(found, config, asked))
    report = OverlapReport(config, tuple(sections))
    print_wide(render(report))
    if args.json:
        write_atomically(args.json, json.dumps(report.as_dict(), indent=1) + "\n")
    if args.csv:
        write_csv(args.csv, report.lines)
    if args.trace_out:
        write_atomically(args.trace_out, json.dumps(report.trace()) + "\n")
    return 1 if report.wrong else 0


def _pairs(args: argparse.Namespace, dp: int, *, gpu: bool) -> tuple[Pair, ...]:
    if args.counts is not None:
        return parse_pairs(args.counts, dp)
    if args.sweep is not None:
        return sweep_pairs(args.sweep, dp)
    return default_pairs(dp, gpu=gpu)
