"""Every transport by its name in ``routing``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_dp.transports.aiter import Aiter
from rocm_dp.transports.all_gather import AllGather
from rocm_dp.transports.all_gather_v import AllGatherV
from rocm_dp.transports.all_reduce import AllReduce

if TYPE_CHECKING:
    import torch

    from rocm_dp.groups import Groups
    from rocm_dp.layout import RankLayout
    from rocm_dp.transports.base import Transport


def build(layout: RankLayout, groups: Groups, device: torch.device) -> dict[str, Transport]:
    """Return every transport over process groups, ready to use; local, no communication."""
    made: dict[str, Transport] = {
        "all_gather": AllGather(layout, groups),
        "all_gather_v": AllGatherV(layout, groups),
        "all_reduce": AllReduce(layout, groups),
    }
    communicator = groups.attached.get(("aiter", device))
    if communicator is not None:
        made["aiter"] = Aiter(layout, groups, communicator)
    return made
