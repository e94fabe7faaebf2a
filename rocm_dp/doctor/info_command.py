"""``rocm-dp info``: one screen of what this machine is, what carries a call here, and what is refused and why."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rocm_dp.version import __version__

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.console import RenderableType

    from rocm_dp.doctor.info import Explained
    from rocm_dp.doctor.machine import Machine

_CPU_RANKS, _TIMEOUT = 2, 300.0
_NOTHING = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rocm-dp info``."""
    parser.add_argument("--ranks", type=int, help="processes, one GPU each; else the GPUs here, or 2 on the CPU")
    parser.add_argument("--hidden", type=int, default=7168, help="width of the rows")
    parser.add_argument("--json", action="store_true", help="print it as JSON instead")


def run(args: argparse.Namespace, console: Console) -> int:
    """Ask the ranks at hand and print; return 0."""
    import torch

    from rocm_dp.doctor.info import explain_rank
    from rocm_dp.doctor.live import LiveMachine
    from rocm_dp.testing import RankPool

    ranks = (torch.cuda.device_count() or _CPU_RANKS) if args.ranks is None else args.ranks
    with console.status(f"asking {ranks} ranks"), RankPool(ranks) as pool:
        explained = pool.run(explain_rank, args.hidden, timeout=_TIMEOUT)[0]
    facts = _facts(LiveMachine().describe(), ranks, pool.backend)
    if args.json:
        plain = {"machine": facts, "plans": [one.as_dict() for one in explained]}
        Console(soft_wrap=True, highlight=False).out(json.dumps(plain, indent=1))
    else:
        Console().print(_render(facts, explained))
    return 0


def _facts(machine: Machine, ranks: int, backend: str) -> dict[str, str]:
    import torch

    from rocm_dp.doctor import diagnosis, facts
    from rocm_dp.doctor.checks import Severity

    amd, nvidia = facts.amd_gpus(machine), facts.nvidia_gpus(machine)
    gpus = [gpu.arch for gpu in amd] or [gpu.name for gpu in nvidia]
    rows = diagnosis.diagnose(machine)
    problems = [row.check.name for row in rows if row.severity in (Severity.ERROR, Severity.WARNING)]
    return {
        "rocm_dp": __version__,
        "torch": f"{torch.__version__} (HIP {torch.version.hip or '-'}, CUDA {torch.version.cuda or '-'})",
        "ROCm": facts.shown(facts.rocm_version(machine)) if facts.has_amd(machine) else _NOTHING,
        "GPUs": ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none",
        "SUM_LEN in graphs": _workaround(),
        "ranks": f"{ranks} over {backend}",
        "doctor": f"see rocm-dp doctor: {', '.join(problems)}" if problems else "no problems",
    }


def _by_reason(refused: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, reason in refused.items():
        found.setdefault(reason, []).append(name)
    return found


def _workaround() -> str:
    """Say whether captured steps are padded to SUM_LEN, why, and what it costs."""
    from rocm_dp import rocm
    from rocm_dp.platform import environment

    return rocm.workaround(environment()).text


def _render(facts: dict[str, str], explained: Sequence[Explained]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        if value == _NOTHING:
            continue
        grid.add_row(Text(name, style="bold"), Text(value))
    table = Table("plan", "rows", "carried by", "and why not the others")
    for one in explained:
        table.add_row(
            Text(one.plan),
            f"{one.rows:,}",
            Text(one.chosen or "nothing", style="green" if one.chosen else "bold red"),
            Text("\n".join(f"{', '.join(names)}: {reason}" for reason, names in _by_reason(one.refused).items())),
        )
    return Group(grid, table)
