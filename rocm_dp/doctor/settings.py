"""Checks of versions, and of the environment variables that ROCm, RCCL and torch look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_dp.doctor.checks import Check, error, fine, note, warning
from rocm_dp.doctor.facts import (
    amd_gpus,
    has_amd,
    has_gpu,
    nvidia_gpus,
    rccl_version,
    rocm_version,
    shown,
    torch_build,
)
from rocm_dp.doctor.machine import whole_number
from rocm_dp.doctor.places import AMDGPU_VERSION
from rocm_dp.options import Options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_dp.doctor.checks import Finding
    from rocm_dp.doctor.machine import Machine

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_QUEUES, _ENOUGH_QUEUES = 4, 5  # the runtime's default; torch, RCCL, two batches and the comm stream
_CHANNELS, _FEW_CHANNELS = 112, 64
_RECLAIMS_FROM = {"gfx942": 177, "gfx950": 24}  # the firmware that gives scratch back without stalling RCCL
_FUSES_FROM = (2, 30, 7)
_SIGNALS, _POOL, _STREAMS, _MARGIN = 4096, 32, 8, 1024  # of a process; of a stream at first; streams of a rank


def _set_to(machine: Machine, name: str) -> str:
    return f"{name}={machine.env[name]}" if name in machine.env else f"{name} is not set"


def _number(machine: Machine, name: str, default: int) -> int:
    found = whole_number(machine.env.get(name, ""))
    return default if found is None else found


def _versions(machine: Machine) -> Iterator[Finding]:
    rocm, rccl, (kind, hip) = rocm_version(machine), rccl_version(machine), torch_build(machine)
    driver = machine.text(AMDGPU_VERSION) or "of the kernel"
    seen = f"ROCm {shown(rocm)}, HIP of torch {shown(hip)}, RCCL {shown(rccl)}, amdgpu {driver}"
    if not rocm:
        yield warning(seen, "install ROCm in /opt/rocm, or link it there: what depends on versions was not judged")
    elif kind == "hip" and hip[:2] != rocm[:2]:
        yield warning(seen, "use a torch that was built for this ROCm")
    else:
        yield fine(seen)


def _capture(machine: Machine) -> Iterator[Finding]:
    version = rocm_version(machine)
    if (7, 0, 0) <= version < (7, 2, 1):
        yield warning(
            f"ROCm {shown(version)}",
            "update to 7.2.1 or newer; else capture only calls over peer memory (graph_plan), never "
            "torch.distributed's",
        )
    else:
        yield fine(f"ROCm {shown(version)}")


def _queues(machine: Machine) -> Iterator[Finding]:
    seen = _set_to(machine, "GPU_MAX_HW_QUEUES")
    if _number(machine, "GPU_MAX_HW_QUEUES", _QUEUES) < _ENOUGH_QUEUES:
        yield warning(seen, "GPU_MAX_HW_QUEUES=8 where batches overlap; measure decode again after a change")
    else:
        yield fine(seen)


def _scratch(machine: Machine) -> Iterator[Finding]:
    old = {gpu.firmware for gpu in amd_gpus(machine) if gpu.firmware < _RECLAIMS_FROM.get(gpu.arch, 0)}
    seen = _set_to(machine, "HSA_NO_SCRATCH_RECLAIM")
    needed = bool(old) or () < rocm_version(machine) < (6, 4, 0)
    kept = machine.env.get("HSA_NO_SCRATCH_RECLAIM") == "1"
    if needed and not kept:
        why = f"firmware {min(old)}" if old else f"ROCm {shown(rocm_version(machine))}"
        yield warning(f"{seen}, with {why}", "set HSA_NO_SCRATCH_RECLAIM=1, or update the GPU's firmware")
    elif kept and not needed:
        yield warning(
            seen, "unset it: this firmware gives scratch back without stalling, and kept scratch runs out"
        )
    else:
        yield fine(seen)


def _kernarg(machine: Machine) -> Iterator[Finding]:
    seen = _set_to(machine, "HIP_FORCE_DEV_KERNARG")
    if machine.env.get("HIP_FORCE_DEV_KERNARG") == "1":
        yield fine(seen)
    else:
        yield note(seen, "HIP_FORCE_DEV_KERNARG=1 spares each launch a read over PCIe")


def _ipc(machine: Machine) -> Iterator[Finding]:
    version, legacy = rocm_version(machine), machine.env.get("HSA_ENABLE_IPC_MODE_LEGACY") == "1"
    seen = f"{_set_to(machine, 'HSA_ENABLE_IPC_MODE_LEGACY')}, ROCm {shown(version)}"
    if (7, 2, 0) <= version <= (7, 2, 4) and not legacy:
        yield warning(seen, "HSA_ENABLE_IPC_MODE_LEGACY=1 on ROCm 7.2.0 to 7.2.4")
    elif version > (7, 2, 4) and legacy:
        yield note(seen, "no longer needed: unset it")
    else:
        yield fine(seen)


def _channels(machine: Machine) -> Iterator[Finding]:
    wanted, gpus = _number(machine, "NCCL_MIN_NCHANNELS", 0), len(amd_gpus(machine))
    seen = f"{_set_to(machine, 'NCCL_MIN_NCHANNELS')}, {gpus} GPUs, RCCL {shown(rccl_version(machine))}"
    if wanted > _FEW_CHANNELS and () < rccl_version(machine) < (2, 26, 6):
        yield error(seen, f"at most {_FEW_CHANNELS} before RCCL 2.26.6, which faults on more in one group")
    elif wanted > _FEW_CHANNELS and gpus < 8:
        yield warning(seen, f"at most {_FEW_CHANNELS} on fewer than 8 GPUs: RCCL falls back to 2 channels on more")
    elif not wanted and gpus == 8 and {gpu.arch for gpu in amd_gpus(machine)} == {"gfx942"}:
        yield note(
            seen, f"NCCL_MIN_NCHANNELS={_CHANNELS} is AMD's advice for 8 x MI300X: measure with rocm-dp bench"
        )
    else:
        yield fine(seen)


def _fused(machine: Machine) -> Iterator[Finding]:
    seen, version = _set_to(machine, "NCCL_ALLGATHERV_ENABLE"), rccl_version(machine)
    value = machine.env.get("NCCL_ALLGATHERV_ENABLE")
    if version >= _FUSES_FROM and value != "1":
        yield note(f"{seen}, RCCL {shown(version)}", "NCCL_ALLGATHERV_ENABLE=1 makes one kernel of all_gather_v")
    elif version < _FUSES_FROM and value == "1" and not nvidia_gpus(machine):
        yield note(
            f"{seen}, RCCL {shown(version)}", f"RCCL knows it from {shown(_FUSES_FROM)} on: it does nothing here"
        )
    elif nvidia_gpus(machine) and value == "0":
        yield note(seen, "unset it: NCCL then makes one kernel of all_gather_v")
    else:
        yield fine(seen)


def _expandable(machine: Machine) -> Iterator[Finding]:
    growing = [name for name in _ALLOCATOR if "expandable_segments:true" in machine.env.get(name, "").lower()]
    if growing:
        yield warning(
            _set_to(machine, growing[0]),
            "leave expandable_segments off where aiter or an engine shares torch's tensors; our own peer memory is "
            "not affected",
        )
    else:
        yield fine("expandable_segments is off")


def _signals(machine: Machine) -> Iterator[Finding]:
    pool = _number(machine, "ROC_SIGNAL_POOL_SIZE", _POOL)
    room = _SIGNALS - pool * _STREAMS - Options().max_in_flight
    seen = f"{_set_to(machine, 'ROC_SIGNAL_POOL_SIZE')}: about {max(0, room)} of {_SIGNALS} signals to spare"
    if room <= 0:
        yield error(seen, "unset ROC_SIGNAL_POOL_SIZE")
    elif room < _MARGIN:
        yield warning(seen, "lower ROC_SIGNAL_POOL_SIZE or Options.max_in_flight")
    else:
        yield fine(seen)


CHECKS = (
    Check("versions", "torch, RCCL and the driver are tested together, release by release", has_amd, _versions),
    Check(
        "graph capture",
        "on ROCm 7.0.0 to 7.2.0 a torch.distributed call inside a capture ends in hipErrorCapturedEvent",
        has_amd,
        _capture,
    ),
    Check(
        "hardware queues",
        "with 4 queues or fewer two streams may share one, and nothing overlaps",
        has_amd,
        _queues,
    ),
    Check(
        "scratch",
        "RCCL stalls when old firmware takes scratch back; new firmware must be let to",
        has_amd,
        _scratch,
    ),
    Check("kernel arguments", "in host memory they cost each launch a few microseconds", has_amd, _kernarg),
    Check(
        "ipc mode",
        "on ROCm 7.2.0 to 7.2.4 every exported allocation leaks unless IPC is the legacy one",
        has_amd,
        _ipc,
    ),
    Check(
        "rccl channels",
        "too many channels crash an old RCCL, and slow a new one down on few GPUs",
        has_amd,
        _channels,
    ),
    Check("fused gathers", "grouped broadcasts are one kernel or one for each rank", has_gpu, _fused),
    Check("expandable segments", "memory of growing segments has no IPC handle", has_gpu, _expandable),
    Check("signals", "a process has 4096 HSA signals: when they are used up, any call may fail", has_amd, _signals),
)
