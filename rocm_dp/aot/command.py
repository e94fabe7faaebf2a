"""``rocm-dp kernels``: compile for AMD GPUs that are not here, and judge the machine code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rocm_dp.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from rocm_dp.aot.gate import Judged


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rocm-dp kernels``."""
    parser.add_argument("--arch", default="gfx942,gfx950", help="architectures, separated by commas")
    parser.add_argument("--only", metavar="KERNEL", help="this kernel, e.g. place_rows")
    parser.add_argument(
        "--save", type=Path, help="keep the compiled kernels here: a warm TRITON_CACHE_DIR with a manifest"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")


def run(args: argparse.Namespace, console: Console) -> int:
    """Compile, judge, print; return 0 when no kernel has a fault, else 1."""
    try:
        from rocm_dp.aot.gate import forms_of, judge, write_manifest
    except ModuleNotFoundError as error:
        raise ConfigError(f"rocm-dp kernels needs {error.name}, which is not installed") from error
    arches, forms = [arch.strip() for arch in args.arch.split(",")], forms_of(args.only)
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=len(arches) * len(forms))
        judged = judge(arches, forms, cache=args.save, on_done=lambda: progress.advance(task))
    if args.save:
        write_manifest(args.save, judged)
        console.print(f"{len(judged)} kernels saved in {args.save}", markup=False)
    Console(width=160 if args.markdown else None).print(_table(judged, markdown=args.markdown))
    faulty = [one for one in judged if one.faults]
    for one in faulty:
        console.print(
            f"{one.arch} {one.form.verb} {one.form.rows}, {one.form.call}: {'; '.join(one.faults)}",
            style="red",
            markup=False,
        )
    console.print(f"{len(judged)} kernels compiled, {len(faulty)} with faults")
    return 1 if faulty else 0


def _table(judged: Iterable[Judged], *, markdown: bool) -> Table:
    table = Table(box=box.MARKDOWN if markdown else box.HEAVY_HEAD)
    for column in ("arch", "kernel", "bytes/access", "buffers", "VGPRs", "SGPRs", "LDS", "waves/SIMD", "faults"):
        table.add_column(column, justify="left" if column in ("arch", "kernel") else "right")
    groups: dict[tuple[str, str, int, str], list[Judged]] = {}
    for one in judged:
        size = "> 2 GiB" if one.form.large else "<= 2 GiB"
        groups.setdefault((one.arch, one.form.verb, one.form.vec_bytes, size), []).append(one)
    for (arch, verb, vec_bytes, size), ones in groups.items():
        codes = [one.code for one in ones]
        table.add_row(
            arch,
            verb,
            str(vec_bytes),
            size,
            str(max(code.vgprs for code in codes)),
            str(max(code.sgprs for code in codes)),
            str(max(code.lds for code in codes)),
            str(min(code.occupancy for code in codes)),
            str(sum(bool(one.faults) for one in ones)),
        )
    return table
