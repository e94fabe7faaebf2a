"""Launch a kernel past Triton's own look at every argument, for calls that are made thousands of times a second."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from rocm_dp.kernels.driver import launch_function

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from contextlib import AbstractContextManager

    from rocm_dp.kernels.driver import Arguments

_NOTHING = nullcontext()
_HIP = torch.version.hip is not None
_INT32 = 2**31
# What Triton is shown for a number decides its type; 16 stands for any, since none is specialised.
I32, I64 = 16, 2**40
_SMALL = 2**31 - 1  # bytes up to which Triton addresses a tensor with 32-bit offsets on AMD


class Launcher:
    """One kernel, with the forms of it that were launched.

    Triton compiles a kernel anew for pointers that are aligned or not, for integers of 32 or 64 bits, and on AMD
    for tensors of more than 2 GiB. The first launch of each form goes through Triton; the later ones find the
    compiled kernel by what tells the forms apart, and hand it bare addresses.

    The first ``moved`` arguments are tensors whose memory is moved in units of another dtype. Every integer
    argument of the kernel must be exempt from specialisation (``do_not_specialize``).
    """

    def __init__(self, kernel: Any, *, moved: int) -> None:
        self._kernel, self._moved = kernel, moved
        self._made: dict[Hashable, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        arguments: Sequence[Any],
        constants: dict[str, Any],
        *,
        unit: torch.dtype,
        warps: int,
    ) -> None:
        """Launch on the current stream of the first tensor's device; ``constants`` in the kernel's own order."""
        bare: list[Any] = []
        form: list[Any] = [unit, warps, arguments[0].device]
        for index, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor):
                address = argument.data_ptr()
                bare.append(address)
                form.append(address & 15 == 0)
                if index >= self._moved:
                    form.append(argument.dtype)
                if _HIP:
                    form.append(argument.untyped_storage().nbytes() <= _SMALL)
            else:
                bare.append(argument)
                form.append(argument is None or -_INT32 <= argument < _INT32)
        key = (*form, *constants.values())
        with on_device(arguments[0].device):
            made = self._made.get(key)
            if made is not None:
                made[grid](*bare, *constants.values())
                return
            units = [tensor.view(-1).view(unit) for tensor in arguments[: self._moved]]
            self._made[key] = self._kernel[grid](*units, *arguments[self._moved :], **constants, num_warps=warps)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current one, whose stream Triton launches on."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


class Prepared:
    """One compiled form of a kernel that takes integers, addresses among them, and nothing else.

    Made once, outside any capture: compiling and loading happen here. ``numbers``: I32 or I64 for each argument;
    ``threads`` of a block, as on any GPU.
    Interpreted (TRITON_INTERPRET=1), the kernel runs at once on memory of the CPU.
    """

    __slots__ = ("_constants", "_function", "_interpreted", "_launch", "_shared", "_size", "_threads")

    def __init__(
        self, kernel: Any, numbers: Sequence[int], constants: dict[str, Any], *, threads: int, interpreted: bool
    ) -> None:
        self._constants, self._size = tuple(constants.values()), len(numbers)
        self._interpreted = kernel if interpreted else None
        if self._interpreted is None:
            wave = 64 if _HIP else 32
            made = kernel.warmup(*numbers, **constants, grid=(1,), num_warps=threads // wave)
            made._init_handles()
            self._function, self._shared = made.function, made.metadata.shared
            self._threads, self._launch = threads, launch_function()

    def __call__(self, blocks: int, stream: int, arguments: Arguments) -> None:
        """Launch so many blocks on the raw ``stream`` of the current device; RuntimeError if the driver refuses."""
        if self._interpreted is not None:
            self._interpreted[(blocks,)](*arguments.values[: self._size], *self._constants)
            return
        threads, shared, address = self._threads, self._shared, arguments.address
        code = self._launch(self._function, blocks, 1, 1, threads, 1, 1, shared, stream, address, None)
        if code:
            raise RuntimeError(f"the driver refused to launch a kernel: error {code}")
