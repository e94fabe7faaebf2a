"""What Linux tells of a process: fds by kind, threads, mappings, memory, locked memory, files in /dev/shm."""

from __future__ import annotations

import os
import resource
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_dp.soak.sample import AbsentError

if TYPE_CHECKING:
    from collections.abc import Iterator

PROC = Path("/proc")
SHM = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup/memory.max")
_KINDS = ("socket", "pipe", "eventfd", "eventpoll", "memfd", "shm", "gpu", "file", "other")
_KIB = 1024


class HostSampler:
    """``fds.<kind>``, ``threads``, ``maps``, ``rss``, ``pss`` and ``memlock`` (bytes) of a process.

    ``proc`` is where the proc file system lies, ``pid`` a process in it.
    """

    name = "host"

    def __init__(self, proc: Path = PROC, pid: str = "self") -> None:
        self._folder = proc / pid
        if not (self._folder / "status").exists():
            raise AbsentError(f"{self._folder}/status does not exist")

    def read(self) -> dict[str, float]:
        """Read /proc once."""
        status = _fields((self._folder / "status").read_text())
        kinds = Counter(fd_kind(target) for target in self._targets())
        values = {f"fds.{kind}": float(kinds[kind]) for kind in _KINDS}
        values["fds.all"] = float(sum(kinds.values()))
        values["threads"] = float(status["Threads"])
        values["maps"] = float((self._folder / "maps").read_bytes().count(b"\n"))
        values["rss"] = float(status["VmRSS"] * _KIB)
        values["memlock"] = float((status.get("VmLck", 0) + status.get("VmPin", 0)) * _KIB)
        with suppress(OSError):  # kernels before 4.14, and some sandboxes, have no smaps_rollup
            values["pss"] = float(_fields((self._folder / "smaps_rollup").read_text())["Pss"] * _KIB)
        return values

    def _targets(self) -> Iterator[str]:
        folder = self._folder / "fd"
        own = str(folder.resolve())
        for fd in folder.iterdir():
            with suppress(OSError):
                target = str(fd.readlink())
                if target != own:  # the fd that lists the folder
                    yield target


def fd_kind(target: str) -> str:
    """Return the kind of an open fd from what its link in /proc points to."""
    if target.startswith(("socket:", "pipe:")):
        return target.partition(":")[0]
    if target.startswith("anon_inode:"):
        found = target.removeprefix("anon_inode:").strip("[]")
        return found if found in ("eventfd", "eventpoll") else "other"
    if target.startswith("/memfd:"):
        return "memfd"
    if target.startswith("/dev/shm/"):
        return "shm"
    if target.startswith(("/dev/kfd", "/dev/dri", "/dev/nvidia")):
        return "gpu"
    return "file" if target.startswith("/") else "other"


def _fields(text: str) -> dict[str, int]:
    """Return the whole numbers of ``Name:   123 kB`` lines."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0])
    return found


class ShmSampler:
    """``shm.files`` and ``shm.bytes``: files in /dev/shm that this process may have left there.

    Those of this user that were not there at the start and that no other process holds; so the files that other
    jobs on the machine work with are not counted, those that they leave behind are.
    """

    name = "shm"

    def __init__(self, folder: Path = SHM, proc: Path = PROC) -> None:
        if not folder.is_dir():
            raise AbsentError(f"{folder} does not exist")
        self._folder, self._proc, self._own = folder, proc, str(os.getpid())
        self._before = {path.name for path in folder.iterdir()}

    def read(self) -> dict[str, float]:
        """List the folder; look into other processes only when there is something new in it."""
        sizes: dict[str, int] = {}
        for path in self._folder.iterdir():
            if path.name not in self._before:
                with suppress(OSError):
                    found = path.stat()
                    if found.st_uid == os.geteuid():
                        sizes[path.name] = found.st_size
        if sizes:
            for held in self._held_elsewhere():
                sizes.pop(held, None)
        return {"shm.files": float(len(sizes)), "shm.bytes": float(sum(sizes.values()))}

    def _held_elsewhere(self) -> set[str]:
        prefix, held = f"{self._folder}/", set()
        for process in self._proc.iterdir():
            if not process.name.isdigit() or process.name == self._own:
                continue
            with suppress(OSError):
                for line in (process / "maps").read_text().splitlines():
                    if prefix in line:
                        held.add(line.partition(prefix)[2].removesuffix(" (deleted)"))
            with suppress(OSError):
                for fd in (process / "fd").iterdir():
                    with suppress(OSError):
                        target = str(fd.readlink())
                        if target.startswith(prefix):
                            held.add(target.removeprefix(prefix))
        return held


def host_limits(proc: Path = PROC, cgroup: Path = CGROUP) -> dict[str, float]:
    """Return what each counter may grow to in this process, where there is a limit."""
    limits: dict[str, float] = {}
    named = (("fds.all", resource.RLIMIT_NOFILE), ("memlock", resource.RLIMIT_MEMLOCK))
    for name, which in named:
        soft = resource.getrlimit(which)[0]
        if soft != resource.RLIM_INFINITY:
            limits[name] = float(soft)
    with suppress(OSError, ValueError):
        limits["maps"] = float((proc / "sys/vm/max_map_count").read_text())
    with suppress(OSError, ValueError):
        limits["threads"] = float((proc / "sys/kernel/threads-max").read_text())
    with suppress(OSError, KeyError):
        limits["rss"] = limits["pss"] = float(_fields((proc / "meminfo").read_text())["MemTotal"] * _KIB)
    with suppress(OSError, ValueError):  # "max" where the container's memory has no limit of its own
        limits["rss"] = limits["pss"] = min(limits["rss"], float(cgroup.read_text()))
    with suppress(OSError):
        found = os.statvfs(SHM)
        limits["shm.bytes"] = float(found.f_blocks * found.f_frsize)
    return limits
