"""A caller that imported the layer's functions by name, as SGLang's own do."""

from __future__ import annotations

from typing import Any

import torch

from sglang.srt.layers.dp_attention import dp_gather_partial, dp_scatter
from sglang.srt.layers.dp_attention import dp_reduce_scatter_tensor as reduce_scatter


def experts_of(local: torch.Tensor, rows: int, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather, take each row times its own, and return the sum and what a scatter gives."""
    full = torch.full((rows, local.shape[1]), torch.nan, dtype=local.dtype)
    dp_gather_partial(full, local, batch)
    summed, own = torch.empty_like(local), torch.empty_like(local)
    reduce_scatter(summed, full)
    dp_scatter(own, full, batch)
    return summed, own
