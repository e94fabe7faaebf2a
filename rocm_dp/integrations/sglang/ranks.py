"""Where a rank stands and how a step is padded, as SGLang asks for both. Ints only."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from rocm_dp.errors import ConfigError
from rocm_dp.plan import PaddingMode, Phase, choose_padding

if TYPE_CHECKING:
    from collections.abc import Sequence


class DpPaddingMode(IntEnum):
    """PaddingMode, as SGLang compares it."""

    MAX_LEN = 1
    SUM_LEN = 2

    def is_max_len(self) -> bool:
        """Return whether every rank takes the room of the largest."""
        return self is DpPaddingMode.MAX_LEN

    def is_sum_len(self) -> bool:
        """Return whether the rows are packed."""
        return self is DpPaddingMode.SUM_LEN


def padding_of(counts: Sequence[int], *, dp_size: int, is_extend_in_batch: bool, hybrid_ssm: bool) -> DpPaddingMode:
    """Choose the padding of a step of ``dp_size`` ranks; see ``choose_padding``.

    A step that skipped the gather of counts brings its own alone; the others then count as idle.
    """
    if dp_size == 1:
        return DpPaddingMode.MAX_LEN
    chosen = choose_padding(
        [*counts, *[0] * (dp_size - len(counts))],
        phase=Phase.PREFILL if is_extend_in_batch else Phase.DECODE,
        hybrid_ssm=hybrid_ssm and min(counts) == 0,
    )
    return DpPaddingMode.MAX_LEN if chosen is PaddingMode.MAX_LEN else DpPaddingMode.SUM_LEN


def compute_dp_attention_world_info(
    enable_dp_attention: bool,
    tp_rank: int,
    tp_size: int,
    dp_size: int,
    attn_cp_size: int = 1,
) -> tuple[int, int, int, int]:
    """Return (attention tp rank, attention tp size, dp rank, dp size); ConfigError when the sizes don't divide.

    ``tp_rank`` is ``(dp_rank * attn_cp_size + cp_rank) * attention tp size + attention tp rank``.

    >>> compute_dp_attention_world_info(True, 5, 8, 2, 2)
    (1, 2, 1, 2)
    """
    dp = dp_size if enable_dp_attention else 1
    if tp_size % (dp * attn_cp_size):
        raise ConfigError(f"dp_size {dp} * attn_cp_size {attn_cp_size} must divide tp_size {tp_size}")
    attn_tp_size = tp_size // (dp * attn_cp_size)
    dp_rank = tp_rank // (attn_tp_size * attn_cp_size) if enable_dp_attention else 0
    return tp_rank % attn_tp_size, attn_tp_size, dp_rank, dp


def compute_dp_attention_local_info(
    enable_dp_attention: bool,
    tp_rank: int,
    tp_size: int,
    dp_size: int,
    moe_dense_tp_size: int | None,
) -> tuple[int, int, int]:
    """Return (attention tp rank, attention tp size, dp rank) within a dense-MLP group of ``moe_dense_tp_size``.

    >>> compute_dp_attention_local_info(True, 5, 8, 4, 4)
    (1, 2, 0)
    """
    if not enable_dp_attention:
        return tp_rank, tp_size, 0
    size = moe_dense_tp_size or tp_size
    rank, dp = tp_rank % size, local_dp_size(tp_size, dp_size, moe_dense_tp_size)
    attn_tp_size = size // dp
    return rank % attn_tp_size, attn_tp_size, rank // attn_tp_size


def local_dp_size(tp_size: int, dp_size: int, moe_dense_tp_size: int | None) -> int:
    """Return how many dp ranks share a dense-MLP tp group, at least one.

    >>> local_dp_size(8, 4, 4), local_dp_size(8, 2, 1)
    (2, 1)
    """
    return max(1, dp_size // (tp_size // (moe_dense_tp_size or tp_size)))
