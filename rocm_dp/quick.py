"""The short way of a call that was made before: what can be settled once is bound, the rest is looked at in a line.

A host that issues a call in a few microseconds keeps ahead of a device that does it in as many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rocm_dp.errors import PeerRefusedError
from rocm_dp.pending import Pending

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from rocm_dp.calls import PeerCall
    from rocm_dp.comm_stream import SideStream
    from rocm_dp.groups import Groups
    from rocm_dp.memory.channels import Channels

T = TypeVar("T")
_UNALIGNED = 15
_UNUSUAL = -1


def quick_way(
    call: PeerCall[T], *, side: SideStream, groups: Groups, channels: Channels, count: Counter[str]
) -> Callable[[torch.Tensor], T | None]:
    """Return a function that makes ``call``, whose memory can't move, on one tensor and the caller's stream.

    It returns what is filled, or None, having done nothing, when anything is not as it mostly is: the long way will
    tell what.
    """
    slot, launch, results, name = call.slot, call.launch, call.results, call.name
    look, settled = _look(call, groups, channels), side.settled

    def quick(tensor: torch.Tensor) -> T | None:
        address = look(tensor)
        stream = settled() if address >= 0 else None
        if stream is None:
            return None
        slot.generation += 1
        result = results[launch.next_slot]
        launch.one(address, stream)
        count[name] += 1
        return result

    return quick


def quick_async_way(
    call: PeerCall[T], *, side: SideStream, groups: Groups, channels: Channels, count: Counter[str]
) -> Callable[[torch.Tensor], Pending[T] | None]:
    """Like ``quick_way``, on the comm stream."""
    slot, launch, results, name, control = call.slot, call.launch, call.results, call.name, groups.control
    look, one, records = _look(call, groups, channels), call.launch.one, call.launch.records
    capturing = side.capturing

    def quick(tensor: torch.Tensor) -> Pending[T] | None:
        address = look(tensor)
        # A graph may go by another transport.
        if address < 0 or capturing():
            return None
        slot.generation += 1
        slot.inputs = (tensor,)
        result = results[launch.next_slot]
        try:
            side.launch(slot, lambda stream: one(address, stream), raw=True, records=records)
        except (TimeoutError, PeerRefusedError) as error:
            raise control.lost(name) from error
        count[name] += 1
        return Pending(side, slot, result)

    return quick


def _look(call: PeerCall[Any], groups: Groups, channels: Channels) -> Callable[[torch.Tensor], int]:
    """Return a function that returns a tensor's address if all is as it mostly is, else -1."""
    slot, control, wanted, late = call.slot, groups.control, call.wanted[0], channels.late_word
    shape, dtype, device = torch.Size((wanted.rows, wanted.width)), wanted.dtype, wanted.device
    ranges = (*call.launch.ranges, slot.range)
    is_tensor = torch.Tensor

    def look(tensor: torch.Tensor) -> int:
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
            return _UNUSUAL
        address = tensor.data_ptr()
        if address & _UNALIGNED:
            return _UNUSUAL
        for low, high in ranges:
            if low <= address < high:
                return _UNUSUAL
        return address

    return look
