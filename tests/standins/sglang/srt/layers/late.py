"""A caller that is imported after an installation."""

from __future__ import annotations

from sglang.srt.layers.dp_attention import dp_scatter

__all__ = ["dp_scatter"]
