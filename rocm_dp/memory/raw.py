"""Tensors over memory that torch did not allocate, handed over by DLPack.

Not by ``__cuda_array_interface__``: torch 2.11 keeps a reference to the shape and the address of every tensor that
it makes so (pytorch issue 194877), which is a leak for each buffer.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING

import torch
from torch.utils.dlpack import DLDeviceType, from_dlpack

if TYPE_CHECKING:
    from collections.abc import Callable

_HIP = torch.version.hip is not None
_UNSIGNED, _BITS = 1, 8  # kDLUInt
_NAME = b"dltensor"  # the capsule holds the address of this name


class _Lent(ctypes.Structure):
    """A DLManagedTensor of one dimension, with its shape behind it. Alive until torch gives it back."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),  # null: one behind the other
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),  # the object itself
        ("deleter", ctypes.c_void_p),
        ("size", ctypes.c_int64),
    )
    release: Callable[[], object] | None = None
    held = False

    def hold(self) -> None:
        """Keep it alive whoever else lets go of it."""
        self.held, self.context = True, id(self)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def let_go(self) -> None:
        """Undo ``hold``; a second call does nothing."""
        if self.held:
            self.held = False
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self))


def _give_back(address: int) -> None:
    lent = ctypes.cast(_Lent.from_address(address).context, ctypes.py_object).value
    lent.let_go()
    if lent.release is not None and not sys.is_finalizing():
        lent.release()


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_give_back)
# It lives for ever: a tensor may outlive this module.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_DELETER))
_DELETER_ADDRESS = ctypes.cast(_DELETER, ctypes.c_void_p).value
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes, _new_capsule.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object


def as_tensor(address: int, nbytes: int, device: torch.device, release: Callable[[], object]) -> torch.Tensor:
    """Return uint8 [nbytes] over memory at ``address`` of ``device``.

    ``release`` is called once, when the last view of it is gone, on whichever thread that happens; not when the
    process ends before, and not after an error.
    """
    lent = _Lent(address, _device_type(device), device.index or 0, 1, _UNSIGNED, _BITS, 1)
    at = ctypes.addressof(lent)
    lent.shape, lent.deleter, lent.size = at + _Lent.size.offset, _DELETER_ADDRESS, nbytes
    lent.hold()
    try:
        tensor = from_dlpack(_new_capsule(at, _NAME, None))
    except BaseException:
        lent.let_go()  # torch may have done so, or may not
        raise
    lent.release = release
    return tensor


def _device_type(device: torch.device) -> DLDeviceType:
    if device.type == "cpu":
        return DLDeviceType.kDLCPU
    return DLDeviceType.kDLROCM if _HIP else DLDeviceType.kDLCUDA
