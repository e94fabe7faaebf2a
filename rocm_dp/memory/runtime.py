"""Raw device memory and its handles through the HIP or CUDA runtime that torch has loaded.

torch's own sharing maps a tensor under the producer's device, where kernels of another GPU fault; so memory is
taken from the runtime itself and each handle is opened on the device that will use it.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from rocm_dp.errors import PeerRefusedError
from rocm_dp.kernels.driver import loaded_library

if TYPE_CHECKING:
    from collections.abc import Sequence

HANDLE_BYTES = 64  # hipIpcMemHandle_t and cudaIpcMemHandle_t
HANDLE_WORDS = HANDLE_BYTES // 8
_LAZY_PEER_ACCESS = 1  # hipIpcMemLazyEnablePeerAccess, cudaIpcMemLazyEnablePeerAccess
# hipDeviceMallocFinegrained and hipDeviceMallocUncached: what other GPUs write while a kernel runs must be seen
# by it, and flags that it looks at must not even sit in its cache.
_FINE_GRAINED, _UNCACHED = 1, 3
_NATIVE_ATOMICS = {True: 2, False: 3}  # hipDevP2PAttrNativeAtomicSupported, cudaDevP2PAttrNativeAtomicSupported
_XGMI = 4  # HSA_AMD_LINK_INFO_TYPE_XGMI
_BUS_ID_CHARS = 32
# hipMemcpyDeviceToDeviceNoCU keeps off the compute units; cudaMemcpyDeviceToDevice does between two GPUs.
_DEVICE_TO_DEVICE, _NO_CU = 3, 1024


class _Handle(ctypes.Structure):
    # Passed by value: the ABI of a struct of 64 bytes, whatever it holds.
    _fields_ = (("bytes", ctypes.c_byte * HANDLE_BYTES),)


class Runtime:
    """The calls that are needed of the runtime, by their HIP or CUDA names."""

    def __init__(self, library: Any, *, hip: bool) -> None:
        self._library, self._prefix, self._hip = library, "hip" if hip else "cuda", hip
        self._copy_kind = _NO_CU if hip else _DEVICE_TO_DEVICE
        self._declare("GetErrorString", [ctypes.c_int], ctypes.c_char_p)
        self._declare("GetLastError", [])
        self._declare("Malloc", [ctypes.c_void_p, ctypes.c_size_t])
        self._declare("Memset", [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t])
        self._declare("Free", [ctypes.c_void_p])
        self._declare(
            "MemcpyAsync", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
        )
        self._declare("MemsetAsync", [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p])
        self._declare("EventRecord", [ctypes.c_void_p, ctypes.c_void_p])
        self._declare("StreamWaitEvent", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint])
        self._declare("IpcGetMemHandle", [ctypes.c_void_p, ctypes.c_void_p])
        self._declare("IpcOpenMemHandle", [ctypes.c_void_p, _Handle, ctypes.c_uint])
        self._declare("IpcCloseMemHandle", [ctypes.c_void_p])
        self._declare("DeviceGetPCIBusId", [ctypes.c_char_p, ctypes.c_int, ctypes.c_int])
        self._declare("DeviceGetByPCIBusId", [ctypes.c_void_p, ctypes.c_char_p])
        self._declare("DeviceCanAccessPeer", [ctypes.c_void_p, ctypes.c_int, ctypes.c_int])
        self._declare("DeviceGetP2PAttribute", [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int])
        if hip:
            self._declare("ExtMallocWithFlags", [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint])
            self._declare("ExtGetLinkTypeAndHopCount", [ctypes.c_int, ctypes.c_int, *[ctypes.c_void_p] * 2])

    def allocate(self, nbytes: int, *, uncached: bool) -> int:
        """Return the address of ``nbytes`` zero bytes on the current device; ``uncached`` matters on HIP only."""
        address = ctypes.c_void_p()
        if self._hip:
            flags = _UNCACHED if uncached else _FINE_GRAINED
            self._call("ExtMallocWithFlags", ctypes.byref(address), nbytes, flags)
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

    def copy(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy between device memory, of this GPU or of a peer, on the raw ``stream``."""
        self._call("MemcpyAsync", to, source, nbytes, self._copy_kind, stream)

    def zero(self, at: int, nbytes: int, stream: int) -> None:
        """Queue zeros for ``nbytes`` of device memory on the raw ``stream``."""
        self._call("MemsetAsync", at, 0, nbytes, stream)

    def record(self, event: int, stream: int) -> None:
        """Record a raw event on a raw stream."""
        self._call("EventRecord", event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Make a raw stream wait for a raw event."""
        self._call("StreamWaitEvent", stream, event, 0)

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

    def bus_id(self, device: int) -> str:
        """Return the PCI address of a device of this process, as domain:bus:device.function."""
        text = ctypes.create_string_buffer(_BUS_ID_CHARS)
        self._call("DeviceGetPCIBusId", text, _BUS_ID_CHARS, device)
        return text.value.decode().lower()

    def by_bus_id(self, bus_id: str) -> int | None:
        """Return this process's number for the device at a PCI address; None when it is not shown here."""
        device = ctypes.c_int()
        try:
            self._call("DeviceGetByPCIBusId", ctypes.byref(device), bus_id.encode())
        except PeerRefusedError:
            return None
        return device.value

    def link_refusal(self, device: int, peer: int) -> str:
        """Return why kernels on ``device`` can't write and signal to ``peer``; empty when they can."""
        answer, hops = ctypes.c_int(), ctypes.c_int()
        self._call("DeviceCanAccessPeer", ctypes.byref(answer), device, peer)
        if not answer.value:
            return "no peer access"
        if self._hip:
            self._call("ExtGetLinkTypeAndHopCount", device, peer, ctypes.byref(answer), ctypes.byref(hops))
            if answer.value != _XGMI:
                return f"the link is not xGMI (HSA link type {answer.value})"
        self._call("DeviceGetP2PAttribute", ctypes.byref(answer), _NATIVE_ATOMICS[self._hip], device, peer)
        return "" if answer.value else "no atomics over the link (PCIe?)"

    def _declare(self, name: str, arguments: list[Any], result: Any = ctypes.c_int) -> None:
        function = getattr(self._library, self._prefix + name)
        function.argtypes, function.restype = arguments, result

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, self._prefix + name)(*arguments)
        if code:
            # The runtime keeps the error, and torch would take it for one of its own next launch.
            getattr(self._library, f"{self._prefix}GetLastError")()
            text = getattr(self._library, f"{self._prefix}GetErrorString")(code)
            raise PeerRefusedError(f"{self._prefix}{name}: {text.decode(errors='replace')} ({code})")


def loaded_runtime() -> Runtime:
    """Return the runtime that torch has loaded: a second copy would know nothing of its devices."""
    hip = torch.version.hip is not None
    name = "libamdhip64" if hip else "libcudart"
    torch.cuda.init()  # type: ignore[no-untyped-call]
    try:
        return Runtime(loaded_library(name), hip=hip)
    except OSError as error:
        raise PeerRefusedError(str(error)) from error


def bus_address(device: torch.device) -> int:
    """Return the PCI address of ``device`` as a number, equal in every process of a machine."""
    bus_id = loaded_runtime().bus_id(device.index)
    return int(bus_id.replace(":", "").replace(".", ""), 16)


def link_refusal(device: torch.device, address: int) -> str:
    """Return why ``device`` can't work on memory of that at ``address``; empty when it can, or is hidden here."""
    runtime = loaded_runtime()
    digits = f"{address:09x}"
    peer = runtime.by_bus_id(f"{digits[:-5]}:{digits[-5:-3]}:{digits[-3:-1]}.{digits[-1]}")
    return "" if peer is None else runtime.link_refusal(device.index, peer)
