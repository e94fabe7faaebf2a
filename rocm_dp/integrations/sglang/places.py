"""Where the rows of this rank lie in the global buffer of one call, from what its batch says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from rocm_dp.errors import TensorError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rocm_dp.layout import RankLayout

Scalar: TypeAlias = "torch.Tensor | int"


@dataclass(frozen=True, slots=True)
class Place:
    """The first row and the number of rows, ints or numbers on the device; whether every cp rank has its own."""

    start: Scalar
    count: Scalar
    every_cp: bool = False


def counts_of(batch: Any) -> tuple[int, ...] | None:
    """Return the rows of each dp rank as the host knows them, None when it doesn't.

    A ForwardBatch has ``global_num_tokens_cpu``; a LogitsMetadata has only those that need logits.
    """
    counts = getattr(batch, "global_num_tokens_cpu", None)
    if not hasattr(batch, "global_num_tokens_cpu"):
        counts = getattr(batch, "global_num_tokens_for_logprob_cpu", None)
    return None if counts is None else tuple(int(count) for count in counts)


def is_max_len(batch: Any) -> bool:
    """Return whether the batch is padded to MAX_LEN; one that doesn't say is packed."""
    return batch.dp_padding_mode is not None and batch.dp_padding_mode.is_max_len()


def blocks_of(layout: RankLayout, rows: int, local_rows: int) -> int:
    """Return how many blocks a MAX_LEN buffer has: one for each dp rank, or for each of its cp ranks."""
    for blocks in (layout.dp_size, layout.dp_size * layout.cp_size):
        if local_rows * blocks == rows:
            return blocks
    raise TensorError(
        f"MAX_LEN needs {layout.dp_size} equal blocks, got {local_rows} local rows and {rows} global rows"
    )


def packed_counts(
    counts: tuple[int, ...] | None, rows: int, layout: RankLayout, *, capturing: bool
) -> tuple[int, ...] | None:
    """Return the counts of packed rows; None when the host doesn't know them, or not for every replay.

    A captured step whose counts are equal is padded by the engine, and replays with the same.
    """
    if counts is None or (capturing and len(set(counts)) > 1):
        return None
    _check_dp_ranks(counts, layout)
    if sum(counts) > rows:
        raise TensorError(f"counts {counts} are {sum(counts)} rows, the global buffer has {rows}")
    return counts


def shard_place(counts: tuple[int, ...] | None, shards: Sequence[int], layout: RankLayout) -> Place:
    """Return where this cp rank's shard lies: shards are back to back at the begin of the dp rank's rows."""
    if counts is None:
        raise TensorError("cp_shard_counts needs the counts of the batch on the host, got none")
    _check_dp_ranks(counts, layout)
    if len(shards) != layout.cp_size:
        raise TensorError(f"cp_shard_counts must name {layout.cp_size} cp ranks, got {list(shards)}")
    before = sum(counts[: layout.dp_rank]) + sum(shards[: layout.cp_rank])
    return Place(before, shards[layout.cp_rank], every_cp=True)


def _check_dp_ranks(counts: tuple[int, ...], layout: RankLayout) -> None:
    if len(counts) != layout.dp_size:
        raise TensorError(f"a gather needs the counts of {layout.dp_size} dp ranks, the batch has {counts}")


def as_rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return contiguous ``tensor`` [R, ...] as a view [R, width]; TensorError for another."""
    if tensor.dim() < 1 or not tensor.is_contiguous():
        raise TensorError(
            f"{name} must be contiguous with rows in dimension 0, got {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}"
        )
    return tensor.view(tensor.shape[0], math.prod(tensor.shape[1:]))
