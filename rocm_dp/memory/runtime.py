"""Raw device memory and its handles through the HIP or CUDA runtime that torch has loaded.

torch's own sharing maps a tensor under the producer's device, where kernels of another GPU fault; so memory is
taken from the runtime itself and each handle is opened on the device that will use it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rocm_dp.errors import PeerRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

HANDLE_BYTES = 64  # hipIpcMemHandle_t and cudaIpcMemHandle_t
HANDLE_WORDS = HANDLE_BYTES // 8
_LAZY_PEER_ACCESS = 1  # hipIpcMemLazyEnablePeerAccess, cudaIpcMemLazyEnablePeerAccess
_UNCACHED = 3  # hipDeviceMallocUncached: flags that other GPUs write must not sit in this one's cache


class _Handle(ctypes.Structure):
    # Passed by value: the ABI of a struct of 64 bytes, whatever it holds.
    _fields_ = (("bytes", ctypes.c_byte * HANDLE_BYTES),)


class Runtime:
    """The seven calls that are needed of the runtime, by their HIP or CUDA names."""

    def __init__(self, library: Any, *, hip: bool) -> None:
        self._library, self._prefix, self._hip = library, "hip" if hip else "cuda", hip
        self._declare("GetErrorString", [ctypes.c_int], ctypes.c_char_p)
        self._declare("Malloc", [ctypes.c_void_p, ctypes.c_size_t])
        self._declare("Memset", [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t])
        self._declare("Free", [ctypes.c_void_p])
        self._declare("IpcGetMemHandle", [ctypes.c_void_p, ctypes.c_void_p])
        self._declare("IpcOpenMemHandle", [ctypes.c_void_p, _Handle, ctypes.c_uint])
        self._declare("IpcCloseMemHandle", [ctypes.c_void_p])
        if hip:
            self._declare("ExtMallocWithFlags", [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint])

    def allocate(self, nbytes: int, *, uncached: bool) -> int:
        """Return the address of ``nbytes`` zero bytes on the current device; ``uncached`` matters on HIP only."""
        address = ctypes.c_void_p()
        if uncached and self._hip:
            self._call("ExtMallocWithFlags", ctypes.byref(address), nbytes, _UNCACHED)
        else:
            self._call("Malloc", ctypes.byref(address), nbytes)
        assert address.value is not None
        try:
            self._call("Memset", address, 0, nbytes)
        except PeerRefusedError:
            self.free(address.value)
            raise
        return address.value

    def free(self, address: int) -> None:
        """Free what ``allocate`` returned; waits for the device."""
        self._call("Free", address)

    def handle(self, address: int) -> tuple[int, ...]:
        """Return the handle of an allocation as eight int64 words."""
        handle = _Handle()
        self._call("IpcGetMemHandle", ctypes.byref(handle), address)
        return tuple(
            int.from_bytes(bytes(handle)[at : at + 8], "little", signed=True) for at in range(0, HANDLE_BYTES, 8)
        )

    def open(self, words: Sequence[int]) -> int:
        """Map another process's allocation into the current device; return its address here."""
        data = b"".join(word.to_bytes(8, "little", signed=True) for word in words[:HANDLE_WORDS])
        address = ctypes.c_void_p()
        handle = _Handle.from_buffer_copy(data)
        self._call("IpcOpenMemHandle", ctypes.byref(address), handle, _LAZY_PEER_ACCESS)
        assert address.value is not None
        return address.value

    def close(self, address: int) -> None:
        """Unmap what ``open`` returned."""
        self._call("IpcCloseMemHandle", address)

    def _declare(self, name: str, arguments: list[Any], result: Any = ctypes.c_int) -> None:
        function = getattr(self._library, self._prefix + name)
        function.argtypes, function.restype = arguments, result

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, self._prefix + name)(*arguments)
        if code:
            text = getattr(self._library, f"{self._prefix}GetErrorString")(code)
            raise PeerRefusedError(f"{self._prefix}{name}: {text.decode(errors='replace')} ({code})")


def loaded_runtime() -> Runtime:
    """Return the runtime that torch has loaded: a second copy would know nothing of its devices."""
    hip = torch.version.hip is not None
    name = "libamdhip64" if hip else "libcudart"
    torch.cuda.init()  # type: ignore[no-untyped-call]
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(name):
            return Runtime(ctypes.CDLL(path), hip=hip)
    raise PeerRefusedError(f"torch has not loaded {name}: is it linked in statically?")


def as_tensor(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return uint8 [nbytes] over raw device memory, which it doesn't own."""

    class Raw:
        __cuda_array_interface__ = {  # noqa: RUF012 - the protocol's name and shape
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }

    return torch.as_tensor(Raw(), device=device)
