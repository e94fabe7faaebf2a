"""``rocm-dp tune``: measure on this machine what the library then goes by."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_dp.bench import arguments
from rocm_dp.bench.on_ranks import on_ranks
from rocm_dp.bench.overlap_config import TuneConfig
from rocm_dp.errors import ConfigError
from rocm_dp.routing import LAST

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console
    from rich.table import Table

    from rocm_dp.bench.overlap_config import Pair
    from rocm_dp.measured import MeasuredTable

_LAYERS = {True: 8, False: 2}
_INTERMEDIATE = {True: 2048, False: 64}
_REPEATS = {True: 7, False: 3}
_TOKENS = {True: "2,8,32,128,512,1024,2048,4096,8192,16384", False: "2,16"}
_SKEWS = "1,2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rocm-dp tune``."""
    arguments.add_layout_arguments(parser)
    parser.add_argument("--tokens", help="mean rows of a rank, in both halves together: 2,64,1024; else 2 to 16384")
    parser.add_argument("--skews", default=_SKEWS, help="rows of the largest rank over the mean: 1,2")
    parser.add_argument("--layers", type=int, help="layers of a forward; else 8, or 2 on the CPU")
    parser.add_argument(
        "--intermediate",
        type=int,
        help="width inside a layer, as in the model to serve; else 2048, or 64 on the CPU",
    )
    parser.add_argument(
        "--graphs", action=argparse.BooleanOptionalAction, default=True, help="on GPUs also measure in graphs"
    )
    parser.add_argument("--iters", type=int, help="forwards that medians are of; else 7, or 3 on the CPU")
    parser.add_argument("--out", type=Path, help="write the table here, not where exchanges look for it")
    arguments.add_common_arguments(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, write the table, show it."""
    from rocm_dp.bench.table import print_wide
    from rocm_dp.bench.tune import run_tune, table_of
    from rocm_dp.tuned import save

    config = _config(args)
    ranks = on_ranks(run_tune, config, console)
    table = table_of(ranks)
    path = Path(ranks[0].path) if args.out is None else args.out
    save(table, path)
    print_wide(_shown(table))
    for reason in ranks[0].refused:
        console.print(reason, markup=False)
    console.print(f"written to {path}", markup=False)
    return 0


def _config(args: argparse.Namespace) -> TuneConfig:
    arguments.check_folders(args, "out")
    ranks, dp, gpu = arguments.wanted_ranks(args)
    tokens = _numbers("--tokens", args.tokens or _TOKENS[gpu], int, least=2)
    skews = _numbers("--skews", args.skews, float, least=1)
    cases = list(_cases(tokens, skews, dp))
    return TuneConfig(
        verb="overlap",
        ranks=ranks,
        dp=dp,
        cp=args.cp,
        cases=tuple(half for _, pair in cases for half in pair),
        transports=tuple(name for name in arguments.wanted_transports(args.transports) if name != LAST),
        hidden=arguments.HIDDEN[gpu] if args.hidden is None else args.hidden,
        dtype=args.dtype,
        iters=_REPEATS[gpu] if args.iters is None else args.iters,
        warmup=2,
        calls=int(args.graphs),
        check=False,
        seed=args.seed,
        timeout=args.timeout,
        layers=_LAYERS[gpu] if args.layers is None else args.layers,
        intermediate=_INTERMEDIATE[gpu] if args.intermediate is None else args.intermediate,
        skews=tuple(skew for skew, _ in cases),
    )


def _cases(tokens: Sequence[float], skews: Sequence[float], dp: int) -> Iterator[tuple[float, Pair]]:
    """Yield each case's skew and halves: ``tokens`` a rank in the mean, the first rank ``skew`` times as many.

    >>> list(_cases([6], [1, 2], 2))
    [(1, ((3, 3), (3, 3))), (2, ((6, 0), (6, 0)))]
    """
    for skew in dict.fromkeys(min(skew, dp) for skew in skews):
        for mean in tokens:
            first = round(mean * skew)
            others = [(int(mean) * dp - first) // (dp - 1)] * (dp - 1) if dp > 1 else []
            counts = (first, *others)
            yield skew, (tuple(n - n // 2 for n in counts), tuple(n // 2 for n in counts))


def _numbers(name: str, text: str, kind: type[int] | type[float], *, least: int) -> list[float]:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{name} must be numbers like 2,64, got {text!r}") from error
    if min(numbers) < least:
        raise ConfigError(f"{name} must be at least {least}, got {text!r}")
    return numbers


def _shown(table: MeasuredTable) -> Table:
    from rocm_dp.bench.table import new_table, number

    shown = new_table("rows", "skew", "mode", "transport", "whole us", "overlap us", "best")
    for entry in table.entries:
        where = str(entry.rows), f"{entry.skew:g}", "graph" if entry.graph else "eager"
        best = min(us for _, _, us in entry.times)
        for name in dict.fromkeys(name for name, _, _ in entry.times):
            kinds = {overlapped: us for other, overlapped, us in entry.times if other == name}
            mark = "overlap" if kinds[True] == best else "whole" if kinds[False] == best else ""
            shown.add_row(*where, name, number(kinds[False], 1), number(kinds[True], 1), mark)
            where = "", "", ""
        shown.add_section()
    return shown
