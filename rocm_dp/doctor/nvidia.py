"""Checks of NVIDIA GPUs, where they have what AMD's checks look for, and of machines without GPUs."""

from __future__ import annotations

import csv
import re
from collections import Counter
from typing import TYPE_CHECKING

from rocm_dp.doctor.checks import Check, error, fine, note, warning
from rocm_dp.doctor.facts import has_gpu, has_nvidia, nvidia_gpus, shown, torch_build
from rocm_dp.doctor.places import NVIDIA_APPS, NVIDIA_LINKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_dp.doctor.checks import Finding
    from rocm_dp.doctor.machine import Machine

_STRANDED = 2048  # MiB
_LINK = re.compile(r"NV\d+")


def _gpus(machine: Machine) -> Iterator[Finding]:
    gpus = nvidia_gpus(machine)
    names = Counter(gpu.name for gpu in gpus)
    kind, version = torch_build(machine)
    seen = ", ".join(f"{count} x {name}" for name, count in names.items())
    if not gpus:
        yield error("NVIDIA's driver is there, but lists no GPU", "start the container with --gpus all")
    elif kind != "cuda":
        yield error(
            f"{seen}, torch is built for {kind or 'nothing: there is none'}", "install a CUDA build of torch"
        )
    else:
        yield fine(f"{seen}, driver {gpus[0].driver}, CUDA of torch {shown(version)}")


def _links(machine: Machine) -> Iterator[Finding]:
    rows = [line.split() for line in re.sub(r"\x1b\[\d*m", "", machine.commands.get(NVIDIA_LINKS, "")).splitlines()]
    count = len(nvidia_gpus(machine))
    matrix = [row[1 : 1 + count] for row in rows if _is_own_row(row)]
    missing = [
        f"{a}-{b} ({link})"
        for a, row in enumerate(matrix)
        for b, link in enumerate(row)
        if a < b and not _LINK.fullmatch(link)
    ]
    if len(matrix) != count:
        yield note("nvidia-smi topo -m tells no links", "")
    elif missing:
        yield warning(
            f"not over NVLink: {', '.join(missing[:4])}", "peer memory will be refused: no atomics over PCIe"
        )
    else:
        yield fine("NVLink between all GPUs")


def _is_own_row(row: list[str]) -> bool:
    """Return whether this is a GPU's row, which has an X where it meets itself, and not the head of the table."""
    found = re.fullmatch(r"GPU(\d{1,4})", row[0]) if row else None
    return found is not None and row[int(found[1]) + 1 :][:1] == ["X"]


def _partitions(machine: Machine) -> Iterator[Finding]:
    split = [str(gpu.index) for gpu in nvidia_gpus(machine) if gpu.mig]
    if split:
        yield warning(
            f"MIG is on for GPU {', '.join(split)}", "instances can't reach each other: nvidia-smi -mig 0"
        )
    else:
        yield fine("MIG is off")


def _counters(machine: Machine) -> Iterator[Finding]:
    bad = [f"GPU {gpu.index}: {gpu.ecc_errors}" for gpu in nvidia_gpus(machine) if gpu.ecc_errors]
    if bad:
        yield error(f"uncorrected memory errors, {', '.join(bad)}", "drain the node and reset the GPU")
    else:
        yield fine("no errors counted")


def _stranded(machine: Machine) -> Iterator[Finding]:
    apps = [row for row in csv.reader(machine.commands.get(NVIDIA_APPS, "").splitlines()) if row]
    full = [f"GPU {gpu.index}: {gpu.used} MiB" for gpu in nvidia_gpus(machine) if gpu.used > _STRANDED]
    if full and not apps:
        yield warning(
            f"{', '.join(full)}, and no process", "end what holds it (in another container?), or reset the GPU"
        )
    else:
        yield fine(f"{sum(gpu.used for gpu in nvidia_gpus(machine))} MiB in use, {len(apps)} processes")


def _without(machine: Machine) -> bool:
    return not has_gpu(machine)


def _no_gpu(machine: Machine) -> Iterator[Finding]:
    kind, _ = torch_build(machine)
    if kind in ("hip", "cuda"):
        yield warning(f"torch is built for {kind.upper()}, and there is no GPU", "is this the machine you meant?")
    else:
        yield note("no GPU: ranks are CPU processes over gloo", "fine for tests and for the demo")


def _has_list(machine: Machine) -> bool:
    return bool(nvidia_gpus(machine))


CHECKS = (
    Check("nvidia gpus", "the driver, torch and the GPUs must be made for each other", has_nvidia, _gpus),
    Check("nvlink", "kernels write and signal into every other GPU's memory", _has_list, _links),
    Check("mig", "an instance is cut off from its neighbours", _has_list, _partitions),
    Check(
        "nvidia error counters", "an uncorrected error has already changed somebody's rows", _has_list, _counters
    ),
    Check("nvidia stranded memory", "memory without an owner is gone until a reset", _has_list, _stranded),
    Check("no gpu", "everything works on CPU ranks, slowly", _without, _no_gpu),
)
