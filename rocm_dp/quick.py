"""The short way of a call that was made before: what can be settled once is bound, the rest is looked at in a line.

A host that issues a call in a few microseconds keeps ahead of a device that does it in as many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from rocm_dp.calls import PeerCall
    from rocm_dp.comm_stream import SideStream
    from rocm_dp.groups import Groups
    from rocm_dp.memory.channels import Channels

T = TypeVar("T")
_UNALIGNED = 15


def quick_way(
    call: PeerCall[T], *, side: SideStream, groups: Groups, channels: Channels, count: Counter[str]
) -> Callable[[torch.Tensor], T | None]:
    """Return a function that makes ``call``, whose memory can't move, on one tensor.

    It returns what is filled, or None, having done nothing, when anything is not as it mostly is: the long way will
    tell what.
    """
    slot, launch, results, name, control = call.slot, call.launch, call.results, call.name, groups.control
    wanted, late, settled = call.wanted[0], channels.late_word, side.settled
    shape, dtype, device = torch.Size((wanted.rows, wanted.width)), wanted.dtype, wanted.device
    ranges = (*launch.ranges, slot.range)
    is_tensor = torch.Tensor

    def quick(tensor: torch.Tensor) -> T | None:
        if (
            slot.inputs is not None
            or not isinstance(tensor, is_tensor)
            or tensor.shape != shape
            or tensor.dtype is not dtype
            or tensor.device != device
            or not tensor.is_contiguous()
            or tensor.is_neg()
            or tensor.is_conj()
            or late.value
            or control.failure
            or groups.closed
        ):
            return None
        address = tensor.data_ptr()
        stream = settled()
        if stream is None or address & _UNALIGNED:
            return None
        for low, high in ranges:
            if low <= address < high:
                return None
        slot.generation += 1
        result = results[launch.next_slot]
        launch.one(address, stream)
        count[name] += 1
        return result

    return quick
