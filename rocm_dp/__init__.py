"""Variable-length gather and combine around MoE layers, for data-parallel attention on AMD GPUs.

All names but the errors are loaded on first use: ``import rocm_dp`` needs neither torch nor a GPU, and plans
and layouts never do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from rocm_dp.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    DtypeError,
    EventPoolExhausted,
    PeerRefusedError,
    PeerTimeoutError,
    RankFailedError,
    RankMismatchError,
    RocmDpError,
    SlotBusyError,
    StaleViewError,
    TensorError,
    TraceError,
    TransportRefusedError,
)
from rocm_dp.version import __version__

if TYPE_CHECKING:
    from rocm_dp.agreement import Agreement, StepRules, agree, confirm
    from rocm_dp.exchange import TokenExchange
    from rocm_dp.graphs import GraphPlan
    from rocm_dp.groups import Groups
    from rocm_dp.layout import RankLayout
    from rocm_dp.options import ExchangeStats, Options
    from rocm_dp.overlap import Half, Layer, interleave, overlapped_forward, serial_forward
    from rocm_dp.pending import Pending
    from rocm_dp.plan import PaddingMode, Phase, TokenPlan, choose_padding
    from rocm_dp.routing import OverlapVerdict, TransportVerdict

_HOMES = {
    "Agreement": "agreement",
    "ExchangeStats": "options",
    "GraphPlan": "graphs",
    "Groups": "groups",
    "Half": "overlap",
    "Layer": "overlap",
    "Options": "options",
    "OverlapVerdict": "routing",
    "PaddingMode": "plan",
    "Pending": "pending",
    "Phase": "plan",
    "RankLayout": "layout",
    "StepRules": "agreement",
    "TokenExchange": "exchange",
    "TokenPlan": "plan",
    "TransportVerdict": "routing",
    "agree": "agreement",
    "choose_padding": "plan",
    "confirm": "agreement",
    "interleave": "overlap",
    "overlapped_forward": "overlap",
    "serial_forward": "overlap",
}

__all__ = [
    "Agreement",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "DtypeError",
    "EventPoolExhausted",
    "ExchangeStats",
    "GraphPlan",
    "Groups",
    "Half",
    "Layer",
    "Options",
    "OverlapVerdict",
    "PaddingMode",
    "PeerRefusedError",
    "PeerTimeoutError",
    "Pending",
    "Phase",
    "RankFailedError",
    "RankLayout",
    "RankMismatchError",
    "RocmDpError",
    "SlotBusyError",
    "StaleViewError",
    "StepRules",
    "TensorError",
    "TokenExchange",
    "TokenPlan",
    "TraceError",
    "TransportRefusedError",
    "TransportVerdict",
    "__version__",
    "agree",
    "choose_padding",
    "confirm",
    "interleave",
    "overlapped_forward",
    "serial_forward",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rocm_dp' has no attribute {name!r}")
    try:
        return getattr(import_module(f"rocm_dp.{home}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"rocm_dp.{name} needs torch, which rocm_dp never installs by itself: use the image's own on ROCm, "
            "or pip install 'rocm-dp[cpu]'",
            name="torch",
        ) from error


def __dir__() -> list[str]:
    return __all__
