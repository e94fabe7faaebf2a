"""What the kernel driver of AMD GPUs (KFD) tells of a process, through sysfs. Needs no library."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from rocm_dp.soak.sample import AbsentError

KFD = Path("/sys/class/kfd/kfd")
_STATUS = Path("/proc/self/status")


class KfdSampler:
    """``kfd.vram`` (bytes), ``kfd.sdma`` (microseconds of the copy engines), ``kfd.queues``, ``kfd.evicted_ms``.

    ``root``: where KFD's sysfs folder lies. The folder of a process is named by its pid on the host; in a container
    without the host's pid namespace that is none of ours, so it is told apart only when there is but one.
    The counters are added up over the process's GPUs, whose ids end the names of its files.
    """

    name = "kfd"

    def __init__(self, root: Path = KFD, status: Path = _STATUS) -> None:
        if not root.is_dir():
            raise AbsentError(f"{root} does not exist: no AMD GPU, or its kernel driver is not loaded")
        self._folder = _folder_of_this_process(root / "proc", status)

    def read(self) -> dict[str, float]:
        """Read the files of this process."""
        if not self._folder.is_dir():
            raise AbsentError(f"{self._folder} is gone")
        return {
            "kfd.vram": float(self._total("vram_*")),
            "kfd.sdma": float(self._total("sdma_*")),
            "kfd.queues": float(sum(1 for path in (self._folder / "queues").glob("*") if path.is_dir())),
            "kfd.evicted_ms": float(self._total("stats_*/evicted_ms")),
        }

    def _total(self, pattern: str) -> int:
        total = 0
        for path in self._folder.glob(pattern):
            with suppress(ValueError):
                total += int(path.read_text().strip() or 0)
        return total


def host_pids(status: Path = _STATUS) -> list[str]:
    """Return this process's pid in each of the pid namespaces that it can see, its own last."""
    for line in status.read_text().splitlines():
        if line.startswith("NSpid:"):
            return line.split()[1:]
    return [str(os.getpid())]


def _folder_of_this_process(proc: Path, status: Path) -> Path:
    if not proc.is_dir():
        raise AbsentError(f"{proc} does not exist: this kernel's KFD tells nothing of processes")
    for pid in host_pids(status):
        if (proc / pid).is_dir():
            return proc / pid
    folders = sorted(path for path in proc.iterdir() if path.is_dir())
    if len(folders) == 1:
        return folders[0]
    pids = " or ".join(host_pids(status))
    raise AbsentError(
        f"none of the {len(folders)} processes in {proc} is {pids}: run with the host's pid namespace"
    )
