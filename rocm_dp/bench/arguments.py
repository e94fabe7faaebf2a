"""The options of ``rocm-dp bench gather``, ``combine`` and ``host``, and the run that they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rocm_dp.bench.cases import default_cases, parse_counts, parse_sweep, trace_cases
from rocm_dp.bench.config import DTYPES, BenchConfig
from rocm_dp.errors import ConfigError

if TYPE_CHECKING:
    import argparse

_CPU_RANKS = 2
HIDDEN = {True: 7168, False: 256}
_REPEATS = {True: 50, False: 10}


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how many ranks there are, and where they stand."""
    parser.add_argument(
        "--ranks", type=int, help="processes, one GPU each; else all GPUs here if more than one, or 2 on the CPU"
    )
    parser.add_argument("--dp", type=int, help="attention data-parallel size; else ranks / cp")
    parser.add_argument("--cp", type=int, default=1, help="attention context-parallel size")


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what every measurement on ranks is told."""
    parser.add_argument("--hidden", type=int, help="width of a row; else 7168, or 256 on the CPU")
    parser.add_argument("--dtype", default="bf16", help=" or ".join(DTYPES))
    parser.add_argument("--transports", help="only these of ours, by name: a,b")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the contenders and of the rows")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that the whole run may take")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where a measurement is also written to."""
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--csv", type=Path, help="also write the lines of the table here")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that gather, combine and host share."""
    add_layout_arguments(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--counts", help="rows of each dp rank, a case after the other: 32+17,128+64; a short case is repeated"
    )
    which.add_argument("--sweep", metavar="MIN:MAX:FACTOR", help="cases by their total rows, spread as --skew says")
    which.add_argument(
        "--trace", type=Path, help="take the counts from the steps of this trace (formats as in the demo)"
    )
    parser.add_argument(
        "--skew", type=float, help="of --sweep: rows of the largest rank over the mean, 1 to dp; else 1"
    )
    parser.add_argument("--steps", type=int, default=10, help="of --trace: how many different steps")
    parser.add_argument(
        "--speed", type=float, default=4.0, help="of --trace: how much faster than recorded requests arrive"
    )
    parser.add_argument("--unaligned", action="store_true", help="inputs start one element off a 16-byte boundary")
    parser.add_argument("--iters", type=int, help="repeats that medians are of; else 50, or 10 on the CPU")
    parser.add_argument("--warmup", type=int, default=10, help="calls before the first that counts")
    add_common_arguments(parser)
    add_output_arguments(parser)


def check_folders(args: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError unless each file that ``args`` name would lie in an existing folder."""
    for name in names:
        path = getattr(args, name)
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"--{name.replace('_', '-')} needs an existing folder, got {path}")


def wanted_ranks(args: argparse.Namespace) -> tuple[int, int, bool]:
    """Return how many ranks and dp ranks there are, and whether each has a GPU. Raises ConfigError."""
    import torch

    from rocm_dp.layout import RankLayout

    gpus = torch.cuda.device_count()
    ranks = args.ranks if args.ranks is not None else gpus if gpus > 1 else _CPU_RANKS
    # Asked first: a cp that can't be must not divide.
    dp = RankLayout(0, ranks, 1, args.cp).tp_size if args.dp is None else args.dp
    RankLayout(0, ranks, dp, args.cp)
    return ranks, dp, gpus >= ranks


def build_config(args: argparse.Namespace, verb: str, *, calls: int, check: bool) -> BenchConfig:
    """Return the run that ``args`` ask for. Raises ConfigError, and what reading a trace raises."""
    check_folders(args, "json", "csv")
    ranks, dp, gpu = wanted_ranks(args)
    return BenchConfig(
        verb=verb,
        ranks=ranks,
        dp=dp,
        cp=args.cp,
        cases=_cases(args, verb, dp, gpu=gpu),
        transports=wanted_transports(args.transports),
        hidden=HIDDEN[gpu] if args.hidden is None else args.hidden,
        dtype=args.dtype,
        iters=_REPEATS[gpu] if args.iters is None else args.iters,
        warmup=args.warmup,
        calls=calls,
        check=check,
        unaligned=args.unaligned,
        seed=args.seed,
        timeout=args.timeout,
    )


def _cases(args: argparse.Namespace, verb: str, dp: int, *, gpu: bool) -> tuple[tuple[int, ...], ...]:
    if args.skew is not None and args.sweep is None:
        raise ConfigError(f"--skew says how --sweep spreads its rows; got --skew {args.skew:g} without --sweep")
    if args.counts is not None:
        return parse_counts(args.counts, dp)
    if args.sweep is not None:
        return parse_sweep(args.sweep, dp, 1.0 if args.skew is None else args.skew)
    if args.trace is not None:
        return trace_cases(args.trace, dp, args.steps, speed=args.speed, gpu=gpu)
    return default_cases(verb, dp, gpu=gpu)


def wanted_transports(text: str | None) -> tuple[str, ...]:
    """Return the transports that ``--transports`` names; all when it is not given. Raises ConfigError."""
    from rocm_dp.routing import NAMES

    if text is None:
        return NAMES
    wanted = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise ConfigError(f"--transports must be among {', '.join(NAMES)}, got {', '.join(unknown)}")
    return wanted
