"""A call in flight: something to wait on that keeps alive what must stay alive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_dp.errors import StaleViewError

if TYPE_CHECKING:
    import torch

    from rocm_dp.comm_stream import SideStream
    from rocm_dp.memory.slots import Slot


class Pending:
    """The result of ``gather_async`` or ``combine_async``.

    Until ``wait`` its slot holds the inputs, so the caller may drop them at once (but not overwrite them).
    """

    __slots__ = ("_generation", "_side", "_slot", "_view")

    def __init__(self, side: SideStream, slot: Slot, view: torch.Tensor) -> None:
        self._side, self._slot, self._view = side, slot, view
        self._generation = slot.generation

    def wait(self) -> torch.Tensor:
        """Order the current stream after the call and return the result; the host does not wait.

        The view is valid until the next call on the same (verb, batch); waiting again returns it again. Raises
        StaleViewError once the buffer has been used again.
        """
        if self._slot.generation != self._generation:
            verb, batch = self._slot.key
            raise StaleViewError(f"the buffer of this {verb} (batch {batch}) has been used again since")
        if self._slot.inputs is not None:
            self._side.join(self._slot)
            self._slot.inputs = None
        return self._view
