"""What SGLang asks of a step and of this rank's place: the state that its layer keeps in globals, in one object."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from rocm_dp.errors import ConfigError, TensorError
from rocm_dp.integrations.sglang.ranks import (
    DpPaddingMode,
    compute_dp_attention_local_info,
    local_dp_size,
    padding_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch.distributed as dist

    from rocm_dp.integrations.sglang.settings import Settings
    from rocm_dp.integrations.sglang.wide import LayerExchange
    from rocm_dp.layout import RankLayout
    from rocm_dp.plan import PaddingMode, TokenPlan


class StepState:
    """The sizes of the current step and the place of this rank. G global rows, L local rows, H width.

    Before the first step the buffers have no rows, padding is not MAX_LEN and nothing is known of the counts.
    """

    exchange: LayerExchange
    layout: RankLayout
    settings: Settings

    def __init__(
        self, *, enabled: bool, hidden: int, dtype: torch.dtype, device: torch.device, dense_tp_size: int | None
    ) -> None:
        self._enabled, self._dense_tp_size = enabled, dense_tp_size
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self._global_len = self._local_len = 0
        self._max_padding = self._is_extend = self._one_dp_rank = False
        self._counts: list[int] | None = None
        self._device_counts: torch.Tensor | None = None
        self._plans: dict[tuple[tuple[int, ...], PaddingMode], TokenPlan] = {}

    def set_dp_buffer_len(
        self,
        global_dp_buffer_len: int,
        local_dp_buffer_len: int,
        dp_max_padding: bool,
        global_num_tokens: list[int] | None = None,
        global_num_tokens_gpu: torch.Tensor | None = None,
    ) -> None:
        """Begin a step: G, L, whether it is padded to MAX_LEN, each dp rank's rows on host and device."""
        self._global_len, self._local_len = global_dp_buffer_len, local_dp_buffer_len
        self._max_padding, self._counts = dp_max_padding, global_num_tokens
        self._device_counts = global_num_tokens_gpu

    def set_dp_buffer_len_from_batch(self, forward_batch: Any) -> None:
        """Begin the step of a batch: its padded counts, or the plain ones of a batch to be captured."""
        counts = forward_batch.global_num_tokens_padded_cpu
        counts = forward_batch.global_num_tokens_cpu if counts is None else counts
        self.set_dp_buffer_len(
            forward_batch.global_dp_buffer_len,
            counts[self.dp_slot_in(counts)],
            forward_batch.dp_padding_mode.is_max_len(),
            counts,
            forward_batch.global_num_tokens_gpu,
        )

    def set_local_dp_buffer_len(self, local_dp_buffer_len: int) -> None:
        """Set L alone."""
        self._local_len = local_dp_buffer_len

    def get_global_dp_buffer_len(self) -> int:
        """Return G."""
        return self._global_len

    def get_local_dp_buffer_len(self) -> int:
        """Return L."""
        return self._local_len

    def get_global_dp_buffer(self, group: object = None) -> torch.Tensor:  # noqa: ARG002 - SGLang's signature
        """Return a new [G, H], not filled: a gather writes all of it."""
        return torch.empty(self._global_len, self._hidden, dtype=self._dtype, device=self._device)

    def get_local_dp_buffer(self, group: object = None, hidden_size: int | None = None) -> torch.Tensor:  # noqa: ARG002
        """Return a new [L, H], or [L, hidden_size], not filled: a scatter or a combine writes all of it."""
        return torch.empty(self._local_len, hidden_size or self._hidden, dtype=self._dtype, device=self._device)

    def get_dp_global_num_tokens(self) -> list[int] | None:
        """Return each dp rank's rows in the buffer, padding included; None when nobody said."""
        return self._counts

    def get_dp_hidden_size(self) -> int:
        """Return H."""
        return self._hidden

    def get_dp_dtype(self) -> torch.dtype:
        """Return the dtype of the rows."""
        return self._dtype

    def get_dp_device(self) -> torch.device:
        """Return the device of the rows."""
        return self._device

    def init_dp_gathered_buffer(self, model_config: Any) -> None:
        """Take H and the dtype of buffers from another model, as a draft model's; rows of any width are moved."""
        self._hidden, self._dtype = model_config.hidden_size, model_config.dtype

    def set_is_extend_in_batch(self, is_extend_in_batch: bool) -> None:
        """Say whether some rank prefills in this step."""
        self._is_extend = is_extend_in_batch

    def get_is_extend_in_batch(self) -> bool:
        """Return whether some rank prefills in this step."""
        return self._is_extend

    def is_dp_max_padding(self) -> bool:
        """Return whether the step is padded to MAX_LEN."""
        return self._max_padding

    def is_dp_attention_enabled(self) -> bool:
        """Return whether ranks own different rows."""
        return self._enabled

    def is_allocation_symmetric(self) -> bool:
        """Return whether buffers have one size on all ranks."""
        return not self._enabled or self._max_padding

    def is_dp_gatherv_active(self) -> bool:
        """Return whether SGLang may call its own collectives of varying size: SUM_LEN, one rank a dp rank."""
        alone = self.layout.replicas == 1
        return self.settings.gatherv and alone and not self._one_dp_rank and not self._max_padding

    def get_dp_padding_mode(self, is_extend_in_batch: bool, global_num_tokens: Sequence[int]) -> DpPaddingMode:
        """Choose the padding of a step from the counts of all dp ranks."""
        return padding_of(
            global_num_tokens,
            dp_size=self.get_attention_dp_size(),
            is_extend_in_batch=is_extend_in_batch,
            hybrid_ssm=self.settings.hybrid_ssm,
        )

    def get_default_mode_in_cuda_graph(
        self,
        global_num_tokens: Sequence[int] | None = None,  # noqa: ARG002 - SGLang's signature
    ) -> DpPaddingMode:
        """Return the padding of captured steps: MAX_LEN, SUM_LEN where ROCm needs it."""
        return DpPaddingMode.SUM_LEN if self.settings.sum_len_in_graphs.on else DpPaddingMode.MAX_LEN

    def get_attention_dp_rank(self) -> int:
        """Return which dp rank's rows this rank holds."""
        return self.layout.dp_rank

    def get_attention_dp_size(self) -> int:
        """Return the number of dp ranks; 1 inside ``disable_dp_size``."""
        return 1 if self._one_dp_rank else self.layout.dp_size

    def deployment_attn_dp_size(self) -> int:
        """Return the number of dp ranks, inside ``disable_dp_size`` too."""
        return self.layout.dp_size

    def dp_gather_width(self) -> int:
        """Return over how many dp ranks a gather goes."""
        return self.get_attention_dp_size()

    def dp_gather_slot(self) -> int:
        """Return this rank's place among those of a gather."""
        return self.layout.dp_rank

    def dp_slot_in(self, per_rank: Sequence[int] | torch.Tensor | None) -> int:
        """Return this rank's place in a sequence with an entry for each dp rank, or with its own alone."""
        if per_rank is None:
            raise TensorError(f"the rows of each of {self.layout.dp_size} dp ranks are needed, the batch has none")
        size = len(per_rank)
        if size not in (1, self.layout.dp_size):
            raise ConfigError(
                f"a sequence for each of {self.layout.dp_size} dp ranks is needed, got {size} entries"
            )
        return 0 if size == 1 else self.layout.dp_rank

    def get_local_attention_dp_rank(self) -> int:
        """Return the dp rank within the dense-MLP tp group."""
        at = self.layout
        return compute_dp_attention_local_info(
            self._enabled, at.rank, at.world_size, at.dp_size, self._dense_tp_size
        )[2]

    def get_local_attention_dp_size(self) -> int:
        """Return how many dp ranks share a dense-MLP tp group."""
        if not self._enabled:
            return 1
        return local_dp_size(self.layout.world_size, self.layout.dp_size, self._dense_tp_size)

    def get_attention_tp_group(self) -> dist.ProcessGroup:
        """Return the ranks that share this rank's dp and cp rank."""
        return self.exchange.groups.tp

    def get_attention_tp_rank(self) -> int:
        """Return the place in the attention-tp group."""
        return self.layout.tp_rank

    def get_attention_tp_size(self) -> int:
        """Return the size of the attention-tp group."""
        return self.layout.tp_size

    def get_attention_cp_group(self) -> dist.ProcessGroup:
        """Return the ranks that share this rank's dp and tp rank."""
        return self.exchange.groups.cp

    def get_attention_cp_rank(self) -> int:
        """Return the place in the attention-cp group."""
        return self.layout.cp_rank

    def get_attention_cp_size(self) -> int:
        """Return the size of the attention-cp group."""
        return self.layout.cp_size

    def get_dp_tp_group(self) -> dist.ProcessGroup:
        """Return the ranks that run one dp rank's batch: attention tp, or all ranks without data parallelism."""
        return self.exchange.groups.tp if self._enabled else self.exchange.groups.world

    @contextmanager
    def disable_dp_size(self) -> Iterator[None]:
        """Let the dp size be 1 inside, for draft workers; restored after an error too."""
        before, self._one_dp_rank = self._one_dp_rank, True
        try:
            yield
        finally:
            self._one_dp_rank = before
