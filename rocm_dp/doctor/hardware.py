"""Checks of AMD GPUs: which they are, what links them, what they counted, and what is left in their memory."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from rocm_dp.doctor.checks import Check, error, fine, note, warning
from rocm_dp.doctor.facts import amd_cards, amd_gpus, has_amd, is_virtual, torch_build
from rocm_dp.doctor.places import DRM, KFD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_dp.doctor.checks import Finding
    from rocm_dp.doctor.machine import Machine

_BUILT_FOR = ("gfx942", "gfx950")
_STRANDED = 1 << 30  # bytes of each GPU: idle, the driver holds about 300 MiB


def has_amd_gpus(machine: Machine) -> bool:
    """Return whether KFD shows GPUs."""
    return bool(amd_gpus(machine))


def _several(machine: Machine) -> bool:
    return len(amd_gpus(machine)) > 1


def _gpus(machine: Machine) -> Iterator[Finding]:
    archs = Counter(gpu.arch for gpu in amd_gpus(machine))
    seen = ", ".join(f"{count} x {arch}" for arch, count in archs.items())
    if not archs:
        yield error(
            "ROCm is installed, but the kernel shows no GPU",
            "load amdgpu on the host, and give the container --device=/dev/kfd --device=/dev/dri",
        )
    elif len(archs) > 1:
        yield error(seen, "give a job GPUs of one kind, with ROCR_VISIBLE_DEVICES")
    elif not archs.keys() & set(_BUILT_FOR):
        yield warning(
            seen, f"the kernels are built and judged for {' and '.join(_BUILT_FOR)}; run rocm-dp validate"
        )
    elif _one_may_be_lost(machine):
        yield warning(
            f"{seen} on {len(amd_cards(machine))} cards",
            "boards hold 8, 4 or 2: one may have fallen off the bus; see amdgpu in dmesg, and restart the host",
        )
    else:
        yield fine(seen)


def _one_may_be_lost(machine: Machine) -> bool:
    """Return whether the host has a number of cards that no board has. Containers see them all, guests may not."""
    cards = len(amd_cards(machine))
    return cards & (cards - 1) != 0 and not is_virtual(machine)


def _mesh(machine: Machine) -> Iterator[Finding]:
    gpus = amd_gpus(machine)
    pairs = [(a.node, b.node) for a in gpus for b in gpus if a.node != b.node and b.node not in a.linked]
    of = len(gpus) * (len(gpus) - 1)
    if not pairs:
        yield fine(f"all {of} links between {len(gpus)} GPUs")
        return
    shown = ", ".join(f"{a}->{b}" for a, b in pairs[:4]) + (", ..." if len(pairs) > 4 else "")
    if len(pairs) == of:
        yield warning(
            "no xGMI link between any GPUs", "expect process groups over PCIe; peer memory will be refused"
        )
    else:
        yield error(
            f"{len(pairs)} of {of} links are missing (KFD nodes {shown})",
            "reset or reseat the GPUs that the missing links have in common; compare with `amd-smi topology`",
        )


def _counters(machine: Machine) -> Iterator[Finding]:
    corrected = uncorrected = 0
    for name in ("umc", "xgmi_wafl"):
        for card in amd_cards(machine):
            counts = machine.properties(f"{card}/ras/{name}_err_count")
            corrected += counts.get("ce", 0)
            if counts.get("ue"):
                uncorrected += counts["ue"]
                what = "memory (ECC)" if name == "umc" else "xGMI"
                place = card.removeprefix(f"{DRM}/").split("/")[0]
                yield error(
                    f"{place}: {counts['ue']} uncorrected {what} errors",
                    "drain the node; see `amd-smi metric --ecc` and `amd-smi bad-pages`, then reset the GPU",
                )
    if not uncorrected:
        yield note(f"{corrected} corrected errors", "watch the rate") if corrected else fine("no errors counted")


def _partitions(machine: Machine) -> Iterator[Finding]:
    found = Counter(
        (machine.text(f"{card}/current_compute_partition"), machine.text(f"{card}/current_memory_partition"))
        for card in amd_cards(machine)
    )
    modes = {mode: count for mode, count in found.items() if any(mode)}
    seen = ", ".join(f"{count} x {compute}/{memory}" for (compute, memory), count in modes.items())
    if len(modes) > 1:
        yield error(seen, "set all GPUs alike, with `amd-smi set --compute-partition` and `--memory-partition`")
    elif modes and next(iter(modes)) != ("SPX", "NPS1"):
        yield warning(seen, "SPX/NPS1 gives a rank a whole GPU; peer memory serves 8 ranks at most")
    else:
        yield fine(seen or "not told by this driver")


def _virtual(machine: Machine) -> Iterator[Finding]:
    if is_virtual(machine):
        yield note(
            "virtual functions, or a guest",
            "partitions, error counters and power belong to the host; compare figures with other guests only",
        )
    else:
        yield fine("bare metal")


def _stranded(machine: Machine) -> Iterator[Finding]:
    used = sum(machine.number(f"{card}/mem_info_vram_used") or 0 for card in amd_cards(machine))
    owned = sum(
        machine.number(path) or 0 for path in machine.files if re.fullmatch(rf"{KFD}/proc/\d+/vram_\d+", path)
    )
    lost, processes = used - owned, len(machine.folders.get(f"{KFD}/proc", ()))
    if lost > _STRANDED * max(1, len(amd_cards(machine))):
        yield error(
            f"{lost / 2**30:.0f} GiB of GPU memory belong to none of {processes} processes",
            "a process was killed inside the driver: end what waits for it, then reset the GPU; run containers "
            "with an init (--init)",
        )
    else:
        yield fine(f"{used / 2**30:.1f} GiB in use, {processes} processes")


def _firmware_told(machine: Machine) -> Iterator[Finding]:
    versions = {gpu.firmware for gpu in amd_gpus(machine)}
    seen = f"compute firmware {', '.join(map(str, sorted(versions)))}"
    if len(versions) > 1:
        yield warning(seen, "update the firmware of all GPUs to one version: ranks would differ in speed")
    else:
        yield fine(seen)


def _torch_matches(machine: Machine) -> Iterator[Finding]:
    kind, _ = torch_build(machine)
    if kind == "hip":
        yield fine("torch is built for HIP")
    else:
        seen = {"cuda": "torch is built for CUDA", "cpu": "torch is built for CPUs"}.get(kind, "there is no torch")
        yield error(seen, "start from the image anew: a pip install replaced its torch; hold it with --constraint")


CHECKS = (
    Check("gpus", "the kernels, routing and self-tests are for one kind of GPU", has_amd, _gpus),
    Check(
        "torch build", "another vendor's torch sees no GPU, or crashes on its first call", has_amd, _torch_matches
    ),
    Check(
        "gpu firmware",
        "RCCL decides by it what it may do without HSA_NO_SCRATCH_RECLAIM",
        has_amd_gpus,
        _firmware_told,
    ),
    Check(
        "xgmi mesh", "every rank writes into every other's memory: one link too few, and none may", _several, _mesh
    ),
    Check("error counters", "an uncorrected error has already changed somebody's rows", has_amd_gpus, _counters),
    Check(
        "partitions", "a partition is a rank with a share of the GPU's memory and links", has_amd_gpus, _partitions
    ),
    Check("virtual gpus", "a guest sees less than the host, and shares more", has_amd_gpus, _virtual),
    Check("stranded memory", "memory without an owner is gone until a reset", has_amd_gpus, _stranded),
)
