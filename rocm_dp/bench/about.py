"""What a table of figures must say of where they come from."""

from __future__ import annotations

import platform as host
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata

import torch
import torch.distributed as dist

from rocm_dp.platform import environment
from rocm_dp.version import __version__

_TRITON = ("triton", "pytorch-triton-rocm", "pytorch-triton")  # as it is packaged by itself and with torch


@dataclass(frozen=True, slots=True)
class About:
    """Versions by name, the devices, what connects them, and the environment that may matter."""

    versions: dict[str, str]
    backend: str
    device: str
    topology: str
    environment: dict[str, str]


def about(world: int) -> About:
    """Return what this rank sees."""
    return About(_versions(), dist.get_backend(), _device(), _topology(world), environment())


def _versions() -> dict[str, str]:
    found = {"rocm_dp": __version__, "torch": torch.__version__, "python": host.python_version()}
    for name in _TRITON:
        with suppress(metadata.PackageNotFoundError):
            found["triton"] = metadata.version(name)
            break
    if torch.version.hip:
        found["HIP"] = torch.version.hip
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    if dist.get_backend() == "nccl":
        library = "RCCL" if torch.version.hip else "NCCL"
        found[library] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def _device() -> str:
    if dist.get_backend() != "nccl":
        return f"CPU, {host.machine()}"
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{facts.name}, {facts.multi_processor_count} compute units, {facts.total_memory / 2**30:.0f} GiB"


def _topology(world: int) -> str:
    if dist.get_backend() != "nccl":
        return "one host"
    if torch.cuda.device_count() < world:
        return "not all GPUs are seen by one process"
    pairs = [(a, b) for a in range(world) for b in range(world) if a != b]
    missing = [f"{a}->{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    return f"no peer access {', '.join(missing)}" if missing else "one host, peer access between all GPUs"
