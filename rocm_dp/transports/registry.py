"""Every transport by its name in ``routing``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_dp.transports.all_gather import AllGather
from rocm_dp.transports.all_gather_v import AllGatherV
from rocm_dp.transports.all_reduce import AllReduce

if TYPE_CHECKING:
    from rocm_dp.groups import Groups
    from rocm_dp.layout import RankLayout
    from rocm_dp.transports.base import Transport


def build(layout: RankLayout, groups: Groups) -> dict[str, Transport]:
    """Return every transport that this library has, ready to use; local, no communication."""
    return {
        "all_gather": AllGather(layout, groups),
        "all_gather_v": AllGatherV(layout, groups),
        "all_reduce": AllReduce(layout, groups),
    }
