"""``rocm-dp bench rows``: its options and its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rocm_dp.errors import ConfigError
from rocm_dp.files import write_atomically

if TYPE_CHECKING:
    import argparse

    from rocm_dp.bench.rows import Measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rocm-dp bench rows``."""
    parser.add_argument("--repeats", type=int, default=30, help="runs that the median is of")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure and print; return 0."""
    import torch

    from rocm_dp.bench.rows import SHAPES, copy_bandwidth, measure

    if args.repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {args.repeats}")
    if args.json and not args.json.resolve().parent.is_dir():
        raise ConfigError(f"--json needs an existing folder, got {args.json}")
    found: list[Measured] = []
    bandwidth = copy_bandwidth()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=3 * len(SHAPES))
        for one in measure(bandwidth, repeats=args.repeats):
            found.append(one)
            progress.advance(task)
    copied = bandwidth / 1e6
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print_to = Console(width=160 if args.markdown else None)
    print_to.print(f"{device}; a large copy moves {copied:.2f} TB/s, read and written")
    print_to.print(_table(found, markdown=args.markdown))
    if args.json:
        about = {"device": device, "copy_tb_s": copied, "results": [one.as_dict() for one in found]}
        write_atomically(args.json, json.dumps(about, indent=1) + "\n")
    return 0


def _table(found: list[Measured], *, markdown: bool) -> Table:
    table = Table(box=box.MARKDOWN if markdown else box.HEAVY_HEAD)
    columns = ("verb", "rows", "MiB", "graph us", "torch", "ratio", "eager us", "torch", "ratio", "of copy")
    for column in columns:
        table.add_column(column, justify="left" if column in ("verb", "rows") else "right")
    for one in found:
        table.add_row(
            one.verb,
            f"[{one.rows}, {one.width}] {one.dtype}".replace("[", "\\["),
            f"{one.nbytes / 2**20:.2f}",
            f"{one.ours_graph:.1f}",
            f"{one.torch_graph:.1f}",
            f"{one.ours_graph / one.torch_graph:.2f}",
            f"{one.ours_eager:.1f}",
            f"{one.torch_eager:.1f}",
            f"{one.ours_eager / one.torch_eager:.2f}",
            f"{one.of_copy:.0%}",
        )
    return table
