"""Launch a kernel past Triton's own look at every argument, for calls that are made thousands of times a second."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from contextlib import AbstractContextManager

_NOTHING = nullcontext()
_HIP = torch.version.hip is not None
_INT32 = 2**31
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
        with _on(arguments[0].device):
            made = self._made.get(key)
            if made is not None:
                made[grid](*bare, *constants.values())
                return
            units = [tensor.view(-1).view(unit) for tensor in arguments[: self._moved]]
            self._made[key] = self._kernel[grid](*units, *arguments[self._moved :], **constants, num_warps=warps)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` the current one, whose stream Triton launches on."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)
