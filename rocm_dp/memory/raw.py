"""Tensors over memory that torch did not allocate.

Not by ``__cuda_array_interface__``: torch 2.11 keeps the shape and the address of every tensor made so for ever
(pytorch issue 194877). And not by a DLPack deleter of our own: it would run Python while an error is on its way.
"""

from __future__ import annotations

import ctypes

import torch
from torch.utils.dlpack import DLDeviceType, from_dlpack

_HIP = torch.version.hip is not None
# One type for all sizes, since ctypes keeps a note of each.
_Memory = ctypes.c_uint8 * 2**48
# A prototype of our own: those of ctypes.pythonapi are everybody's.
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _Head(ctypes.Structure):
    """How a DLManagedTensor begins."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


def as_tensor(address: int, nbytes: int, device: torch.device) -> tuple[torch.Tensor, object]:
    """Return uint8 [nbytes] over memory at ``address`` of ``device``, and an owner that lives as long as any view.

    A GPU must have its index. Nothing touches the memory here.
    """
    owner = _Memory.from_address(address)
    capsule = torch.frombuffer(owner, dtype=torch.uint8, count=nbytes).__dlpack__()
    # torch gives the owner back as it would for the CPU, with the interpreter's lock; only where it lies is new.
    head = _Head.from_address(_pointer_of(capsule, b"dltensor"))
    head.device_type, head.device_id = _device_type(device), _device_id(device)
    return from_dlpack(capsule), owner


def _device_type(device: torch.device) -> DLDeviceType:
    if device.type == "cpu":
        return DLDeviceType.kDLCPU
    return DLDeviceType.kDLROCM if _HIP else DLDeviceType.kDLCUDA


def _device_id(device: torch.device) -> int:
    assert device.type == "cpu" or device.index is not None, "which GPU?"
    return device.index or 0
