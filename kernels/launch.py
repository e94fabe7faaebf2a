"""Launch a kernel past Triton's own look at every argument, for calls that are made thousands of times a second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

_INT32 = range(-(2**31), 2**31)
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
        form: list[Any] = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                address = argument.data_ptr()
                bare.append(address)
                form.append((argument.dtype, address % 16 == 0, _is_small(argument)))
            else:
                bare.append(argument)
                form.append(argument is None or argument in _INT32)
        for index in range(self._moved):
            form[index] = (unit, *form[index][1:])
        key = (arguments[0].device, *form, *constants.values(), warps)
        made = self._made.get(key)
        if made is not None:
            made[grid](*bare, *constants.values())
            return
        units = [tensor.view(-1).view(unit) for tensor in arguments[: self._moved]]
        self._made[key] = self._kernel[grid](*units, *arguments[self._moved :], **constants, num_warps=warps)


def _is_small(tensor: torch.Tensor) -> bool:
    return torch.version.hip is None or tensor.untyped_storage().nbytes() <= _SMALL
