"""aiter's communicator as its callers may rely on it, over a gloo group: what it asks for, refuses, and leaves undone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

SILENT_WORLDS = {6}  # all-gather and reduce-scatter return with the output as it was
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LIMIT = 64 << 20


class CustomAllreduce:
    def __init__(
        self,
        group: dist.ProcessGroup,
        device: int | str | torch.device,
        max_size: int = 1 << 30,
        enable_register_for_capturing: bool = True,
    ) -> None:
        self.disabled, self._capturing = True, False
        assert dist.get_backend(group) != "nccl", "must be made on a group that is not NCCL's"
        self.world_size = dist.get_world_size(group)
        if self.world_size not in (2, 4, 6, 8):
            return
        self.group, self.device, self.max_size = group, torch.device(device), max_size
        self.enable_register_for_capturing = enable_register_for_capturing
        self.registered: dict[int, torch.Tensor] = {}
        self.calls: list[str] = []
        self.disabled = False

    @contextmanager
    def capture(self) -> Iterator[None]:
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    def should_custom_ag(self, inp: torch.Tensor) -> bool:
        nbytes = inp.numel() * inp.element_size()
        fits = nbytes <= self.max_size / (self.world_size * 2)
        return not self.disabled and nbytes % 16 == 0 and inp.is_contiguous() and fits

    def should_custom_rs(self, inp: torch.Tensor, dim: int) -> bool:
        nbytes, pack = inp.numel() * inp.element_size(), 16 // inp.element_size()
        if self.disabled or nbytes % 16 or nbytes > LIMIT or not inp.is_contiguous():
            return False
        even = inp.shape[dim] % self.world_size == 0
        return even and (dim != 0 or inp.numel() % (self.world_size * pack) == 0)

    def all_gather_unreg(self, inp: torch.Tensor, out: torch.Tensor | None = None, dim: int = 0) -> torch.Tensor:
        self.calls.append("all_gather_unreg")
        return self._gather(inp, out, dim)

    def all_gather_reg(self, inp: torch.Tensor, out: torch.Tensor | None = None, dim: int = 0) -> torch.Tensor:
        assert self._capturing, "inputs are registered in a capture only"
        self.calls.append("all_gather_reg")
        return self._gather(inp, out, dim)

    def reduce_scatter(
        self, inp: torch.Tensor, out: torch.Tensor, dim: int = 0, *, registered: bool = False
    ) -> None:
        assert not registered or self._capturing, "inputs are registered in a capture only"
        assert inp.dtype in FLOATS, f"no kernel for {inp.dtype}"
        assert dim == 0
        assert out.is_contiguous()
        self.calls.append("reduce_scatter")
        if self.world_size in SILENT_WORLDS:
            return
        total = inp.double()
        dist.all_reduce(total, group=self.group)
        rank, rows = dist.get_rank(self.group), out.shape[0]
        out.copy_(total[rank * rows : (rank + 1) * rows])

    def custom_all_gather(self, inp: torch.Tensor, dim: int = 0) -> torch.Tensor:
        raise AssertionError("returns zeros while it warms up for a capture")

    custom_reduce_scatter = custom_all_reduce = custom_all_gather

    def _gather(self, inp: torch.Tensor, out: torch.Tensor | None, dim: int) -> torch.Tensor:
        assert inp.dtype in FLOATS, f"no kernel for {inp.dtype}"
        assert dim == 0
        if out is None:
            out = inp.new_empty(inp.shape[0] * self.world_size, *inp.shape[1:])
        assert out.is_contiguous()
        assert out.numel() == inp.numel() * self.world_size
        if self.world_size in SILENT_WORLDS:
            return out
        # Copied in first: the input may be a part of the output.
        parts = [torch.empty_like(inp) for _ in range(self.world_size)]
        dist.all_gather(parts, inp.clone(), group=self.group)
        return out.copy_(torch.cat(parts))
