"""The thin functions over one group each, into tensors of the caller's of any shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_dp.integrations.sglang.places import as_rows
from rocm_dp.integrations.sglang.state import StepState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    import torch.distributed as dist


class GroupFunctions(StepState):
    """Reduce-scatter, all-reduce and all-gather over attention tp, attention cp and MoE cp. Inputs are not written.

    ``output`` may be this rank's own part of ``input`` in a reduce-scatter, and ``input`` that of ``output`` in an
    all-gather.
    """

    def attn_tp_reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Sum ``input`` over attention tp and keep this rank's part."""
        return _into(output, input, self.exchange.tp_reduce_scatter)

    def attn_cp_reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Sum ``input`` over attention cp and keep this rank's part."""
        return _into(output, input, self.exchange.cp_reduce_scatter)

    def attn_tp_all_reduce(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Return the sum of ``input`` over attention tp."""
        return self.exchange.tp_all_reduce(as_rows("input", input)).view(input.shape)

    def attn_tp_all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Stack ``input`` of the attention-tp ranks."""
        return _into(output, input, self.exchange.tp_all_gather)

    def attn_cp_all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Stack ``input`` of the attention-cp ranks."""
        return _into(output, input, self.exchange.cp_all_gather)

    def moe_cp_all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Stack ``input`` of the ranks that exchange tokens before the MoE."""
        return _into(output, input, self.exchange.moe_cp_all_gather)

    def attn_tp_all_gather(self, output_list: Sequence[torch.Tensor], input: torch.Tensor) -> None:  # noqa: A002
        """Fill ``output_list[t]`` with ``input`` of attention-tp rank t; sizes and strides may differ."""
        flat = [input.new_empty(out.numel(), 1) for out in output_list]
        self.exchange.tp_all_gather_v(flat, input.reshape(-1, 1))
        for out, arrived in zip(output_list, flat, strict=True):
            out.copy_(arrived.view(out.shape))

    def get_moe_cp_group(self) -> dist.ProcessGroup:
        """Return the ranks that exchange tokens before the MoE."""
        return self.exchange.groups.moe_dp

    def get_moe_cp_rank(self) -> int:
        """Return the place in that group."""
        return self.exchange.groups.moe_dp.rank()

    def get_moe_cp_size(self) -> int:
        """Return the size of that group."""
        return self.exchange.groups.moe_dp.size()

    def is_enable_moe_cp_allgather(self) -> bool:
        """Return whether cp ranks must share their tokens before the MoE."""
        return self.layout.cp_size > self.layout.moe_dp_size


def _into(output: torch.Tensor, source: torch.Tensor, verb: Callable[..., torch.Tensor]) -> torch.Tensor:
    rows = as_rows("input", source)
    verb(rows, out=output.view(-1, rows.shape[1]))
    return output
