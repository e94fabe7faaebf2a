"""``rocm-dp validate``: on ranks that it starts itself, or as one rank of many that torchrun started."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rocm_dp.errors import ConfigError, RocmDpError
from rocm_dp.files import write_atomically

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rocm_dp.validate.rank import RankResult, ValidateConfig

_CPU_RANKS, _DEFAULT_TIMEOUT = 4, 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rocm-dp validate``."""
    parser.add_argument("--ranks", type=int, help="processes, one GPU each; else the GPUs here, or 4 on the CPU")
    parser.add_argument("--dp", type=int, help="attention data-parallel size; else ranks / cp")
    parser.add_argument("--cp", type=int, default=1, help="attention context-parallel size")
    parser.add_argument("--hidden", type=int, default=72, help="width of the rows")
    parser.add_argument("--transport", action="append", default=[], help="check only this one; repeatable")
    parser.add_argument("--require", action="append", default=[], help="fail when this transport is refused here")
    parser.add_argument("--json", type=Path, help="also write the report to this file, to be sent to others")
    parser.add_argument("--timeout", type=float, default=_DEFAULT_TIMEOUT, help="seconds for the whole run")


def run(args: argparse.Namespace, console: Console) -> int:
    """Validate and print; return 0 when every check held, else 1. Under torchrun rank 0 alone reports."""
    import torch.distributed as dist

    from rocm_dp.validate.report import make_report, render

    if args.json and not args.json.resolve().parent.is_dir():
        raise ConfigError(f"--json needs an existing folder, got {args.json}")
    found = _as_one_rank(args) if dist.is_torchelastic_launched() else _on_own_ranks(args, console)
    report = make_report(found.results, found.config, required=args.require, error=found.error)
    if found.speaks:
        Console().print(render(report))
        if args.json:
            write_atomically(args.json, json.dumps(report.as_dict(), indent=1) + "\n")
    return 0 if report.passed else 1


@dataclass(frozen=True, slots=True)
class _Found:
    config: ValidateConfig
    results: Sequence[RankResult]
    error: str = ""
    speaks: bool = True


def _config(args: argparse.Namespace, ranks: int) -> ValidateConfig:
    from rocm_dp.layout import RankLayout
    from rocm_dp.routing import NAMES
    from rocm_dp.validate.rank import ValidateConfig

    # Asked first: a cp that can't be must not divide.
    dp = RankLayout(0, ranks, 1, args.cp).tp_size if args.dp is None else args.dp
    config = ValidateConfig(ranks, dp, args.cp, args.hidden, tuple(args.transport) or NAMES)
    if missing := set(args.require) - set(config.transports):
        raise ConfigError(f"--require must be among {config.transports}, got {', '.join(sorted(missing))}")
    return config


def _on_own_ranks(args: argparse.Namespace, console: Console) -> _Found:
    import torch

    from rocm_dp.testing import RankPool
    from rocm_dp.validate.rank import run_rank

    config = _config(args, (torch.cuda.device_count() or _CPU_RANKS) if args.ranks is None else args.ranks)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting ranks", total=None)

        def show(_: int, done: tuple[int, int]) -> None:
            progress.update(task, description="transports and dtypes", completed=done[0], total=done[1])

        try:
            with RankPool(config.ranks) as pool:
                return _Found(config, pool.run(run_rank, config, timeout=args.timeout, on_note=show))
        except ConfigError:
            raise
        except (RocmDpError, TimeoutError, RuntimeError) as error:
            # What a rank met is a finding, to be reported like any other.
            return _Found(config, (), f"{type(error).__name__}: {error}")


def _as_one_rank(args: argparse.Namespace) -> _Found:
    import torch.distributed as dist

    from rocm_dp.validate.launched import gathered, joined
    from rocm_dp.validate.rank import validate

    with joined(args.timeout) as device:
        rank = dist.get_rank()
        config = _config(args, dist.get_world_size())
        results = gathered(validate(rank, config, device, lambda _: None))
    return _Found(config, results, speaks=rank == 0)
