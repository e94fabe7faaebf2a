"""``rocm-dp demo``: its options, its progress bar, its exit code."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rocm_dp.errors import ConfigError
from rocm_dp.files import write_atomically

if TYPE_CHECKING:
    from rocm_dp.demo.run import DemoConfig, RankReport

_CASE_TIMEOUT = 24 * 3600.0  # seconds: a long replay is no hang; a lost rank is noticed by its peers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rocm-dp demo``."""
    parser.add_argument(
        "--trace", type=Path, help="Azure CSV, Mooncake JSONL or BurstGPT CSV; else a synthetic one"
    )
    parser.add_argument("--speed", type=float, default=4.0, help="how much faster than recorded requests arrive")
    parser.add_argument("--skip-bad", action="store_true", help="count malformed lines of the trace and go on")
    parser.add_argument("--ranks", type=int, help="processes, one GPU each; else the GPUs here, or 4 on the CPU")
    parser.add_argument("--dp", type=int, help="attention data-parallel size; else ranks / cp")
    parser.add_argument("--cp", type=int, default=1, help="attention context-parallel size")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of a rank in a step (chunked prefill)")
    parser.add_argument("--max-running", type=int, default=32, help="most requests under way on a rank")
    parser.add_argument("--routing", choices=("round_robin", "least_loaded"), default="round_robin")
    parser.add_argument("--transport", help="force one transport in place of the library's choice")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the synthetic trace")
    parser.add_argument(
        "--overlap", action=argparse.BooleanOptionalAction, default=True, help="two-batch overlap in prefill"
    )
    parser.add_argument("--json", type=Path, help="also write the results here")


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the demo; return 0 only if all checks held and nothing grew, else 1."""
    from rocm_dp.demo.report import render, summarise

    if args.json and not args.json.resolve().parent.is_dir():
        raise ConfigError(f"--json needs an existing folder, got {args.json}")
    config = _config(args)
    where = f"dp {config.dp}, cp {config.cp}, tp {config.ranks // (config.dp * config.cp)}"
    console.print(
        f"{config.trace.name}: {len(config.trace.requests):,} requests over {config.ranks} ranks ({where})"
    )
    if config.trace.skipped:
        console.print(f"skipped {config.trace.skipped:,} malformed lines", style="yellow")
    summary = summarise(_replay(config, console), config)
    Console().print(render(summary))
    if args.json:
        text = json.dumps({**asdict(summary), "passed": summary.passed}, indent=2)
        write_atomically(args.json, text + "\n")
    return 0 if summary.passed else 1


def _config(args: argparse.Namespace) -> DemoConfig:
    import torch

    from rocm_dp.demo.run import DemoConfig
    from rocm_dp.layout import RankLayout
    from rocm_dp.workload import CONVERSATION, Routing, SchedulerConfig, read_trace
    from rocm_dp.workload.model import ModelConfig

    ranks = args.ranks
    if ranks is None:
        ranks = torch.cuda.device_count() or 4
    # Asked first: a cp that can't be must not divide.
    dp = RankLayout(0, ranks, 1, args.cp).tp_size if args.dp is None else args.dp
    RankLayout(0, ranks, dp, args.cp)
    if args.trace:
        trace = read_trace(args.trace, skip_bad=args.skip_bad)
    else:
        # A rank takes at most one request a step, since none fits a step whole.
        trace = CONVERSATION.generate(ranks * (50 + args.steps), seed=args.seed)
    return DemoConfig(
        trace=trace.at_speed(args.speed),
        ranks=ranks,
        dp=dp,
        cp=args.cp,
        scheduler=SchedulerConfig(
            dp_size=dp,
            token_budget=args.tokens,
            max_running=args.max_running,
            routing=Routing[args.routing.upper()],
        ),
        model=ModelConfig(layers=args.layers, seed=args.seed),
        steps=args.steps,
        hidden=args.hidden,
        dtype=args.dtype,
        overlap=args.overlap,
        transport=args.transport,
    )


def _replay(config: DemoConfig, console: Console) -> list[RankReport]:
    from rocm_dp.demo.run import run_rank
    from rocm_dp.testing import RankPool

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting ranks", total=config.steps)
        with RankPool(config.ranks) as pool:
            progress.update(task, description="steps, each checked")
            return pool.run(
                run_rank,
                config,
                timeout=_CASE_TIMEOUT,
                on_note=lambda _, done: progress.update(task, completed=done),
            )
