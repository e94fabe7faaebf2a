"""``rocm-dp soak``: its dashboard, its reports, its exit code."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rocm_dp.files import open_private, write_atomically
from rocm_dp.soak.arguments import add_arguments, build_config
from rocm_dp.soak.trend import check_scipy

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from rocm_dp.soak.config import SoakConfig
    from rocm_dp.soak.log import SoakLog
    from rocm_dp.soak.outcome import Outcome
    from rocm_dp.testing import RankPool

__all__ = ["add_arguments", "run"]

_REDRAW_S = 0.25
_POOL_TIMEOUT = 600.0
_WIDTH = 150  # of the tables where the output is no terminal


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the soak; return 0 when nothing leaks and every result was right, else 1."""
    check_scipy()
    if args.replay is not None:
        return _judge_again(args)
    config = build_config(args)
    if args.self_test:
        return _self_test(config, args, console)
    from rocm_dp.soak.prometheus import endpoint
    from rocm_dp.soak.run import soak

    with ExitStack() as stack:
        journal = stack.enter_context(open_private(args.json)) if args.json else None
        port, feed = stack.enter_context(endpoint(args.metrics_port, args.metrics_host))
        if args.metrics_port is not None:
            console.print(f"metrics at http://{args.metrics_host}:{port}/metrics")
        show = stack.enter_context(_dashboard(config, console))
        pool = stack.enter_context(_pool(config, args))

        def watch(log: SoakLog) -> None:
            feed(log)
            show(log)

        log, outcome = soak(pool, config, journal=journal, watch=watch)
    return _report(log, outcome, args)


def _report(log: SoakLog, outcome: Outcome, args: argparse.Namespace) -> int:
    from rocm_dp.soak.tables import render

    out = _out()
    started = log.ranks[0].started
    for name, why in started.absent.items() if started is not None else ():
        out.print(f"not sampled: {name}: {why}", style="dim", markup=False)
    out.print(render(outcome))
    if args.html:
        from rocm_dp.soak.report import page

        write_atomically(args.html, page(log, outcome))
    return 0 if outcome.passed else 1


def _judge_again(args: argparse.Namespace) -> int:
    from rocm_dp.soak.log import read_log
    from rocm_dp.soak.outcome import conclude

    log = read_log(args.replay)
    about: dict[str, Any] = log.about
    return _report(log, conclude(log, ranks=about["ranks"], required=about["required"]), args)


def _self_test(config: SoakConfig, args: argparse.Namespace, console: Console) -> int:
    from rocm_dp.soak.selftest import injections, self_test
    from rocm_dp.soak.tables import render_trials

    trials = []
    with ExitStack() as stack:
        status = stack.enter_context(console.status("self-test"))
        pool = stack.enter_context(_pool(config, args))
        for trial in self_test(pool, config, clean=args.clean_runs):
            trials.append(trial)
            status.update(f"self-test: {trial.injected or 'clean'} was {'named' if trial.right else 'NOT named'}")
        _, left_out = injections(gpu=pool.backend == "nccl")
    _out().print(render_trials(trials, left_out))
    if args.json:
        write_atomically(args.json, "".join(json.dumps(trial.plain) + "\n" for trial in trials))
    return 0 if all(trial.right for trial in trials) else 1


def _pool(config: SoakConfig, args: argparse.Namespace) -> RankPool:
    from rocm_dp.soak.heap import FEW_RECORDS, ONE_ARENA
    from rocm_dp.testing import RankPool

    with _preloaded(count=args.count_signals):
        return RankPool(config.ranks, timeout=_POOL_TIMEOUT, env=ONE_ARENA | FEW_RECORDS)


@contextmanager
def _dashboard(config: SoakConfig, console: Console) -> Iterator[Callable[[SoakLog], None]]:
    """Show the counters while the soak runs, on a terminal."""
    from rocm_dp.soak.tables import live

    total = f"{config.steps:,}" if config.steps is not None else f"{config.minutes:g} minutes"
    drawn = 0.0
    with Live(Text("starting ranks"), console=console, transient=True, auto_refresh=False) as screen:

        def show(log: SoakLog) -> None:
            nonlocal drawn
            if console.is_terminal and time.monotonic() - drawn > _REDRAW_S:
                drawn = time.monotonic()
                screen.update(live(log, total), refresh=True)

        yield show


@contextmanager
def _preloaded(*, count: bool) -> Iterator[None]:
    """Let processes that start in the block load the signal counter first."""
    if not count:
        yield
        return
    from rocm_dp.platform import cache_folder, preloading
    from rocm_dp.soak.signals import build_counter

    with preloading(build_counter(cache_folder())):
        yield


def _out() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)
