"""How each verb of an exchange becomes a call: over process groups into a slot, or over peer memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from rocm_dp.calls import GroupCall, PeerCall, Wanted
from rocm_dp.checks import SUMMED_DTYPES
from rocm_dp.graphs import GraphPlan
from rocm_dp.kernels.peer import MAX_FIELDS
from rocm_dp.plan import PaddingMode, TokenPlan
from rocm_dp.routing import OVER_MEMORY
from rocm_dp.transports import registry
from rocm_dp.transports.peer import PeerTransport
from rocm_dp.transports.places import rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_dp.calls import Call
    from rocm_dp.groups import Groups
    from rocm_dp.layout import RankLayout
    from rocm_dp.memory.slots import Slot, SlotPool
    from rocm_dp.messages import MessageLayout
    from rocm_dp.over_memory import OverMemory
    from rocm_dp.transports.copy_engine import CopyEngineTransport
    from rocm_dp.transports.launch import Launch

Plan: TypeAlias = "TokenPlan | GraphPlan"


class Shape(NamedTuple):
    """What the rows of an exchange are, and the most of them (None: any): in all, in one dp rank, in a combine."""

    hidden: int
    dtype: torch.dtype
    device: torch.device
    max_rows: int | None
    max_local_rows: int | None
    max_combine_rows: int | None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.hidden * self.dtype.itemsize


class CallMaker:
    """Makes the calls of one exchange; ``over_memory``: what makes them over peer memory, where there is any."""

    def __init__(
        self, layout: RankLayout, groups: Groups, shape: Shape, slots: SlotPool, over_memory: OverMemory
    ) -> None:
        self._layout, self.shape, self._slots, self._over_memory = layout, shape, slots, over_memory
        self._transports = registry.build(layout, groups, shape.device)

    def wanted_local(self, plan: Plan) -> Wanted:
        """Return what a gather takes."""
        shape = self.shape
        return Wanted("local", self.local_rows(plan), shape.hidden, shape.dtype, shape.device)

    def wanted_partial(self, plan: Plan) -> Wanted:
        """Return what a combine takes."""
        shape = self.shape
        return Wanted("partial", plan.rows, shape.hidden, shape.dtype, shape.device)

    def wanted_many(self, message: MessageLayout, plan: Plan) -> list[Wanted]:
        """Return what a gather_many takes."""
        rows, device = self.local_rows(plan), self.shape.device
        return [
            Wanted(f"tensors[{index}]", rows, width, dtype, device)
            for index, (width, dtype) in enumerate(message.fields)
        ]

    def local_rows(self, plan: Plan) -> int:
        """Return the rows of this dp rank's tensors."""
        return plan.per_rank_capacity if isinstance(plan, GraphPlan) else plan.counts[self._layout.dp_rank]

    def gather(
        self, name: str, plan: Plan, batch: int, *, partial: bool, overlap: bool = False
    ) -> Call[torch.Tensor]:
        """Return the gather of ``plan`` over transport ``name``; ``overlap``: to run beside computation."""
        key, wanted = ("gather", batch), [self.wanted_local(plan)]
        over_memory = self._over_memory.named(name, overlap=overlap)
        if over_memory is not None:
            return self._memory_gather(over_memory, name, key, plan, wanted, partial=partial)
        assert not isinstance(plan, GraphPlan)
        transport, host_plan = self._transports[name], plan
        slot = self._slot(key, plan.rows, self.shape.max_rows)
        out = self._view(slot, plan.rows)

        def work(tensors: Sequence[torch.Tensor], _: int) -> None:
            transport.gather(out, tensors[0], host_plan, partial=partial)

        return GroupCall(f"{name}.gather", slot, wanted, work, out, fixed=self._fixed)

    def combine_input(self, plan: Plan, batch: int) -> torch.Tensor:
        """Return the [G, H] of peer memory from which a pulled combine reads."""
        shape, peer = self.shape, self._over_memory.peer
        assert peer is not None
        return peer.input_of(("combine", batch), rows_of(plan), shape.hidden, shape.dtype)

    def combine(
        self, name: str, plan: Plan, batch: int, *, pulled: bool = False, overlap: bool = False
    ) -> Call[torch.Tensor]:
        """Return the combine of ``plan`` over transport ``name``.

        ``pulled``: of what lies in ``combine_input``; ``overlap``: to run beside computation.
        """
        key, wanted = ("combine", batch), [self.wanted_partial(plan)]
        local_rows, most = self.local_rows(plan), self.shape.max_combine_rows
        over_memory = self._over_memory.named(name, overlap=overlap)
        if over_memory is not None:
            slot = self._slot(key, local_rows, most)
            own = self._view(slot, local_rows)
            behind = local_rows if isinstance(plan, GraphPlan) else 0
            # Copies come from any memory: only kernels gain by addends that lie where all can read.
            make = over_memory.pull if pulled and isinstance(over_memory, PeerTransport) else over_memory.combine
            launch = make(key, rows_of(plan), own, out_rows=behind)
            return PeerCall(f"{name}.combine", slot, wanted, launch, _single(launch.results), fixed=self._fixed)
        assert not isinstance(plan, GraphPlan)
        transport, host_plan = self._transports[name], plan
        rows, first = transport.combine_rows(plan)
        slot = self._slot(key, rows, most)
        out = self._view(slot, rows)

        def work(tensors: Sequence[torch.Tensor], _: int) -> None:
            transport.combine(out, tensors[0], host_plan)

        own = out[first : first + local_rows]
        return GroupCall(f"{name}.combine", slot, wanted, work, own, fixed=self._fixed)

    def many(
        self, name: str, message: MessageLayout, plan: Plan, batch: int, *, overlap: bool = False
    ) -> Call[list[torch.Tensor]]:
        """Return the gather of the tensors of ``message``; ``overlap``: to run beside computation."""
        key, wanted = (message.verb, batch), self.wanted_many(message, plan)
        over_memory = self._over_memory.named(name, overlap=overlap)
        if over_memory is not None and len(message.fields) <= MAX_FIELDS:
            slot = self._slot(key, 0, self.shape.max_rows)
            gather = over_memory.gather(key, rows_of(plan), message.fields)
            return PeerCall(f"{name}.gather_many", slot, wanted, gather, gather.results, fixed=self._fixed)
        local_rows = self.local_rows(plan)
        slot = self._message_slot(message, batch, local_rows, plan.rows)
        packed, arrived, outs = message.carve(slot.buffer, local_rows, plan.rows)
        if over_memory is not None:
            bytes_ = [(message.row_bytes, torch.uint8)]
            launch = over_memory.gather(key, rows_of(plan), bytes_)

            def over_peers(tensors: Sequence[torch.Tensor], stream: int) -> None:
                message.pack(packed, tensors)
                [there] = launch.results[launch.next_slot]
                launch((packed.data_ptr(),), stream)
                message.unpack(outs, there)

            return GroupCall(
                f"{name}.gather_many", slot, wanted, over_peers, outs, fixed=self._fixed, launch=launch
            )
        assert not isinstance(plan, GraphPlan)
        transport, host_plan = self._transports[name], plan

        def work(tensors: Sequence[torch.Tensor], _: int) -> None:
            message.pack(packed, tensors)
            transport.gather(arrived, packed, host_plan, partial=False)
            message.unpack(outs, arrived)

        return GroupCall(f"{name}.gather_many", slot, wanted, work, outs, fixed=self._fixed)

    def reserve_groups(self, message: MessageLayout | None, batch: int) -> None:
        """Make the buffers that calls of ``batch`` over process groups will need."""
        shape = self.shape
        assert shape.max_rows is not None
        assert shape.max_local_rows is not None
        self._slot(("gather", batch), shape.max_rows, shape.max_rows)
        self._slot(("combine", batch), shape.max_combine_rows or 0, shape.max_combine_rows)
        if message:
            self._message_slot(message, batch, shape.max_local_rows, shape.max_rows)

    def reserve_peer(self, message: MessageLayout | None, batch: int, plans: Sequence[GraphPlan]) -> None:
        """Make the channels, and compile the kernels, that calls of ``batch`` over peer memory will need."""
        dp, local_rows = self._layout.dp_size, self.shape.max_local_rows or 0
        # With a plan of any rows every channel gets its full size; of few rows, a combine has another form.
        full = TokenPlan((local_rows, *[0] * (dp - 1)), PaddingMode.SUM_LEN)
        can_sum = self.shape.dtype in SUMMED_DTYPES
        if can_sum:
            self._slot(("combine", batch), local_rows, self.shape.max_combine_rows)
            if self._layout.tp_size > 1:
                self._slot(("gather", batch), local_rows, local_rows)
            one = TokenPlan((1, *[0] * (dp - 1)), PaddingMode.SUM_LEN)
            for name in self._names(one):
                self.combine(name, one, batch)
        if message and len(message.fields) > MAX_FIELDS:
            self._message_slot(message, batch, local_rows, full.rows)
        every: list[Plan] = [full, *plans]
        for plan in every:
            for name in self._names(plan):
                self.gather(name, plan, batch, partial=False)
                if can_sum:
                    self.gather(name, plan, batch, partial=True)
                    self.combine(name, plan, batch)
                if message:
                    self.many(name, message, plan, batch)

    @property
    def _fixed(self) -> bool:
        return self.shape.max_rows is not None

    def _names(self, plan: Plan) -> list[str]:
        """Return the transports over peer memory that can carry ``plan``."""
        able = OVER_MEMORY if isinstance(plan, TokenPlan) else OVER_MEMORY[:1]
        return [name for name in able if self._over_memory.named(name) is not None]

    def _memory_gather(
        self,
        over_memory: PeerTransport | CopyEngineTransport,
        name: str,
        key: tuple[str, int],
        plan: Plan,
        wanted: list[Wanted],
        *,
        partial: bool,
    ) -> Call[torch.Tensor]:
        shape, rows = self.shape, rows_of(plan)
        launch: Launch
        if partial and self._layout.tp_size > 1:
            local_rows = self.local_rows(plan)
            slot = self._slot(key, local_rows, shape.max_local_rows)
            launch = over_memory.gather_partial(key, rows, self._view(slot, local_rows))
        else:
            slot = self._slot(key, 0, shape.max_rows)
            launch = over_memory.gather(key, rows, [(shape.hidden, shape.dtype)])
        return PeerCall(f"{name}.gather", slot, wanted, launch, _single(launch.results), fixed=self._fixed)

    def _view(self, slot: Slot, rows: int) -> torch.Tensor:
        return slot.view(rows, self.shape.hidden, self.shape.dtype)

    def _slot(self, key: tuple[str, int], rows: int, most: int | None) -> Slot:
        row_bytes = self.shape.row_bytes
        return self._slots.take(*key, rows * row_bytes, reserve=None if most is None else most * row_bytes)

    def _message_slot(self, message: MessageLayout, batch: int, local_rows: int, rows: int) -> Slot:
        reserve, shape = None, self.shape
        if shape.max_rows is not None and shape.max_local_rows is not None:
            reserve = message.nbytes(shape.max_local_rows, shape.max_rows)
        return self._slots.take(message.verb, batch, message.nbytes(local_rows, rows), reserve=reserve)


def _single(results: tuple[list[torch.Tensor], list[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what calls on a single tensor fill, for each slot."""
    first, second = results
    return first[0], second[0]
