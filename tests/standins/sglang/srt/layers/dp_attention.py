"""The names of SGLang's layer that an installation touches; each function says that SGLang's own ran."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

CALLED: list[str] = []
SIZES: list[Any] = []


class DpPaddingMode(IntEnum):
    MAX_LEN = 1
    SUM_LEN = 2

    def is_max_len(self) -> bool:
        return self is DpPaddingMode.MAX_LEN

    @classmethod
    def get_default_mode_in_cuda_graph(cls) -> DpPaddingMode:
        return cls.MAX_LEN


def initialize_dp_attention(server_args: Any, model_config: Any) -> None:
    CALLED.append("initialize_dp_attention")


def set_dp_buffer_len(*sizes: Any) -> None:
    SIZES[:] = sizes


def set_is_extend_in_batch(is_extend_in_batch: bool) -> None:
    CALLED.append("set_is_extend_in_batch")


def get_dp_hidden_size() -> int:
    return 8


def get_dp_dtype() -> torch.dtype:
    return torch.bfloat16


def get_dp_device() -> torch.device:
    return torch.device("cpu")


def dp_gather_partial(global_tokens: torch.Tensor, local_tokens: torch.Tensor, forward_batch: Any) -> None:
    CALLED.append("dp_gather_partial")


def dp_gather_replicate(global_tokens: torch.Tensor, local_tokens: torch.Tensor, forward_batch: Any) -> None:
    CALLED.append("dp_gather_replicate")


def dp_scatter(local_tokens: torch.Tensor, global_tokens: torch.Tensor, forward_batch: Any) -> None:
    CALLED.append("dp_scatter")


def dp_reduce_scatter_tensor(output: torch.Tensor, input: torch.Tensor) -> None:  # noqa: A002
    CALLED.append("dp_reduce_scatter_tensor")
