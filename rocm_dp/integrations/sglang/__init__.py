"""SGLang's ``dp_attention`` layer over a TokenExchange, under its own names and signatures.

In a running SGLang: ``install()`` before a model is loaded, ``uninstall()`` to undo it. Without SGLang, as the
tests do: ``initialize(...)`` returns a DpAttention, whose methods are the layer's functions and which holds all
state; ``shutdown`` ends it.
"""

from __future__ import annotations

from rocm_dp.integrations.sglang.layer import DpAttention, initialize
from rocm_dp.integrations.sglang.patch import Installation, install, plugin, uninstall
from rocm_dp.integrations.sglang.ranks import (
    DpPaddingMode,
    compute_dp_attention_local_info,
    compute_dp_attention_world_info,
)
from rocm_dp.integrations.sglang.settings import Settings

__all__ = [
    "DpAttention",
    "DpPaddingMode",
    "Installation",
    "Settings",
    "compute_dp_attention_local_info",
    "compute_dp_attention_world_info",
    "initialize",
    "install",
    "plugin",
    "uninstall",
]
