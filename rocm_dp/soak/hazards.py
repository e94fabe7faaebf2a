"""What leaks on GPUs, on purpose: buffers kept by record_stream, fresh events, streams joined by wait_stream.

The one file of rocm_dp in which these calls may stand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from rocm_dp.exchange import TokenExchange
    from rocm_dp.soak.program import SoakStep

_LAYERS = 61
_BATCHES = 2
_KEPT_BYTES = 128 * 2**20  # a dozen of them are a balloon; whatever frees peer memory lets the side stream catch up
_BUSY_CYCLES = 20_000_000  # about 10 ms, longer than a step: the side stream falls behind


class RecordStreamLeak:
    """Each step a buffer is handed to a side stream that falls behind more and more."""

    def __init__(self, exchange: TokenExchange) -> None:
        self._device = exchange.device
        self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def step(self, index: int) -> None:
        """Allocate, let the side stream use it, drop it."""
        del index
        buffer = torch.empty(_KEPT_BYTES, dtype=torch.uint8, device=self._device)
        with torch.cuda.stream(self._side):
            torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
            buffer.fill_(1)
        buffer.record_stream(self._side)

    def close(self) -> None:
        """Let the side stream finish."""
        self._side.synchronize()
        torch.cuda.empty_cache()


class SeedSystem:
    """Gathers and combines as the replaced system does: fresh buffers, record_stream and fresh events each call.

    One step is a forward of 61 layers in two batches on a comm stream, with no wait of the host in it.
    """

    checks = waits = 0

    def __init__(self, exchange: TokenExchange) -> None:
        self._group, self._world = exchange.groups.world, exchange.layout.world_size
        self._device, self._dtype, self._hidden = exchange.device, exchange.dtype, exchange.hidden
        self._comm = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def do(self, step: SoakStep, *, check: bool) -> None:
        """Run one forward; the rows are not checked: nobody doubts them, only what is left behind."""
        del check
        rows = max(1, *step.plan.sizes)
        for layer in range(_LAYERS):
            for batch in range(_BATCHES):
                self._layer(rows + (layer * 7 + batch) % 16)

    def take_mismatches(self) -> list[str]:
        """Return nothing: no result is checked."""
        return []

    def _layer(self, rows: int) -> None:
        compute = torch.cuda.current_stream(self._device)
        local = torch.ones(rows, self._hidden, dtype=self._dtype, device=self._device)
        gathered = torch.empty(rows * self._world, self._hidden, dtype=self._dtype, device=self._device)
        self._comm.wait_stream(compute)
        with torch.cuda.stream(self._comm):
            dist.all_gather_into_tensor(gathered, local, group=self._group)
            local.record_stream(self._comm)
            gathered.record_stream(self._comm)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._comm)
        compute.wait_event(done)
        partial = gathered * 2
        combined = torch.empty_like(local)
        self._comm.wait_stream(compute)
        with torch.cuda.stream(self._comm):
            dist.reduce_scatter_tensor(combined, partial, group=self._group)
            for tensor in (partial, combined):
                tensor.record_stream(self._comm)
