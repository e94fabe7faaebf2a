"""Rows as fp8 on the wire: groups of 128 columns share a scale, so that half the bytes of bfloat16 travel."""

from __future__ import annotations

import torch

GROUP = 128
_DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(_DTYPE).max  # 448
_SMALLEST_SCALE = 1e-10 / _LARGEST


def packable(rows: torch.Tensor) -> bool:
    """Return whether ``rows`` [R, H] can travel so: bfloat16, H a multiple of 128."""
    return rows.dtype == torch.bfloat16 and rows.shape[1] % GROUP == 0


def packed(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp8 [R, H] and float32 scales [R, H / 128]: each group's largest magnitude becomes 448.

    Zero rows come back as zero.
    """
    groups = _grouped(rows.float())
    scales = (groups.abs().amax(-1) / _LARGEST).clamp_min(_SMALLEST_SCALE)
    return (groups / scales.unsqueeze(-1)).to(_DTYPE).flatten(1), scales


def unpack_into(out: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Write ``values * scales`` to ``out`` bfloat16 [R, H]."""
    out.copy_((_grouped(values.float()) * scales.unsqueeze(-1)).flatten(1))


def _grouped(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(rows.shape[0], rows.shape[1] // GROUP, GROUP)
