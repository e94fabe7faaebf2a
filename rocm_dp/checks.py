"""Checks of tensors at the door: both sides in the message, before any communication."""

from __future__ import annotations

import torch

from rocm_dp.errors import DtypeError, TensorError

SUMMED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_rows(
    name: str,
    tensor: torch.Tensor,
    rows: int,
    *,
    width: int | None,
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    """Raise TensorError unless ``tensor`` is contiguous ``[rows, width]`` of ``dtype`` on ``device``.

    ``width`` or ``dtype`` None: any.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TensorError(f"{name} must be a tensor, got {type(tensor).__name__}")
    shape = f"[{rows}, {'*' if width is None else width}]"
    if tensor.dim() != 2 or tensor.shape[0] != rows or (width is not None and tensor.shape[1] != width):
        raise TensorError(f"{name} must be a contiguous {shape} tensor, got {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise TensorError(f"{name} must be a contiguous {shape} tensor, got strides {tensor.stride()}")
    if dtype is not None and tensor.dtype != dtype:
        raise TensorError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.device != device:
        raise TensorError(f"{name} must be on {device}, got {tensor.device}")


def check_summed(name: str, dtype: torch.dtype) -> None:
    """Raise DtypeError unless rows of ``dtype`` can be added: fp8 and integers are only moved."""
    if dtype not in SUMMED_DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in SUMMED_DTYPES)
        raise DtypeError(f"{name} adds rows and takes {names}, got {str(dtype).removeprefix('torch.')}")
