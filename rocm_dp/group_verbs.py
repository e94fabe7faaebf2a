"""The thin verbs over one group each: attention tp, attention cp and MoE cp."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from rocm_dp.checks import check_summed, checked_rows
from rocm_dp.errors import TensorError
from rocm_dp.transports import collectives

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    import torch.distributed as dist

    from rocm_dp.groups import Groups

# A verb's name and the group of Groups that it acts on.
_GROUPS = {"tp": "tp", "cp": "cp", "moe_cp": "moe_dp"}


class GroupVerbs(ABC):
    """All-reduce, reduce-scatter and all-gather of ``[rows, width]`` over tp, cp and the MoE-cp group.

    Each writes ``out`` (None: a new tensor) and returns it; ``x`` is not written, unless it is ``out``. The MoE-cp
    group is ``Groups.moe_dp``: the ranks that exchange tokens before the MoE.
    """

    groups: Groups
    device: torch.device

    def tp_all_reduce(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Sum ``x`` over attention tp: [rows, width]."""
        return self._all_reduce("tp", x, out)

    def tp_reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Sum ``x`` over attention tp and keep this rank's rows: [rows / tp_size, width]."""
        return self._reduce_scatter("tp", x, out)

    def tp_all_gather(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Stack ``x`` of the attention-tp ranks: [rows * tp_size, width], any dtype."""
        return self._all_gather("tp", x, out)

    def cp_all_reduce(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Sum ``x`` over attention cp: [rows, width]."""
        return self._all_reduce("cp", x, out)

    def cp_reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Sum ``x`` over attention cp and keep this rank's rows: [rows / cp_size, width]."""
        return self._reduce_scatter("cp", x, out)

    def cp_all_gather(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Stack ``x`` of the attention-cp ranks: [rows * cp_size, width], any dtype."""
        return self._all_gather("cp", x, out)

    def moe_cp_all_reduce(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Sum ``x`` over the ranks that exchange tokens before the MoE: [rows, width]."""
        return self._all_reduce("moe_cp", x, out)

    def moe_cp_reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Sum ``x`` over the MoE-cp group and keep this rank's rows: [rows / group size, width]."""
        return self._reduce_scatter("moe_cp", x, out)

    def moe_cp_all_gather(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Stack ``x`` of the MoE-cp ranks: [rows * group size, width], any dtype."""
        return self._all_gather("moe_cp", x, out)

    def _all_reduce(self, name: str, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        group, x = self._door(f"{name} all-reduce", name, x, summed=True)
        out = self._out(f"{name} all-reduce", x, out, x.shape[0])

        def work() -> None:
            if out.data_ptr() != x.data_ptr():
                out.copy_(x)
            collectives.all_reduce(out, group)

        self._run(f"{name}_all_reduce", work)
        return out

    def _reduce_scatter(self, name: str, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        group, x = self._door(f"{name} reduce-scatter", name, x, summed=True)
        if x.shape[0] % group.size():
            raise TensorError(
                f"{name} reduce-scatter cuts rows in {group.size()} equal parts, got {x.shape[0]} rows"
            )
        out = self._out(f"{name} reduce-scatter", x, out, x.shape[0] // group.size())
        self._run(f"{name}_reduce_scatter", lambda: collectives.reduce_scatter(out, x, group))
        return out

    def _all_gather(self, name: str, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        group, x = self._door(f"{name} all-gather", name, x, summed=False)
        out = self._out(f"{name} all-gather", x, out, x.shape[0] * group.size())
        self._run(f"{name}_all_gather", lambda: collectives.all_gather(out, x, group))
        return out

    def _door(
        self, verb: str, name: str, x: torch.Tensor, *, summed: bool
    ) -> tuple[dist.ProcessGroup, torch.Tensor]:
        x = checked_rows(f"{verb} input", x, None, device=self.device)
        if summed:
            check_summed(verb, x.dtype)
        return getattr(self.groups, _GROUPS[name]), x

    def _out(self, verb: str, x: torch.Tensor, out: torch.Tensor | None, rows: int) -> torch.Tensor:
        if out is None:
            return x.new_empty(rows, x.shape[1])
        return checked_rows(f"{verb} out", out, rows, width=x.shape[1], dtype=x.dtype, device=self.device)

    @abstractmethod
    def _run(self, verb: str, work: Callable[[], None]) -> None:
        """Run ``work`` on the current stream, in order with the comm stream."""
