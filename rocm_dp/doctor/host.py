"""Checks of the host and of what this process may do on it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rocm_dp.doctor.checks import Check, error, fine, note, warning
from rocm_dp.doctor.facts import always, amd_gpus, has_amd, has_gpu, in_container, is_virtual
from rocm_dp.doctor.machine import whole_number
from rocm_dp.doctor.places import INIT, IPC_NAMESPACE, LIMITS, NUMA_BALANCING, PTRACE_SCOPE, STATUS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_dp.doctor.checks import Finding
    from rocm_dp.doctor.machine import Machine

_INITS = {
    "tini",
    "docker-init",
    "dumb-init",
    "catatonit",
    "systemd",
    "init",
    "s6-svscan",
    "pause",
    "runit",
    "bwrap",
}
_HOST_IPC = "ipc:[4026531839]"  # PROC_IPC_INIT_INO of the kernel
_PTRACE = 19  # CAP_SYS_PTRACE
_FEW_FILES, _ENOUGH_FILES = 4096, 65536
_SMALL_SHM, _ENOUGH_SHM = 1 << 30, 8 << 30


def _limit(machine: Machine, name: str) -> float:
    """Return a soft limit of /proc/self/limits; infinite when it is unlimited or not told."""
    words = machine.line_of(LIMITS, name).split()
    found = whole_number(words[0]) if words else None
    return float("inf") if found is None else found


def _devices(machine: Machine) -> Iterator[Finding]:
    kfd = machine.devices.get("/dev/kfd")
    nodes = {path: device for path, device in machine.devices.items() if path.startswith("/dev/dri/renderD")}
    closed = [
        path for path, device in machine.devices.items() if not device.usable and not path.startswith("/dev/nv")
    ]
    if kfd is None or not nodes:
        missing = "/dev/kfd" if kfd is None else "/dev/dri/renderD*"
        yield error(f"{missing} is not there", "start the container with --device=/dev/kfd --device=/dev/dri")
    elif closed:
        groups = sorted({machine.devices[path].gid for path in closed})
        mine = machine.line_of(STATUS, "Groups")
        yield error(
            f"{', '.join(closed[:3])}: of group {', '.join(map(str, groups))}, we are in {mine or 'none'}",
            f"start with --group-add {' --group-add '.join(map(str, groups))} (video and render on the host)",
        )
    elif len(nodes) < len(amd_gpus(machine)):
        yield note(
            f"{len(nodes)} of {len(amd_gpus(machine))} GPUs may be opened", "the others belong to someone else"
        )
    else:
        yield fine(f"/dev/kfd and {len(nodes)} render nodes")


def _numa(machine: Machine) -> Iterator[Finding]:
    if machine.text(NUMA_BALANCING) not in ("", "0"):
        yield warning("kernel.numa_balancing is on", "sysctl kernel.numa_balancing=0 on the host")
    else:
        yield fine("kernel.numa_balancing is off")


def _iommu(machine: Machine) -> Iterator[Finding]:
    units, line = machine.folders.get("/sys/class/iommu", ()), machine.text("/proc/cmdline").split()
    if units and not {"iommu=pt", "iommu.passthrough=1"} & set(line) and not is_virtual(machine):
        yield warning(f"{len(units)} IOMMUs translate", "boot the host with iommu=pt")
    else:
        yield fine("passes through, or is off" if not is_virtual(machine) else "the host's")


def _files(machine: Machine) -> Iterator[Finding]:
    soft = _limit(machine, "Max open files")
    seen = f"{soft:,.0f} open files"
    if soft < _FEW_FILES:
        yield error(seen, f"ulimit -n {_ENOUGH_FILES}, or --ulimit nofile={_ENOUGH_FILES}")
    elif soft < _ENOUGH_FILES:
        yield warning(seen, f"ulimit -n {_ENOUGH_FILES}, or --ulimit nofile={_ENOUGH_FILES}")
    else:
        yield fine(seen)


def _memlock(machine: Machine) -> Iterator[Finding]:
    soft = _limit(machine, "Max locked memory")
    if soft < float("inf"):
        yield warning(f"{soft / 2**20:,.2f} MiB may be locked", "ulimit -l unlimited, or --ulimit memlock=-1")
    else:
        yield fine("unlimited")


def _init(machine: Machine) -> Iterator[Finding]:
    first = machine.text(INIT)
    if first in _INITS:
        yield fine(f"process 1 is {first}")
    else:
        yield warning(
            f"process 1 is {first or 'unknown'}", "--init, `init: true` in compose, or tini as entry point"
        )


def _shared_ipc(machine: Machine) -> Iterator[Finding]:
    if machine.text(IPC_NAMESPACE) == _HOST_IPC:
        yield fine("the host's")
    else:
        yield note(
            "an ipc namespace of its own",
            "enough while all ranks of the node run in this container; else --ipc=host and --pid=host",
        )


def _shm(machine: Machine) -> Iterator[Finding]:
    size, seen = machine.shm_bytes, f"/dev/shm of {machine.shm_bytes / 2**30:.2g} GiB"
    advice = "--shm-size=16g, --ipc=host, or a memory-backed emptyDir at /dev/shm"
    if size < _SMALL_SHM:
        yield error(seen if size >= 0 else "no /dev/shm", advice)
    elif size < _ENOUGH_SHM:
        yield warning(seen, advice)
    else:
        yield fine(seen)


def _seccomp(machine: Machine) -> Iterator[Finding]:
    if machine.line_of(STATUS, "Seccomp:") == "2":
        yield warning("system calls are filtered", "--security-opt seccomp=unconfined")
    else:
        yield fine("system calls are not filtered")


def _ptrace(machine: Machine) -> Iterator[Finding]:
    capabilities = machine.line_of(STATUS, "CapEff")
    granted = int(capabilities, 16) >> _PTRACE & 1 if re.fullmatch(r"[0-9a-f]{1,16}", capabilities) else 0
    scope = machine.number(PTRACE_SCOPE) or 0
    if scope and not granted and machine.env.get("HSA_ENABLE_IPC_MODE_LEGACY") == "1":
        yield note("CAP_SYS_PTRACE is not granted", "not needed while HSA_ENABLE_IPC_MODE_LEGACY=1")
    elif scope and not granted:
        yield warning(f"yama's ptrace_scope is {scope}, and CAP_SYS_PTRACE is not granted", "--cap-add=SYS_PTRACE")
    else:
        yield fine("allowed among processes of one user" if not granted else "CAP_SYS_PTRACE is granted")


CHECKS = (
    Check("devices", "without them there is no GPU, whatever the driver says", has_amd, _devices),
    Check("numa balancing", "pages that move under a running transfer stall it at random", has_gpu, _numa),
    Check("iommu", "translated peer traffic is slow, and RCCL hangs on some boards", has_amd, _iommu),
    Check(
        "open files",
        "every shared allocation and connection is a file: the limit shows as out of memory",
        always,
        _files,
    ),
    Check("locked memory", "network cards register memory by locking it", has_gpu, _memlock),
    Check("init", "without one a killed rank stays, and its GPU memory with it", in_container, _init),
    Check(
        "shared ipc",
        "ranks in two containers reach each other's memory only through shared namespaces",
        in_container,
        _shared_ipc,
    ),
    Check(
        "shared memory",
        "process groups and CPU ranks exchange through /dev/shm; docker's default is 64 MiB",
        always,
        _shm,
    ),
    Check(
        "seccomp", "Docker's default filter refuses the memory policy calls of the ROCm runtime", has_amd, _seccomp
    ),
    Check(
        "ptrace",
        "a rank takes over another's memory handle as a debugger would: IPC fails if it may not",
        has_amd,
        _ptrace,
    ),
)
