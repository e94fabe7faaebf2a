"""The calls of one exchange: each worked out once for its plan, batch and use, and kept for the next layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from rocm_dp.checks import check_summed, checked_rows
from rocm_dp.control import Op
from rocm_dp.errors import TransportRefusedError
from rocm_dp.messages import MessageLayout
from rocm_dp.plan import digest64
from rocm_dp.routing import Use

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_dp.calls import Call
    from rocm_dp.control import Control
    from rocm_dp.dispatch import Dispatcher
    from rocm_dp.making import CallMaker, Plan

T = TypeVar("T")
_KEPT = 256  # a step's plan is new, and serves every layer


class Asked(NamedTuple):
    """A call as it is confirmed with the other ranks, and whether it is to run beside computation."""

    op: Op
    verb: str
    plan: Plan
    batch: int
    partial: bool
    overlap: bool


class KeptCalls:
    """Finds or makes calls. ``quick``: those to be launched again with a look at nothing but the tensor.

    ``confirm``: look at every call as if it were new.
    """

    def __init__(self, dispatch: Dispatcher, maker: CallMaker, control: Control, *, confirm: bool) -> None:
        self._dispatch, self._maker, self._control, self._confirm = dispatch, maker, control, confirm
        self._calls: dict[tuple[object, ...], Call[Any]] = {}
        self.quick: dict[tuple[object, ...], Callable[[torch.Tensor], Any]] = {}
        self._messages: dict[tuple[tuple[int, torch.dtype], ...], MessageLayout] = {}
        self._inputs: dict[int, int] = {}  # where the combine_input of each batch begins

    def gather(
        self, local: torch.Tensor, plan: Plan, batch: int, *, partial: bool, overlap: bool = False
    ) -> Call[torch.Tensor]:
        """Return the gather of ``plan``; raise what is wrong with it or with ``local``."""

        def admit() -> None:
            self._maker.wanted_local(plan).check(local)
            if partial:
                check_summed("gather(partial=True)", self._maker.shape.dtype)

        def make(name: str) -> Call[torch.Tensor]:
            return self._maker.gather(name, plan, batch, partial=partial, overlap=overlap)

        return self._find(Asked(Op.GATHER, "gather", plan, batch, partial, overlap), "gather", admit, make)

    def combine(
        self, partial: torch.Tensor, plan: Plan, batch: int, *, overlap: bool = False
    ) -> Call[torch.Tensor]:
        """Return the combine of ``plan``; raise what is wrong with it or with ``partial``."""

        def admit() -> None:
            check_summed("combine", self._maker.shape.dtype)
            self._maker.wanted_partial(plan).check(partial)

        pulled = self.pulled(partial, batch)

        def make(name: str) -> Call[torch.Tensor]:
            return self._maker.combine(name, plan, batch, pulled=pulled, overlap=overlap)

        return self._find(Asked(Op.COMBINE, "combine", plan, batch, pulled, overlap), "combine", admit, make)

    def many(
        self, tensors: Sequence[torch.Tensor], plan: Plan, batch: int, *, overlap: bool = False
    ) -> Call[list[torch.Tensor]]:
        """Return the gather of all ``tensors``; raise what is wrong with it or with them."""
        self._dispatch.check_plan(plan)
        rows, device = self._maker.local_rows(plan), self._maker.shape.device
        for index, tensor in enumerate(tensors):
            checked_rows(f"tensors[{index}]", tensor, rows, device=device)
        message = self.message([(tensor.shape[1], tensor.dtype) for tensor in tensors])

        def make(name: str) -> Call[list[torch.Tensor]]:
            return self._maker.many(name, message, plan, batch, overlap=overlap)

        asked = Asked(Op.GATHER_MANY, message.verb, plan, batch, False, overlap)
        return self._find(asked, message, lambda: None, make)

    def combine_input(self, plan: Plan, batch: int) -> torch.Tensor:
        """Return the [G, H] of peer memory from which a combine of ``batch`` is pulled."""
        self._dispatch.check_plan(plan)
        check_summed("combine", self._maker.shape.dtype)
        name = self._dispatch.router.choose(plan)
        if name != "peer":
            raise TransportRefusedError(f"combine_input needs peer memory, {name} carries this plan")
        found = self._maker.combine_input(plan, batch)
        if torch.version.hip is None:
            self._inputs[batch] = found.data_ptr()
        return found

    def pulled(self, partial: torch.Tensor, batch: int) -> bool:
        """Whether ``partial`` is the combine_input of this batch."""
        if batch not in self._inputs or not isinstance(partial, torch.Tensor):
            return False
        return partial.numel() > 0 and partial.data_ptr() == self._inputs[batch]

    def message(self, fields: Sequence[tuple[int, torch.dtype]]) -> MessageLayout:
        """Return the layout for ``fields``; a new one is confirmed with all ranks once."""
        key = tuple(fields)
        if key not in self._messages:
            message = MessageLayout(key)
            names = digest64(message.name.encode())
            self._control.call_equal(Op.SIGNATURE, {"fields": names}, shown={"fields": message.name})
            self._messages[key] = message
        return self._messages[key]

    def forget(self) -> None:
        """Keep none of the calls."""
        self._calls.clear()
        self.quick.clear()

    def _find(
        self, asked: Asked, what: object, admit: Callable[[], None], make: Callable[[str], Call[T]]
    ) -> Call[T]:
        """Return the call of ``what`` made before, or make it; ``admit`` raises when its tensors don't fit."""
        self._dispatch.check_open()
        use = Use(overlap=asked.overlap, graph=self._dispatch.slots.capturing)
        key = (what, asked.plan, asked.batch, asked.partial, use)
        call = self._calls.get(key)
        if call is not None and not call.stale and not self._confirm:
            return call
        self._dispatch.check_plan(asked.plan)
        admit()
        if use.graph:
            self._dispatch.note_capture()
        name = self._dispatch.router.choose(asked.plan, use)
        slot = (asked.verb, asked.batch)
        self._dispatch.confirm(asked.op, slot, asked.plan, name, partial=asked.partial, overlap=asked.overlap)
        if call is None or call.stale:
            if len(self._calls) >= _KEPT:
                self.forget()
            call = self._calls[key] = make(name)
            # What was outgrown is not kept by calls that are of no use any more.
            for old in [old for old, made in self._calls.items() if made.stale]:
                del self._calls[old]
            quick = None if use.graph else self._dispatch.quick(call, overlap=use.overlap)
            if quick is not None:
                verb = f"{asked.verb}_async" if use.overlap else asked.verb
                self.quick[verb, asked.plan, asked.batch, asked.partial] = quick
        return call
