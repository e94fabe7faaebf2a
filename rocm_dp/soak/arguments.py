"""The options of ``rocm-dp soak``, and the soak that they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rocm_dp.errors import ConfigError
from rocm_dp.soak.config import REQUIRED, SoakConfig
from rocm_dp.soak.program import tour_steps

if TYPE_CHECKING:
    import argparse

INJECTED = (
    *("event", "run-ahead", "buffer", "record-stream", "fd", "thread"),
    *("rss", "stream", "shm", "object", "latency"),
)
_CPU_RANKS = 2
_STEPS = 2000
_SELF_TEST_STEPS = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rocm-dp soak``."""
    parser.add_argument(
        "--steps", type=int, help=f"else {_STEPS:,} ({_SELF_TEST_STEPS} with --self-test), or what --minutes allows"
    )
    parser.add_argument("--minutes", type=float, help="minutes to run")
    parser.add_argument("--ranks", type=int, help="processes, one GPU each; else the GPUs here, or 2 on the CPU")
    parser.add_argument("--dp", type=int, help="attention data-parallel size; else ranks")
    parser.add_argument("--seed", type=int, default=0, help="of the program; the same seed, the same steps")
    parser.add_argument("--hidden", type=int, default=64, help="width of a row")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=64, help="most rows of a dp rank in a step")
    parser.add_argument(
        "--plans", type=int, default=16, help="different plans in the program; 0: a new one each step"
    )
    parser.add_argument("--check-every", type=int, default=10, help="steps between checks against the oracle")
    parser.add_argument("--sample-every", type=int, help="steps between samples; else an 80th of --steps, or 5")
    parser.add_argument("--trace", type=Path, help="take the counts from this trace (formats as in the demo)")
    parser.add_argument("--speed", type=float, default=4.0, help="how much faster than recorded requests arrive")
    parser.add_argument("--inject", choices=INJECTED, help="leak this, on purpose, on the last rank")
    parser.add_argument("--self-test", action="store_true", help="clean runs, then one with each leak injected")
    parser.add_argument("--clean-runs", type=int, default=3, help="of --self-test, with different seeds")
    parser.add_argument(
        "--like-the-seed-system", action="store_true", help="fresh buffers, record_stream, fresh events (GPUs)"
    )
    parser.add_argument("--count-signals", action="store_true", help="preload the HSA signal counter (AMD)")
    parser.add_argument("--from", type=Path, dest="replay", help="judge the --json of an earlier soak; run nothing")
    parser.add_argument("--json", type=Path, help="write samples here, line by line")
    parser.add_argument("--html", type=Path, help="write a report here, one self-contained file")
    parser.add_argument("--metrics-port", type=int, help="serve Prometheus metrics while it runs; 0: any free port")
    parser.add_argument("--metrics-host", default="127.0.0.1", help="where to serve them")


def build_config(args: argparse.Namespace) -> SoakConfig:
    """Return the soak that ``args`` ask for. Raises ConfigError, and what reading a trace raises."""
    import torch

    for name in ("json", "html"):
        path = getattr(args, name)
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"--{name} needs an existing folder, got {path}")
    ranks = args.ranks if args.ranks is not None else torch.cuda.device_count() or _CPU_RANKS
    trace = None
    if args.trace is not None:
        from rocm_dp.workload.traces import read_trace

        trace = read_trace(args.trace).at_speed(args.speed)
    config = SoakConfig(
        ranks=ranks,
        dp=ranks if args.dp is None else args.dp,
        steps=_steps(args),
        minutes=args.minutes,
        seed=args.seed,
        hidden=args.hidden,
        dtype=args.dtype,
        tokens=args.tokens,
        plans=args.plans,
        check_every=args.check_every,
        sample_every=args.sample_every,
        inject=args.inject,
        trace=trace,
        required=_required(args, gpu=torch.cuda.device_count() >= ranks),
        seed_system=args.like_the_seed_system,
    )
    least = 2 * tour_steps(config)
    if config.steps is not None and config.steps < least:
        raise ConfigError(f"--steps must be at least {least}: half of them would be warm-up, got {config.steps}")
    return config


def _steps(args: argparse.Namespace) -> int | None:
    if args.steps is not None or args.minutes is not None:
        return args.steps  # type: ignore[no-any-return]
    return _SELF_TEST_STEPS if args.self_test else _STEPS


def _required(args: argparse.Namespace, *, gpu: bool) -> tuple[str, ...]:
    asked_for = ("hsa",) if args.count_signals else ()
    return (*REQUIRED, *(("torch",) if gpu else ()), *asked_for)
