"""A call in flight: something to wait on that keeps alive what must stay alive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

from rocm_dp.errors import StaleViewError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.comm_stream import SideStream
    from rocm_dp.memory.slots import Slot

T = TypeVar("T")


def outside(verb: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call ``verb`` outside the region that torch.compile is about to compile."""
    # Not a decorator: that would import the compiler with every import of this.
    return cast("T", torch.compiler.disable(verb)(*args, **kwargs))  # type: ignore[no-untyped-call]


class Pending(Generic[T]):
    """What the async verbs return: a tensor to come (from ``gather_many_async`` a list of them).

    Until ``wait`` its slot holds the inputs, so the caller may drop them at once (but not overwrite them).
    """

    __slots__ = ("_generation", "_result", "_side", "_slot")

    def __init__(self, side: SideStream, slot: Slot, result: T) -> None:
        self._side, self._slot, self._result = side, slot, result
        self._generation = slot.generation

    def wait(self) -> T:
        """Order the current stream after the call and return the result; the host does not wait.

        The result is valid until the next call on the same (verb, batch); waiting again returns it again. Raises
        StaleViewError once the buffer was used again, drained or closed.
        """
        if torch.compiler.is_compiling():
            result: T = outside(Pending.wait, self)
            return result
        if self._slot.generation != self._generation:
            verb, batch = self._slot.key
            raise StaleViewError(
                f"the buffer of this {verb} (batch {batch}) was used again, drained or closed since"
            )
        self._side.join(self._slot)
        self._slot.inputs = None
        return self._result
