"""Launch a compiled kernel through the HIP or CUDA driver, with arguments that lie ready in memory."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_HIP = torch.version.hip is not None
_SCRATCH = 4  # pointers that Triton adds behind a kernel's own arguments, all null here: it declares two at most


class Arguments:
    """Integers for a launch, and the pointers to them that the driver wants; written to at will.

    Each lies in 64 bits, of which an argument of 32 takes the lower half.
    """

    __slots__ = ("_pointers", "address", "values")

    def __init__(self, numbers: Sequence[int]) -> None:
        size = len(numbers) + _SCRATCH
        self.values = (ctypes.c_int64 * size)(*numbers)
        first = ctypes.addressof(self.values)
        self._pointers = (ctypes.c_void_p * size)(*(first + 8 * index for index in range(size)))
        self.address = ctypes.addressof(self._pointers)


def launch_function() -> Callable[..., int]:
    """Return ``hipModuleLaunchKernel`` or ``cuLaunchKernel``, whose parameters are the same.

    Function, three numbers of blocks, three of threads, bytes of shared memory, stream, address of the pointers to
    the arguments, null; the result is an error code, 0 for none.
    """
    name, library = ("hipModuleLaunchKernel", "libamdhip64") if _HIP else ("cuLaunchKernel", "libcuda")
    function = getattr(loaded_library(library), name)
    function.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]


def loaded_library(name: str) -> Any:
    """Return the library ``name``.so that is loaded already: a second copy would know nothing of torch's devices.

    Raises OSError when there is none.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith(f"{name}.so"):
            return ctypes.CDLL(path)
    raise OSError(f"{name} is not loaded: is it linked in statically?")
