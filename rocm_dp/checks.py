"""Checks of tensors at the door: both sides in the message, before any communication."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_dp.errors import DtypeError, TensorError

if TYPE_CHECKING:
    from collections.abc import Sequence

SUMMED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def checked_rows(
    name: str,
    tensor: torch.Tensor,
    rows: int | None,
    *,
    width: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device,
) -> torch.Tensor:
    """Return ``tensor``, detached, if it is contiguous ``[rows, width]`` of ``dtype`` on ``device``.

    ``rows``, ``width`` or ``dtype`` None: any. Raises TensorError with both sides otherwise.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TensorError(f"{name} must be a tensor, got {type(tensor).__name__}")
    shape = f"[{'*' if rows is None else rows}, {'*' if width is None else width}]"
    if tensor.dim() != 2 or rows not in (None, tensor.shape[0]) or width not in (None, tensor.shape[1]):
        raise TensorError(f"{name} must be a contiguous {shape} tensor, got {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise TensorError(f"{name} must be a contiguous {shape} tensor, got strides {tensor.stride()}")
    if dtype is not None and tensor.dtype != dtype:
        raise TensorError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.device != device:
        raise TensorError(f"{name} must be on {device}, got {tensor.device}")
    if tensor.data_ptr() % tensor.itemsize:
        raise TensorError(
            f"{name} must begin at a multiple of its {tensor.itemsize} bytes, got {tensor.data_ptr():#x}"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise TensorError(f"{name} must be in memory as it reads, got a lazy conjugate or negative")
    # A [1, 1] tensor is contiguous with any stride in its last dimension, and then has no byte view.
    found = tensor.detach()
    return found if found.stride(1) == 1 else found.as_strided(found.shape, (found.shape[1], 1))


def check_summed(name: str, dtype: torch.dtype, allowed: Sequence[torch.dtype] = SUMMED_DTYPES) -> None:
    """Raise DtypeError unless rows of ``dtype`` can be added: by the verbs, fp8 and integers are only moved."""
    if dtype not in allowed:
        names = ", ".join(str(d).removeprefix("torch.") for d in allowed)
        raise DtypeError(f"{name} adds rows and takes {names}, got {str(dtype).removeprefix('torch.')}")
