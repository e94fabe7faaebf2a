"""vLLM's variable-length collectives and its all-gather / reduce-scatter all2all manager over a TokenExchange.

::

    rows = VariableRows(RankLayout(rank, world, dp_size=world), groups, device=device)
    manager = All2AllManager(rows, sizes_of=lambda: sizes_of_this_forward)

``groups`` are those of the ranks that exchange rows, each with rows of its own: vLLM's dp group, or its ep group
under sequence parallelism.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias, overload

import torch

from rocm_dp.errors import ConfigError, TensorError
from rocm_dp.exchange import TokenExchange
from rocm_dp.options import Options
from rocm_dp.plan import PaddingMode, TokenPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from rocm_dp.groups import Groups
    from rocm_dp.layout import RankLayout

Tensors: TypeAlias = "list[torch.Tensor]"


class VariableRows:
    """``all_gatherv`` and ``reduce_scatterv`` of vLLM's communicator, for tensors of any shape and along any dim.

    A context manager. Rows of each (width, dtype) have an exchange of their own, made by all ranks together on
    its first use; a list is gathered as one message. Results are new tensors, the caller's to keep. Raises
    TensorError, with both sides, for sizes that are not those of the tensors.
    """

    def __init__(
        self,
        layout: RankLayout,
        groups: Groups,
        *,
        device: torch.device | str,
        max_rows: int | None = None,
        options: Options = Options(),  # noqa: B008 - frozen
    ) -> None:
        if layout.replicas != 1:
            raise ConfigError(f"every rank has rows of its own here, got {layout.replicas} ranks a dp rank")
        self.layout, self.groups = layout, groups
        self._device, self._max_rows, self._options = device, max_rows, options
        self._exchanges: dict[tuple[int, torch.dtype], TokenExchange] = {}

    @overload
    def all_gatherv(
        self, input_: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None
    ) -> torch.Tensor: ...
    @overload
    def all_gatherv(self, input_: Tensors, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensors: ...
    def all_gatherv(
        self, input_: torch.Tensor | Tensors, dim: int = 0, sizes: Sequence[int] | None = None
    ) -> torch.Tensor | Tensors:
        """Concatenate ``input_`` of all ranks along ``dim``; rank r brings ``sizes[r]`` (None: all the same)."""
        tensors = [input_] if isinstance(input_, torch.Tensor) else list(input_)
        fronted = [tensor.movedim(dim, 0).contiguous() for tensor in tensors]
        local = fronted[0].shape[0]
        counts = [local] * self.layout.world_size if sizes is None else list(sizes)
        plan = self._plan(counts)
        if any(tensor.shape[0] != plan.counts[self.layout.rank] for tensor in fronted):
            found = [tensor.shape[0] for tensor in fronted]
            raise TensorError(f"sizes {counts} give rank {self.layout.rank} other rows than its tensors', {found}")
        rows = [tensor.view(tensor.shape[0], math.prod(tensor.shape[1:])) for tensor in fronted]
        gathered = self._exchange(rows[0]).gather_many(rows, plan)
        outs = [
            whole.clone().view(plan.rows, *tensor.shape[1:]).movedim(0, dim)
            for whole, tensor in zip(gathered, fronted, strict=True)
        ]
        return outs[0] if isinstance(input_, torch.Tensor) else outs

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Sum ``input_`` over all ranks; keep this rank's part of ``dim``: ``sizes[r]`` (None: an equal part)."""
        front = input_.movedim(dim, 0).contiguous()
        world, size = self.layout.world_size, front.shape[0]
        if sizes is None and size % world:
            raise TensorError(f"without sizes dim {dim} is cut in {world} equal parts, got {size}")
        counts = [size // world] * world if sizes is None else list(sizes)
        plan = self._plan(counts)
        if plan.rows != size:
            raise TensorError(f"sizes {counts} are {plan.rows} rows, dim {dim} has {size}")
        rows = front.view(size, math.prod(front.shape[1:]))
        own = self._exchange(rows).combine(rows, plan).clone()
        # Back with movedim(0, dim): movedim(dim, 0) undoes itself for dim <= 1 only.
        return own.view(own.shape[0], *front.shape[1:]).movedim(0, dim).contiguous()

    def close(self) -> None:
        """Close every exchange; collective."""
        exchanges, self._exchanges = self._exchanges, {}
        for exchange in exchanges.values():
            exchange.close()

    def __enter__(self) -> VariableRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        exchanges, self._exchanges = self._exchanges, {}
        for exchange in exchanges.values():
            exchange.__exit__(kind, error, trace)

    def _plan(self, counts: Sequence[int]) -> TokenPlan:
        if len(counts) != self.layout.world_size:
            raise TensorError(f"sizes must name {self.layout.world_size} ranks, got {list(counts)}")
        return TokenPlan(tuple(counts), PaddingMode.SUM_LEN)

    def _exchange(self, rows: torch.Tensor) -> TokenExchange:
        key = (rows.shape[1], rows.dtype)
        if key not in self._exchanges:
            self._exchanges[key] = TokenExchange(
                self.layout,
                self.groups,
                device=self._device,
                hidden=rows.shape[1],
                dtype=rows.dtype,
                max_rows=self._max_rows,
                options=self._options,
            )
        return self._exchanges[key]


class All2AllManager:
    """``dispatch`` and ``combine`` as vLLM's MoE layers call them: a gather before the experts, a sum after them.

    ``sizes_of`` tells the rows of each rank in this forward; ``sequence_parallel`` serves the calls under sequence
    parallelism, by the sizes that ``sequence_sizes_of`` tells.
    """

    def __init__(
        self,
        rows: VariableRows,
        sizes_of: Callable[[], Sequence[int]],
        *,
        sequence_parallel: VariableRows | None = None,
        sequence_sizes_of: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        if (sequence_parallel is None) != (sequence_sizes_of is None):
            raise ConfigError("sequence_parallel and sequence_sizes_of come together, got one")
        self._rows, self._sizes_of = rows, sizes_of
        self._sequence_rows, self._sequence_sizes_of = sequence_parallel, sequence_sizes_of

    def dispatch_router_logits(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: Tensors | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, Tensors]:
        """Return both [G, width] of all ranks; with ``extra_tensors`` those too, as a list."""
        first, second, *others = self._gather([hidden_states, router_logits], extra_tensors, is_sequence_parallel)
        return (first, second) if extra_tensors is None else (first, second, others)

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: Tensors | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor, Tensors]:
        """Return all three [G, width] of all ranks; with ``extra_tensors`` those too, as a list."""
        own = [hidden_states, topk_weights, topk_ids]
        first, second, third, *others = self._gather(own, extra_tensors, is_sequence_parallel)
        return (first, second, third) if extra_tensors is None else (first, second, third, others)

    def combine(self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False) -> torch.Tensor:
        """Sum ``hidden_states`` [G, H] over all ranks; return this rank's rows."""
        rows, sizes = self._side(is_sequence_parallel)
        return rows.reduce_scatterv(hidden_states, dim=0, sizes=sizes)

    def destroy(self) -> None:
        """Close the exchanges of both sides; collective."""
        self._rows.close()
        if self._sequence_rows is not None:
            self._sequence_rows.close()

    def _gather(self, own: Tensors, extra: Tensors | None, is_sequence_parallel: bool) -> Tensors:
        rows, sizes = self._side(is_sequence_parallel)
        return rows.all_gatherv([*own, *(extra or [])], dim=0, sizes=sizes)

    def _side(self, is_sequence_parallel: bool) -> tuple[VariableRows, Sequence[int]]:
        if not is_sequence_parallel:
            return self._rows, self._sizes_of()
        if self._sequence_rows is None or self._sequence_sizes_of is None:
            raise ConfigError("a sequence-parallel call needs sequence_parallel at construction, got none")
        return self._sequence_rows, self._sequence_sizes_of()
