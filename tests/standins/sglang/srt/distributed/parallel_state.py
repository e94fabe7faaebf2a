"""Groups as SGLang keeps them, made by the test."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import SimpleNamespace

GROUPS: dict[str, SimpleNamespace] = {}


def get_tp_group() -> SimpleNamespace:
    return GROUPS["tp"]


def get_attn_tp_group() -> SimpleNamespace:
    return GROUPS["attn_tp"]


def get_attn_cp_group() -> SimpleNamespace:
    return GROUPS["attn_cp"]


def get_moe_dp_group() -> SimpleNamespace:
    return GROUPS["moe_dp"]
