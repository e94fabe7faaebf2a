"""The command line. Each command lives beside what it runs; nothing of it is imported before it is asked for."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rich.console import Console

from rocm_dp.aot import command as kernels
from rocm_dp.bench import command as bench
from rocm_dp.bench import tune_command as tune
from rocm_dp.demo import command as demo
from rocm_dp.doctor import command as doctor
from rocm_dp.doctor import info_command as info
from rocm_dp.errors import RocmDpError
from rocm_dp.soak import command as soak
from rocm_dp.validate import command as validate
from rocm_dp.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

_FAILED, _USAGE, _INTERRUPTED = 1, 2, 130
_COMMANDS = (
    ("demo", demo, "replay a trace over ranks with a small MoE model, every verb of every step checked"),
    ("info", info, "what this machine is, which transports carry a call here, which are refused and why"),
    ("doctor", doctor, "look for what is known to go wrong with a machine, or with a recording of one"),
    ("validate", validate, "check every transport on this machine, results poisoned first, against the oracle"),
    ("bench", bench, "measure, against what torch does"),
    ("tune", tune, "measure which transport to take when, and when overlap pays, on this machine"),
    ("soak", soak, "run random steps for long, and prove that nothing leaks"),
    ("kernels", kernels, "compile the kernels for AMD GPUs, none needed, and judge the machine code"),
)
_WITHOUT_TORCH = ("doctor",)  # a missing torch is among what it finds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 when all is well, 1 when a check failed, 2 for wrong usage."""
    args = _parser().parse_args(argv)
    console = Console(stderr=True)
    if find_spec("torch") is None and args.command not in _WITHOUT_TORCH:
        console.print("rocm-dp needs torch: use the image's own on ROCm, or pip install 'rocm-dp\\[cpu]'")
        return _USAGE
    try:
        code: int = args.run(args, console)
    except (RocmDpError, OSError) as error:
        console.print(f"{type(error).__name__}: {error}", markup=False, style="red")
        # What a caller got wrong is a ValueError, or a file that isn't there.
        return _USAGE if isinstance(error, (ValueError, OSError)) else _FAILED
    except KeyboardInterrupt:
        console.print("stopped")
        return _INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rocm-dp", description="Gather and combine token rows around MoE layers, on AMD GPUs first."
    )
    parser.add_argument("--version", action="version", version=f"rocm-dp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module, what in _COMMANDS:
        command = commands.add_parser(
            name, help=what, description=what, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
