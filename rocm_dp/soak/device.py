"""What torch tells of the GPU's memory, and what the exchange tells of itself."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from rocm_dp.options import ExchangeStats
from rocm_dp.soak.sample import AbsentError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_LEAST_PEAK = 256.0 * 2**20
_ALLOCATOR = {
    "torch.allocated": "allocated_bytes.all.current",
    "torch.reserved": "reserved_bytes.all.current",
    "torch.inactive_split": "inactive_split_bytes.all.current",
    "torch.segments": "segment.all.current",
    "torch.alloc_retries": "num_alloc_retries",
}


class TorchSampler:
    """``torch.*``: torch's caching allocator, bytes and counts; ``torch.driver_used``: bytes of VRAM not free.

    ``torch.balloon`` is what is reserved over the most that was ever live (at least 256 MiB, so that small segments
    don't count). ``torch.driver_used`` is of the whole GPU: other processes on it count.
    """

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise AbsentError(f"the ranks run on {device.type}: there is no caching allocator")
        self._device = device

    def read(self) -> dict[str, float]:
        """Read the allocator's statistics and ask the driver."""
        import torch

        stats = torch.cuda.memory_stats(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        found = {name: float(stats.get(key, 0)) for name, key in _ALLOCATOR.items()}
        peak = max(float(stats.get("allocated_bytes.all.peak", 0)), _LEAST_PEAK)
        return {**found, "torch.balloon": found["torch.reserved"] / peak, "torch.driver_used": float(total - free)}

    def limits(self) -> dict[str, float]:
        """Return the bytes that the GPU has."""
        import torch

        total = float(torch.cuda.get_device_properties(self._device).total_memory)
        return dict.fromkeys(("torch.allocated", "torch.reserved", "torch.driver_used"), total)


class ExchangeSampler:
    """``own.*``: the counters of an exchange's ``stats()``; ``own.calls`` adds up the calls."""

    name = "own"

    def __init__(self, stats: Callable[[], ExchangeStats]) -> None:
        self._stats = stats

    def read(self) -> dict[str, float]:
        """Ask the exchange."""
        found = self._stats()
        plain = [field.name for field in fields(ExchangeStats) if field.name != "calls"]
        values = {f"own.{name}": float(getattr(found, name)) for name in plain}
        return {**values, "own.calls": float(sum(count for _, count in found.calls))}
