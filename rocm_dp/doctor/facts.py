"""What a description says of GPUs and versions, in the kernel's and the tools' documented formats."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_dp.doctor.machine import whole_number
from rocm_dp.doctor.places import CPUINFO, DRM, KFD, NVIDIA_GPUS, RCCL_HEADER, ROCM_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_dp.doctor.machine import Machine

XGMI = 11  # the type of an io_link in KFD's topology
_AMD = "0x1002"
_VIRTUAL = {"0x74b5", "0x74b6", "0x74b9", "0x75b0", "0x75b3"}  # functions of MI300X, MI308X, MI325X, MI350X, MI355X

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AmdGpu:
    """A node of KFD's topology that computes: ``firmware`` of its compute engine, ``linked`` nodes over xGMI."""

    node: int
    arch: str
    firmware: int
    linked: frozenset[int]


@dataclass(frozen=True, slots=True)
class NvidiaGpu:
    """A line of nvidia-smi; ``used`` MiB, uncorrected ECC errors since the driver was loaded."""

    index: int
    name: str
    driver: str
    used: int
    mig: bool
    ecc_errors: int


def amd_gpus(machine: Machine) -> tuple[AmdGpu, ...]:
    """Return the GPUs that KFD shows, by node."""
    return tuple(sorted(_amd_gpus(machine), key=lambda gpu: gpu.node))


def _amd_gpus(machine: Machine) -> Iterator[AmdGpu]:
    for path in machine.files:
        found = re.fullmatch(rf"{KFD}/topology/nodes/(\d{{1,9}})/properties", path)
        facts = machine.properties(path) if found else {}
        if found and facts.get("simd_count") and facts.get("gfx_target_version"):
            inside = path.removesuffix("properties") + "io_links/"
            links = [machine.properties(name) for name in machine.files if name.startswith(inside)]
            linked = frozenset(link.get("node_to", -1) for link in links if link.get("type") == XGMI)
            # The upper bits of the version are flags of its own.
            firmware = facts.get("fw_version", 0) & 0x7FF
            yield AmdGpu(int(found[1]), arch_name(facts["gfx_target_version"]), firmware, linked)


def arch_name(version: int) -> str:
    """Return the name of a gfx_target_version: major, minor and step as two decimal digits each.

    >>> arch_name(90402), arch_name(90500), arch_name(90010)
    ('gfx942', 'gfx950', 'gfx90a')
    """
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def amd_cards(machine: Machine) -> list[str]:
    """Return the sysfs folder of every AMD card."""
    cards = {
        path.rsplit("/", 1)[0] for path in machine.files if re.fullmatch(rf"{DRM}/card\d+/device/vendor", path)
    }
    return sorted(card for card in cards if machine.text(f"{card}/vendor") == _AMD)


def nvidia_gpus(machine: Machine) -> tuple[NvidiaGpu, ...]:
    """Return the GPUs that nvidia-smi lists."""
    rows = csv.reader(machine.commands.get(NVIDIA_GPUS, "").splitlines(), skipinitialspace=True)
    return tuple(
        NvidiaGpu(_count(row[0]), row[1], row[2], _count(row[3]), row[4] == "Enabled", _count(row[5]))
        for row in rows
        if len(row) == 6 and row[0].isdecimal()
    )


def _count(text: str) -> int:
    return whole_number(text) or 0  # "[N/A]"


def has_amd(machine: Machine) -> bool:
    """Return whether this is, or means to be, a machine with AMD GPUs: a ROCm installation counts."""
    return bool(amd_gpus(machine)) or "/dev/kfd" in machine.devices or ROCM_VERSION in machine.files


def has_nvidia(machine: Machine) -> bool:
    """Return whether NVIDIA's driver is there."""
    return bool(nvidia_gpus(machine)) or "/proc/driver/nvidia/version" in machine.files


def has_gpu(machine: Machine) -> bool:
    """Return whether any vendor's GPUs are there, or should be."""
    return has_amd(machine) or has_nvidia(machine)


def always(machine: Machine) -> bool:  # noqa: ARG001 - what a check asks
    """Return that a check concerns every machine."""
    return True


def in_container(machine: Machine) -> bool:
    """Return whether this process runs in a container, as far as it can tell."""
    marked = any(path in machine.files for path in ("/.dockerenv", "/run/.containerenv"))
    return marked or bool(machine.env.keys() & {"KUBERNETES_SERVICE_PORT", "container"})


def is_virtual(machine: Machine) -> bool:
    """Return whether the GPUs are virtual functions, or the whole machine is a guest."""
    devices = {machine.text(f"{card}/device") for card in amd_cards(machine)}
    return bool(devices & _VIRTUAL) or "hypervisor" in machine.text(CPUINFO).split()


def version_of(text: str) -> Version:
    """Return the leading numbers of a version, at most three; empty when there are none.

    >>> version_of("7.2.4-98"), version_of("7.2.26015-fc0010cf6a")
    ((7, 2, 4), (7, 2, 26015))
    """
    found = re.match(r"\d{1,9}(?:\.\d{1,9}){0,2}", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def shown(version: Version) -> str:
    """Return a version as it is written."""
    return ".".join(map(str, version)) or "unknown"


def rocm_version(machine: Machine) -> Version:
    """Return the version of the ROCm installation; empty when there is none."""
    found = version_of(machine.text(ROCM_VERSION))
    return (*found, 0, 0, 0)[:3] if found else ()


def rccl_version(machine: Machine) -> Version:
    """Return the version of the NCCL interface that the installed RCCL has; empty when unknown."""
    header = machine.text(RCCL_HEADER)
    found = [re.search(rf"NCCL_{part} +(\d{{1,9}})", header) for part in ("MAJOR", "MINOR", "PATCH")]
    return tuple(int(match[1]) for match in found if match)


def torch_build(machine: Machine) -> tuple[str, Version]:
    """Return what the torch in use was built for ("hip", "cuda", "cpu"; "": no torch), and that one's version."""
    for place in machine.modules.get("torch", ())[:1]:
        text = machine.text(f"{place}/version.py")
        for kind in ("hip", "cuda"):
            found = re.search(rf"^{kind}\b[^=\n]*= *'([^']+)'", text, re.MULTILINE)
            if found:
                return kind, version_of(found[1])
        return "cpu", ()
    return "", ()
