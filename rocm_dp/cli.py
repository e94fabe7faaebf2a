"""The command line: ``rocm-dp demo``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rocm_dp.errors import ConfigError, RocmDpError
from rocm_dp.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_dp.demo.run import DemoConfig, RankReport

_OK, _FAILED, _USAGE = 0, 1, 2
_CASE_TIMEOUT = 24 * 3600.0  # seconds: a long replay is no hang; a lost rank is noticed by its peers


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 when all checks held, 1 when not, 2 for wrong usage."""
    args = _parser().parse_args(argv)
    console = Console(stderr=True)
    if find_spec("torch") is None:
        console.print("rocm-dp needs torch: use the image's own on ROCm, or pip install 'rocm-dp\\[cpu]'")
        return _USAGE
    try:
        return _demo(args, console)
    except RocmDpError as error:
        console.print(f"{type(error).__name__}: {error}", markup=False, style="red")
        return _USAGE if isinstance(error, ValueError) else _FAILED
    except OSError as error:
        console.print(str(error), markup=False, style="red")
        return _USAGE
    except KeyboardInterrupt:
        console.print("stopped")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rocm-dp", description=__doc__)
    parser.add_argument("--version", action="version", version=f"rocm-dp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="replay a trace over ranks, every verb checked against the oracle",
        description="Replay a request trace over ranks with a small MoE model; check every verb of every step.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument("--trace", type=Path, help="Azure CSV, Mooncake JSONL or BurstGPT CSV; else a synthetic one")
    demo.add_argument("--speed", type=float, default=4.0, help="how much faster than recorded requests arrive")
    demo.add_argument("--skip-bad", action="store_true", help="count malformed lines of the trace and go on")
    demo.add_argument("--ranks", type=int, help="processes, one GPU each; else the GPUs here, or 4 on the CPU")
    demo.add_argument("--dp", type=int, help="attention data-parallel size; else ranks / cp")
    demo.add_argument("--cp", type=int, default=1, help="attention context-parallel size")
    demo.add_argument("--layers", type=int, default=2)
    demo.add_argument("--steps", type=int, default=100)
    demo.add_argument("--hidden", type=int, default=256)
    demo.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    demo.add_argument("--tokens", type=int, default=256, help="most tokens of a rank in a step (chunked prefill)")
    demo.add_argument("--max-running", type=int, default=32, help="most requests under way on a rank")
    demo.add_argument("--routing", choices=("round_robin", "least_loaded"), default="round_robin")
    demo.add_argument("--transport", help="force one transport in place of the library's choice")
    demo.add_argument("--seed", type=int, default=0, help="of the weights and the synthetic trace")
    demo.add_argument(
        "--overlap", action=argparse.BooleanOptionalAction, default=True, help="two-batch overlap in prefill"
    )
    demo.add_argument("--json", type=Path, help="also write the results here")
    return parser


def _demo(args: argparse.Namespace, console: Console) -> int:
    from rocm_dp.demo.report import render, summarise

    if args.json and not args.json.resolve().parent.is_dir():
        raise ConfigError(f"--json needs an existing folder, got {args.json}")
    config = _demo_config(args)
    where = f"dp {config.dp}, cp {config.cp}, tp {config.ranks // (config.dp * config.cp)}"
    console.print(
        f"{config.trace.name}: {len(config.trace.requests):,} requests over {config.ranks} ranks ({where})"
    )
    if config.trace.skipped:
        console.print(f"skipped {config.trace.skipped:,} malformed lines", style="yellow")
    summary = summarise(_run(config, console), config)
    Console().print(render(summary))
    if args.json:
        text = json.dumps({**asdict(summary), "passed": summary.passed}, indent=2)
        args.json.write_text(text + "\n")
    return _OK if summary.passed else _FAILED


def _demo_config(args: argparse.Namespace) -> DemoConfig:
    import torch

    from rocm_dp.demo.run import DemoConfig
    from rocm_dp.layout import RankLayout
    from rocm_dp.workload import CONVERSATION, Routing, SchedulerConfig, read_trace
    from rocm_dp.workload.model import ModelConfig

    ranks = args.ranks
    if ranks is None:
        ranks = torch.cuda.device_count() or 4
    dp = max(1, ranks // args.cp) if args.dp is None else args.dp
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


def _run(config: DemoConfig, console: Console) -> list[RankReport]:
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


if __name__ == "__main__":
    sys.exit(main())
