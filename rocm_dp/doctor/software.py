"""Checks of what is installed: packages that don't belong together, libraries that hide others, old locks."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from rocm_dp.doctor.checks import Check, error, fine, note, warning
from rocm_dp.doctor.facts import always, has_amd, rocm_version, shown, version_of
from rocm_dp.doctor.places import AMD_SMI

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_dp.doctor.checks import Finding
    from rocm_dp.doctor.machine import Machine

_TRITON = re.compile(r"(pytorch-)?triton(-rocm)?")
_STALE = 900  # seconds: no module of aiter compiles for longer
# amdsmi has numbers of its own in ROCm's releases, and ROCm's numbers on PyPI.
_AMDSMI_OF_ROCM = {24: (6, 3), 25: (6, 4), 26: (7,)}


def _cuda_packages(machine: Machine) -> Iterator[Finding]:
    found = [
        f"{package.name} {package.version}" for package in machine.packages if package.name.startswith("nvidia-")
    ]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        yield error(", ".join(found[:3]) + more, "pip uninstall them, and see that torch is still the image's own")
    else:
        yield fine("no nvidia-* packages")


def _triton(machine: Machine) -> Iterator[Finding]:
    found = [package for package in machine.packages if _TRITON.fullmatch(package.name)]
    seen = ", ".join(f"{package.name} {package.version}" for package in found)
    if not machine.modules.get("triton"):
        yield warning("no triton", "install the triton that belongs to this torch: peer memory needs it")
    elif len({package.name for package in found}) > 1:
        yield warning(seen, "uninstall the one that is not torch's: both write the same folder")
    else:
        yield fine(seen or "triton, of unknown version")


def _rccl(machine: Machine) -> Iterator[Finding]:
    files = list(dict.fromkeys(machine.libraries.values()))
    if len(files) > 1:
        yield warning(
            f"{len(files)}: {', '.join(files)}",
            "keep one: take the other's folder off LD_LIBRARY_PATH and LD_PRELOAD, and see NCCL_DEBUG=VERSION",
        )
    else:
        yield fine(files[0] if files else "none found")


def _amdsmi_copies(machine: Machine) -> Iterator[Finding]:
    places = machine.modules.get("amdsmi", ())
    if len(places) > 1:
        yield warning(", ".join(places), "keep the one in the Python environment, off PYTHONPATH the other")
    else:
        yield fine(places[0] if places else "none: the kernel's own files are read instead")


def _amdsmi_version(machine: Machine) -> Iterator[Finding]:
    rocm = rocm_version(machine)
    for version in machine.versions("amdsmi"):
        number = version_of(version)
        of = _AMDSMI_OF_ROCM.get(number[0], number[:2]) if number else ()
        if of and rocm and rocm[: len(of)] != of:
            yield warning(f"amdsmi {version}, ROCm {shown(rocm)}", f"pip install amdsmi=={rocm[0]}.{rocm[1]}.*")
            return
    told = _library_version(machine)
    if told and rocm and told[:2] != rocm[:2]:
        yield warning(f"amd-smi is of ROCm {shown(told)}, ROCm {shown(rocm)}", "call the amd-smi of this ROCm")
    else:
        yield fine("of this ROCm, or none")


def _library_version(machine: Machine) -> tuple[int, ...]:
    """Return the ROCm version that the amd-smi command says it is of; empty when it says nothing."""
    said = machine.commands.get(AMD_SMI, "")
    try:
        found = json.loads(said[said.index("[") :])  # behind warnings that it may print first
        return version_of(str(found[0]["rocm_version"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return ()


def _locks(machine: Machine) -> Iterator[Finding]:
    stale = {path: age for path, age in machine.lock_ages.items() if age > _STALE}
    if stale:
        oldest = max(stale, key=lambda path: stale[path])
        yield error(
            f"{len(stale)} compile locks, {oldest} {stale[oldest] / 3600:.1f} hours old",
            "end whoever compiles, then remove all: the module's, its build folder's and .ninja_lock",
        )
    elif machine.lock_ages:
        yield note(f"{len(machine.lock_ages)} compile locks, just taken", "aiter is compiling")
    else:
        yield fine("no compile locks")


CHECKS = (
    Check(
        "cuda packages",
        "they come with a CUDA torch, and bring its NCCL and runtime along",
        has_amd,
        _cuda_packages,
    ),
    Check("triton", "the kernels are compiled by the Triton that torch was built with", always, _triton),
    Check(
        "rccl copies",
        "the one that is found first is used, and need not be the one that torch was tested with",
        has_amd,
        _rccl,
    ),
    Check(
        "amdsmi copies", "two copies are loaded at once, and the second finds no driver", has_amd, _amdsmi_copies
    ),
    Check(
        "amdsmi version",
        "its structures change with ROCm: figures are read from the wrong place",
        has_amd,
        _amdsmi_version,
    ),
    Check(
        "aiter locks",
        "a start that was killed leaves its compile lock, and the next start waits for ever",
        always,
        _locks,
    ),
)
