"""Which resource had run out when a run was ended by an error that only says that one has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# What the runtimes of both vendors, RCCL and NCCL, and Linux say when something has run out.
_RAN_OUT = re.compile(
    r"OUT_OF_RESOURCES|OUT_OF_MEMORY|OutOfMemory|out of memory|MemoryAllocation|LaunchOutOfResources"
    r"|out of resources|Too many open files|Cannot allocate memory|can't start new thread|ncclSystemError"
    r"|EventPoolExhausted|ALLOC_FAILED|exit code -6",
    re.IGNORECASE,
)
_NEAR = 0.9
_SCRATCH_BYTES = 512 * 2**20  # what a kernel that spills may want at once


@dataclass(frozen=True, slots=True)
class Resource:
    """A counter with a limit, and what running out of it looks like."""

    counter: str
    name: str
    meaning: str


_RESOURCES = (
    Resource("hsa.live", "HSA signals", "every live event and every record in flight holds one"),
    Resource("kfd.queues", "hardware queues", "each stream that is used may take one"),
    Resource(
        "torch.driver_used", "VRAM", "scratch memory of kernels could not grow, though nobody asked for memory"
    ),
    Resource("memlock", "locked memory", "ulimit -l; pinned and registered host memory counts"),
    Resource("fds.all", "file descriptors", "ulimit -n; each exported or mapped block of GPU memory may hold one"),
    Resource("maps", "memory mappings", "vm.max_map_count"),
    Resource("threads", "threads", "kernel.threads-max"),
    Resource("shm.bytes", "/dev/shm", "shared memory that was left behind"),
    Resource("rss", "host memory", "MemTotal, or what the container is allowed"),
    Resource("own.events_held", "events of the exchange", "Options.max_events"),
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """How much of a resource was used in the last sample; ``near``: whether that explains the error."""

    resource: Resource
    used: float
    limit: float
    near: bool

    @property
    def text(self) -> str:
        """One line for a person."""
        share = self.used / self.limit
        return f"{self.resource.name}: {self.used:,.0f} of {self.limit:,.0f} ({share:.1%}); {self.resource.meaning}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``cause`` names the resource that had run out, or is empty; ``evidence``: the fullest first."""

    cause: str
    evidence: tuple[Evidence, ...]
    unknown: tuple[str, ...]

    @property
    def text(self) -> str:
        """What a person is told."""
        lines = [
            f"it was {self.cause}" if self.cause else "none of the resources that were sampled was near its limit"
        ]
        lines += [f"  {one.text}" for one in self.evidence]
        if self.unknown:
            lines.append(f"  not sampled: {', '.join(self.unknown)}")
        return "\n".join(lines)


def ran_out(error: str) -> bool:
    """Return whether an error says that some resource has run out, or may mean it (the HSA runtime aborts)."""
    return _RAN_OUT.search(error) is not None


def diagnose(error: str, values: Mapping[str, float], limits: Mapping[str, float]) -> Diagnosis | None:
    """Say which resource had run out, from the last sample and the limits; None for an error of another kind."""
    if not ran_out(error):
        return None
    found = [
        Evidence(resource, values[resource.counter], limits[resource.counter], _is_near(resource, values, limits))
        for resource in _RESOURCES
        if resource.counter in values and limits.get(resource.counter, 0) > 0
    ]
    found.sort(key=lambda one: (not one.near, -one.used / one.limit))
    known = {one.resource.counter for one in found}
    return Diagnosis(
        cause=found[0].resource.name if found and found[0].near else "",
        evidence=tuple(found),
        unknown=tuple(resource.name for resource in _RESOURCES if resource.counter not in known),
    )


def _is_near(resource: Resource, values: Mapping[str, float], limits: Mapping[str, float]) -> bool:
    used, limit = values[resource.counter], limits[resource.counter]
    if resource.counter == "torch.driver_used":
        return limit - used < _SCRATCH_BYTES
    return used >= _NEAR * limit
