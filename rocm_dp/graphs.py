"""GraphPlan: counts that live on the device, so that one captured graph serves every step within a capacity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_dp.errors import CapacityError, ConfigError
from rocm_dp.kernels import peer as kernels
from rocm_dp.kernels.driver import Arguments
from rocm_dp.kernels.launch import on_device
from rocm_dp.plan import MAX_ROWS, checked_counts, digest64

if TYPE_CHECKING:
    from collections.abc import Iterable


class GraphPlan:
    """Stands for a TokenPlan whose counts change between replays; made by ``TokenExchange.graph_plan``.

    ``counts`` int32 [dp_size] on the device, zeros at first; ``capacity``: rows of the global buffer, real rows
    of all ranks packed at its begin, zeros behind them, so a graph is chosen by the sum of the counts;
    ``per_rank_capacity``: rows of each rank's local tensors, of which the first ``counts[dp_rank]`` are real.
    """

    __slots__ = ("_write", "capacity", "counts", "per_rank_capacity")

    def __init__(self, dp_size: int, *, capacity: int, per_rank_capacity: int, device: torch.device) -> None:
        for name, value in (("capacity", capacity), ("per_rank_capacity", per_rank_capacity)):
            if type(value) is not int or not 1 <= value <= MAX_ROWS:
                raise ConfigError(f"{name} must be an int in [1, {MAX_ROWS}], got {value!r}")
        if per_rank_capacity > capacity:
            raise ConfigError(f"per_rank_capacity {per_rank_capacity} exceeds capacity {capacity}")
        self.capacity, self.per_rank_capacity = capacity, per_rank_capacity
        with torch.inference_mode(mode=False):
            self.counts = torch.zeros(dp_size, dtype=torch.int32, device=device)
        # Compiled now: an update may come between two replays.
        with on_device(device):
            self._write = kernels.counts_form(dp_size) if device.type == "cuda" else None

    @property
    def rows(self) -> int:
        """Rows of the global buffer, padding included."""
        return self.capacity

    @property
    def digest(self) -> int:
        """A 64-bit hash of the capacities, the same on every machine and in every process."""
        return digest64(f"graph {self.counts.numel()} {self.capacity} {self.per_rank_capacity}".encode())

    def update(self, counts: Iterable[int]) -> None:
        """Set the counts of the next replay; call it on the stream that replays, so that it comes behind the last.

        The counts travel with a kernel launch: no memory of the host is read later. Raises ConfigError for counts
        that are none or of another number of ranks, CapacityError for more rows than there is room for; the
        counts on the device then stay as they were. CapacityError in a capture too.
        """
        checked = checked_counts(counts)
        if len(checked) != self.counts.numel():
            raise ConfigError(f"the plan is for {self.counts.numel()} dp ranks, got counts {checked}")
        if sum(checked) > self.capacity:
            raise CapacityError(f"counts {checked} are {sum(checked)} rows, capacity is {self.capacity}")
        if max(checked) > self.per_rank_capacity:
            raise CapacityError(f"a rank has {max(checked)} rows, per_rank_capacity is {self.per_rank_capacity}")
        if self._write is None:
            self.counts.copy_(torch.tensor(checked, dtype=torch.int32))
            return
        device = self.counts.device
        with on_device(device):
            if torch.cuda.is_current_stream_capturing():
                raise CapacityError("update() in a capture would write the same counts in every replay")
            stream = torch.cuda.current_stream(device).cuda_stream
            self._write(1, stream, Arguments((self.counts.data_ptr(), *kernels.two_a_word(checked))))
