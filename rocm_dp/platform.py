"""What machine this is, as far as the kernel and the environment tell."""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_dp.plan import digest64

if TYPE_CHECKING:
    from collections.abc import Iterator

# Processes must share these to reach each other's memory: handles are resolved through them.
_NAMESPACES = ("ipc", "pid")
HW_QUEUES = "GPU_MAX_HW_QUEUES"
"""How many hardware queues of a process the HIP runtime spreads its streams over."""
_HW_QUEUES_UNSET = 4
# What changes how collectives, the runtime or the kernels behave.
_TELLING = (
    *("NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_", "HSA_", "HIP_", "ROCR_", "GPU_", "AMD_", "CUDA_"),
    *("PYTORCH_", "TRITON_", "OMP_NUM_THREADS", "ROCM_DP_"),
)


def host_id(proc: Path = Path("/proc")) -> int:
    """Return a number that is equal for processes of one running machine and one set of namespaces.

    A hash of the boot id and of the ipc and pid namespaces; ``proc`` is where the proc file system lies. Two hosts
    never share a boot id, two containers on one host share the namespaces only if they were told to.
    """
    facts = []
    with suppress(OSError):
        facts.append((proc / "sys/kernel/random/boot_id").read_text().strip())
    for name in _NAMESPACES:
        with suppress(OSError):
            facts.append(str((proc / "self/ns" / name).readlink()))
    return digest64("\n".join(facts).encode())


def environment() -> dict[str, str]:
    """Return the environment variables that may explain a figure, in order of their names."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_TELLING)}


def meeting_place() -> str:
    """Return where the ranks of torchrun meet, as they were told: ``MASTER_ADDR:MASTER_PORT``."""
    return ":".join(os.environ.get(name) or f"<no {name}>" for name in ("MASTER_ADDR", "MASTER_PORT"))


def cache_folder() -> Path:
    """Return the folder for what was found out about this machine: below XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rocm_dp"


def hardware_queues() -> int:
    """Return how many hardware queues the HIP runtime may use: GPU_MAX_HW_QUEUES, or 4 where that says nothing."""
    told = os.environ.get(HW_QUEUES, "").strip()
    return int(told) if told.isdecimal() and int(told) else _HW_QUEUES_UNSET


@contextmanager
def preloading(library: Path) -> Iterator[None]:
    """Let every process that is started in the block load ``library`` before all others (``LD_PRELOAD``)."""
    before = os.environ.get("LD_PRELOAD")
    os.environ["LD_PRELOAD"] = f"{library}:{before}" if before else str(library)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LD_PRELOAD"]
        else:
            os.environ["LD_PRELOAD"] = before
