"""The machine we run on, read and nothing more: no driver is opened, no library loaded, no setting changed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path

from rocm_dp.doctor import places
from rocm_dp.doctor.machine import Device, Machine, Package
from rocm_dp.doctor.places import DRM, KFD
from rocm_dp.platform import environment

# The counters of RAS may be read; device/xgmi_error may not: reading clears it.
_FILES = (
    *(places.ROCM_VERSION, places.RCCL_HEADER, places.AMDGPU_VERSION, "/proc/driver/nvidia/version"),
    *(places.STATUS, places.LIMITS, places.CPUINFO, places.INIT, "/proc/cmdline", "/proc/sys/kernel/osrelease"),
    *(places.NUMA_BALANCING, places.PTRACE_SCOPE, "/.dockerenv", "/run/.containerenv"),
    *(f"{KFD}/topology/nodes/*/{name}" for name in ("gpu_id", "properties", "io_links/*/properties")),
    f"{KFD}/proc/*/vram_*",
    *(f"{DRM}/card*/device/{name}" for name in ("vendor", "device", "mem_info_vram_used")),
    *(f"{DRM}/card*/device/current_{name}_partition" for name in ("compute", "memory")),
    *(f"{DRM}/card*/device/ras/{name}_err_count" for name in ("umc", "xgmi_wafl")),
)
# Of long files only the lines that are looked at, each kind once.
_KEPT = {
    places.RCCL_HEADER: re.compile(r"#define NCCL_(?:MAJOR|MINOR|PATCH) +\d+"),
    places.CPUINFO: re.compile(r"flags\s*:.*"),
}
_NAMESPACES = (places.IPC_NAMESPACE,)
_FOLDERS = (f"{KFD}/proc", "/sys/class/iommu")
_DEVICES = ("/dev/kfd", "/dev/dri/renderD*", "/dev/nvidia[0-9]*")
_COMMANDS = (places.NVIDIA_GPUS, places.NVIDIA_LINKS, places.NVIDIA_APPS, places.AMD_SMI)
_MODULES = ("torch", "triton", "amdsmi", "aiter")
_PACKAGES = re.compile(
    r"rocm.*|(pytorch-)?triton.*|torch.*|nvidia-.*|amdsmi|(amd-)?aiter|numpy|sglang|vllm|hip-.*|flash-attn"
)
_ENV = (
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONSAFEPATH", "ROC_SIGNAL_POOL_SIZE", "AITER_JIT_DIR"),
    *("KUBERNETES_SERVICE_PORT", "SLURM_JOB_ID", "SGLANG_USE_ROCM700A", "container"),
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY", re.IGNORECASE)
_LOCKS = (
    "lock_module_*",
    "build/lock_*",
    "*/build/lock",
    "build/*/build/lock",
    "*/build/.ninja_lock",
    "build/*/build/.ninja_lock",
)
_MOST_BYTES, _MOST_FILES, _COMMAND_SECONDS = 1 << 16, 10_000, 20.0


@dataclass(frozen=True, slots=True)
class LiveMachine:
    """The machine as this process sees it; ``root`` is where its file system lies, ``path`` where imports look."""

    root: Path = Path("/")
    path: tuple[str, ...] = tuple(sys.path)

    def describe(self) -> Machine:
        """Read everything there is to read; what is missing or forbidden is left out."""
        modules = {name: self._places(name) for name in _MODULES}
        files = self._files(_FILES) | self._links(_NAMESPACES)
        for place in modules["torch"]:
            files |= self._files((f"{place}/version.py",))
        return Machine(
            files=files,
            folders={name: tuple(sorted(self._names(name))) for name in _FOLDERS},
            devices=self._devices(),
            env=_environment(),
            commands={line: said for line in _COMMANDS if (said := _said(line))},
            packages=_packages(self.path),
            modules=modules,
            libraries=self._libraries(modules["torch"]),
            lock_ages=self._lock_ages(modules["aiter"]),
            shm_bytes=self._shm_bytes(),
        )

    def _under(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _found(self, pattern: str) -> list[str]:
        """Return the paths that match, as this machine names them."""
        with suppress(OSError, ValueError):  # what an environment variable holds need be no path
            found = islice(self.root.glob(pattern.lstrip("/")), _MOST_FILES)
            return sorted(f"/{path.relative_to(self.root)}" for path in found)
        return []

    def _files(self, patterns: tuple[str, ...]) -> dict[str, str]:
        texts = {}
        for path in (path for pattern in patterns for path in self._found(pattern)):
            with suppress(OSError), self._under(path).open("rb") as file:
                text = file.read(_MOST_BYTES).decode(errors="replace")
                kept = _KEPT.get(path)
                texts[path] = text if kept is None else "\n".join(dict.fromkeys(kept.findall(text)))
        return texts

    def _links(self, paths: tuple[str, ...]) -> dict[str, str]:
        texts = {}
        for path in paths:
            with suppress(OSError):
                texts[path] = str(self._under(path).readlink())
        return texts

    def _names(self, folder: str) -> list[str]:
        with suppress(OSError):
            return [path.name for path in islice(self._under(folder).iterdir(), _MOST_FILES)]
        return []

    def _devices(self) -> dict[str, Device]:
        devices = {}
        for path in (path for pattern in _DEVICES for path in self._found(pattern)):
            with suppress(OSError):
                real = self._under(path)
                devices[path] = Device(real.stat().st_gid, os.access(real, os.R_OK | os.W_OK))
        return devices

    def _places(self, module: str) -> tuple[str, ...]:
        places = [Path(entry) / module for entry in self.path if entry]
        return tuple(dict.fromkeys(str(place) for place in places if (place / "__init__.py").is_file()))

    def _libraries(self, torch: tuple[str, ...]) -> dict[str, str]:
        searched = os.environ.get("LD_LIBRARY_PATH", "").split(":")
        folders = [*searched, *(f"{place}/lib" for place in torch), "/opt/rocm/lib"]
        paths = [path for folder in folders if folder for path in self._found(f"{folder}/librccl.so*")]
        paths += [path for path in os.environ.get("LD_PRELOAD", "").split(":") if "rccl" in path]
        return {path: str(self._under(path).resolve()) for path in paths}

    def _lock_ages(self, places_of_aiter: tuple[str, ...]) -> dict[str, int]:
        roots = [
            os.environ.get("AITER_JIT_DIR", ""),
            f"{Path.home()}/.aiter",
            *(f"{place}/jit" for place in places_of_aiter),
        ]
        ages = {}
        for path in (path for root in roots if root for lock in _LOCKS for path in self._found(f"{root}/{lock}")):
            with suppress(OSError):
                ages[path] = max(0, int(time.time() - self._under(path).stat().st_mtime))
        return ages

    def _shm_bytes(self) -> int:
        with suppress(OSError):
            found = os.statvfs(self._under("/dev/shm"))
            return found.f_blocks * found.f_frsize
        return -1


def _environment() -> dict[str, str]:
    told = environment() | {name: os.environ[name] for name in _ENV if name in os.environ}
    return {name: "(hidden)" if _SECRET.search(name) else told[name] for name in sorted(told)}


def _packages(path: tuple[str, ...]) -> tuple[Package, ...]:
    packages = []
    for found in metadata.distributions(path=list(path)):
        name = re.sub(r"[-_.]+", "-", (found.metadata and found.metadata["Name"]) or "").lower()
        if found.version and _PACKAGES.fullmatch(name):
            packages.append(Package(name, found.version, str(found.locate_file(""))))
    return tuple(sorted(set(packages), key=lambda package: (package.name, package.place)))


def _said(line: str) -> str:
    """Return what a command prints; empty when it is not there, fails or does not end."""
    command = line.split()
    if shutil.which(command[0]) is None:
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, check=True, timeout=_COMMAND_SECONDS)
        return done.stdout[:_MOST_BYTES].decode(errors="replace")
    return ""
