"""TokenExchange: the gather and the combine around a MoE layer. Shapes: L local rows, G global rows, H width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from rocm_dp.checks import check_summed, checked_rows
from rocm_dp.control import Op
from rocm_dp.dispatch import Dispatcher
from rocm_dp.errors import ConfigError
from rocm_dp.group_verbs import GroupVerbs
from rocm_dp.messages import MessageLayout
from rocm_dp.options import ExchangeStats, Options
from rocm_dp.plan import TokenPlan, digest64

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from rocm_dp.groups import Groups
    from rocm_dp.layout import RankLayout
    from rocm_dp.memory.slots import Slot
    from rocm_dp.pending import Pending
    from rocm_dp.routing import TransportVerdict

T = TypeVar("T")


class TokenExchange(GroupVerbs):
    """Gathers the rows of all ranks and combines expert outputs back to their owners.

    A context manager that owns its comm stream, slots and events, and borrows ``groups``. Constructing it is
    collective: everything but the layout's rank must be equal on all ranks, or RankMismatchError is raised on
    all. ``hidden`` H and ``dtype`` of the rows; ``device`` of all tensors; ``max_rows``: the most rows a global
    buffer will have, ``max_local_rows``: the most that one dp rank will have in it (None: max_rows). With
    ``max_rows`` each buffer is allocated exactly once; without, buffers grow, but never while a graph is
    captured.

    Every rank of a dp rank passes the same rows. Inputs are never written. A result is valid until the next
    call on the same (verb, batch); every row of it is written, padding rows with zeros. Wrong tensors raise
    TensorError (DtypeError for a sum of fp8 or integers), plans that don't fit ConfigError or CapacityError,
    all before any communication. A rank that is lost raises RankMismatchError within the groups' timeout on CPU
    ranks; on GPUs the host learns of it when it waits for the device (``close``, or ``Options.max_in_flight``).

    Exchanges on the same groups share one comm stream, so their calls must come in one order on every rank.
    """

    def __init__(
        self,
        layout: RankLayout,
        groups: Groups,
        *,
        device: torch.device | str,
        hidden: int,
        dtype: torch.dtype,
        max_rows: int | None = None,
        max_local_rows: int | None = None,
        options: Options = Options(),  # noqa: B008 - frozen
    ) -> None:
        for name, value in (("hidden", hidden), ("max_rows", max_rows), ("max_local_rows", max_local_rows)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be an int of at least 1, got {value!r}")
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"dtype must be a torch.dtype, got {dtype!r}")
        if groups.layout != layout:
            raise ConfigError(f"the groups are those of {groups.layout}, the exchange's layout is {layout}")
        groups.check_open()
        self.layout, self.groups, self.options = layout, groups, options
        self.device = _with_index(torch.device(device))
        self.hidden, self.dtype, self.max_rows = hidden, dtype, max_rows
        self.max_local_rows = max_rows if max_local_rows is None else max_local_rows
        groups.control.call_equal(
            Op.EXCHANGE,
            {
                "hidden": hidden,
                "dtype": digest64(str(dtype).encode()),
                "max_rows": max_rows or 0,
                "max_local_rows": max_local_rows or 0,
                "options": digest64(repr(options).encode()),
                "device": digest64(self.device.type.encode()),
            },
            shown={"dtype": dtype, "options": options, "device": self.device.type},
        )
        self._dispatch = Dispatcher(groups, options, self.device, max_rows, self.max_local_rows)
        self._messages: dict[tuple[tuple[int, torch.dtype], ...], MessageLayout] = {}
        self._row_bytes = hidden * dtype.itemsize
        # Forced, all_reduce sums in a copy of the global buffer; the others never need more than a dp rank's rows.
        self._combine_rows = max_rows if options.transport == "all_reduce" else self.max_local_rows

    def gather(
        self, local: torch.Tensor, plan: TokenPlan, *, partial: bool = False, batch: int = 0
    ) -> torch.Tensor:
        """Gather ``local`` [L, H] of every dp rank into the global buffer [G, H], on the current stream.

        ``partial``: the ranks of an attention-tp group hold addends of the rows, not copies of them.
        """
        call = self._gather_call(local, plan, partial=partial, batch=batch)
        self._run(call.name, call.work)
        return call.result

    def gather_async(
        self, local: torch.Tensor, plan: TokenPlan, *, partial: bool = False, batch: int = 0
    ) -> Pending[torch.Tensor]:
        """Like ``gather``, on the comm stream. Raises SlotBusyError while (gather, batch) is in flight."""
        call = self._gather_call(local, plan, partial=partial, batch=batch)
        return self._dispatch.launch(call.name, call.slot, call.work, (local,), call.result)

    def combine(self, partial: torch.Tensor, plan: TokenPlan, *, batch: int = 0) -> torch.Tensor:
        """Sum ``partial`` [G, H] over all ranks; return this dp rank's rows [L, H], on the current stream."""
        call = self._combine_call(partial, plan, batch=batch)
        self._run(call.name, call.work)
        return call.result

    def combine_async(self, partial: torch.Tensor, plan: TokenPlan, *, batch: int = 0) -> Pending[torch.Tensor]:
        """Like ``combine``, on the comm stream. Raises SlotBusyError while (combine, batch) is in flight."""
        call = self._combine_call(partial, plan, batch=batch)
        return self._dispatch.launch(call.name, call.slot, call.work, (partial,), call.result)

    def gather_many(
        self, tensors: Sequence[torch.Tensor], plan: TokenPlan, *, batch: int = 0
    ) -> list[torch.Tensor]:
        """Gather tensors [L, any width] of any dtypes in one message, e.g. hidden, ids, weights, scales.

        Returns a contiguous [G, width] tensor for each. The first call with new widths and dtypes is confirmed
        with all ranks, and has buffers of its own.
        """
        call = self._many_call(tensors, plan, batch=batch)
        self._run(call.name, call.work)
        return call.result

    def gather_many_async(
        self, tensors: Sequence[torch.Tensor], plan: TokenPlan, *, batch: int = 0
    ) -> Pending[list[torch.Tensor]]:
        """Like ``gather_many``, on the comm stream. Raises SlotBusyError while the same message is in flight."""
        call = self._many_call(tensors, plan, batch=batch)
        return self._dispatch.launch(call.name, call.slot, call.work, tuple(tensors), call.result)

    def scatter(self, full: torch.Tensor, plan: TokenPlan) -> torch.Tensor:
        """Return this dp rank's rows of ``full`` [G, any width] as a view [L, width]; no communication."""
        self._dispatch.check_plan(plan)
        full = checked_rows("full", full, plan.rows, device=self.device)
        start = plan.starts[self.layout.dp_rank]
        return full[start : start + plan.counts[self.layout.dp_rank]]

    def reserve(self, *, batches: int = 1, many: Sequence[tuple[int, torch.dtype]] = ()) -> None:
        """Allocate now all that ``batches`` batches will need; collective when ``many`` is given.

        ``many``: the (width, dtype) of each tensor that gather_many will take. Raises ConfigError without
        ``max_rows``, whose sizes these are.
        """
        if self.max_rows is None or self.max_local_rows is None:
            raise ConfigError("reserve() needs max_rows at construction, got None")
        if type(batches) is not int or batches < 1:
            raise ConfigError(f"batches must be an int of at least 1, got {batches!r}")
        message = self._message(many) if many else None
        combine_rows = self.max_local_rows if self._combine_rows is None else self._combine_rows
        for batch in range(batches):
            self._dispatch.reserve("gather", batch, self.max_rows * self._row_bytes)
            self._dispatch.reserve("combine", batch, combine_rows * self._row_bytes)
            if message:
                nbytes = message.nbytes(self.max_local_rows, self.max_rows)
                self._dispatch.reserve(_many(message), batch, nbytes)

    def explain(self, plan: TokenPlan) -> list[TransportVerdict]:
        """Return, for each transport, whether it would carry this plan, and why or why not."""
        self._dispatch.check_plan(plan)
        return list(self._dispatch.explain(plan))

    def stats(self) -> ExchangeStats:
        """Return everything this exchange ever made: see ExchangeStats."""
        return self._dispatch.stats()

    def drain(self) -> None:
        """Order the current stream after every call in flight and make their Pendings stale; local.

        For the way out after an error between a call and its ``wait``: the exchange can be used again.
        """
        self._dispatch.drain()

    def close(self) -> None:
        """Give up every buffer and event once the device is done with them; local; a second call does nothing.

        Raises RankMismatchError when it isn't done within ``Options.timeout``: a rank is lost.
        """
        self._dispatch.close(wait=True)

    def __enter__(self) -> TokenExchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the others may never come: don't wait for them, and let the error through.
        self._dispatch.close(wait=kind is None)

    def _gather_call(
        self, local: torch.Tensor, plan: TokenPlan, *, partial: bool, batch: int
    ) -> _Call[torch.Tensor]:
        self._dispatch.check_plan(plan)
        count = plan.counts[self.layout.dp_rank]
        local = checked_rows("local", local, count, width=self.hidden, dtype=self.dtype, device=self.device)
        if partial:
            check_summed("gather(partial=True)", self.dtype)
        name, transport = self._dispatch.route(plan)
        self._dispatch.confirm(Op.GATHER, "gather", plan, batch, partial=partial)
        slot = self._slot("gather", batch, plan.rows, self.max_rows, local)
        out = slot.view(plan.rows, self.hidden, self.dtype)
        return _Call(f"{name}.gather", slot, lambda: transport.gather(out, local, plan, partial=partial), out)

    def _combine_call(self, partial: torch.Tensor, plan: TokenPlan, *, batch: int) -> _Call[torch.Tensor]:
        self._dispatch.check_plan(plan)
        check_summed("combine", self.dtype)
        partial = checked_rows(
            "partial", partial, plan.rows, width=self.hidden, dtype=self.dtype, device=self.device
        )
        name, transport = self._dispatch.route(plan)
        self._dispatch.confirm(Op.COMBINE, "combine", plan, batch)
        rows, first = transport.combine_rows(plan)
        slot = self._slot("combine", batch, rows, self._combine_rows, partial)
        out = slot.view(rows, self.hidden, self.dtype)
        own = out[first : first + plan.counts[self.layout.dp_rank]]
        return _Call(f"{name}.combine", slot, lambda: transport.combine(out, partial, plan), own)

    def _many_call(
        self, tensors: Sequence[torch.Tensor], plan: TokenPlan, *, batch: int
    ) -> _Call[list[torch.Tensor]]:
        self._dispatch.check_plan(plan)
        count = plan.counts[self.layout.dp_rank]
        checked = [
            checked_rows(f"tensors[{index}]", tensor, count, device=self.device)
            for index, tensor in enumerate(tensors)
        ]
        message = self._message([(tensor.shape[1], tensor.dtype) for tensor in checked])
        name, transport = self._dispatch.route(plan)
        self._dispatch.confirm(Op.GATHER_MANY, _many(message), plan, batch)
        slot = self._message_slot(message, batch, count, plan.rows, *checked)
        packed, arrived, outs = message.carve(slot.buffer, count, plan.rows)

        def work() -> None:
            message.pack(packed, checked)
            transport.gather(arrived, packed, plan, partial=False)
            message.unpack(outs, arrived)

        return _Call(f"{name}.gather_many", slot, work, outs)

    def _slot(self, verb: str, batch: int, rows: int, most: int | None, *inputs: torch.Tensor) -> Slot:
        reserve = None if most is None else most * self._row_bytes
        return self._dispatch.slot(verb, batch, rows * self._row_bytes, reserve=reserve, inputs=inputs)

    def _message_slot(
        self, message: MessageLayout, batch: int, local_rows: int, rows: int, *inputs: torch.Tensor
    ) -> Slot:
        reserve = None
        if self.max_rows is not None and self.max_local_rows is not None:
            reserve = message.nbytes(self.max_local_rows, self.max_rows)
        nbytes = message.nbytes(local_rows, rows)
        return self._dispatch.slot(_many(message), batch, nbytes, reserve=reserve, inputs=inputs)

    def _message(self, fields: Sequence[tuple[int, torch.dtype]]) -> MessageLayout:
        """Return the layout for ``fields``; a new one is confirmed with all ranks once."""
        key = tuple(fields)
        if key not in self._messages:
            message = MessageLayout(key)
            names = digest64(message.name.encode())
            self.groups.control.call_equal(Op.SIGNATURE, {"fields": names}, shown={"fields": message.name})
            self._messages[key] = message
        return self._messages[key]

    def _run(self, verb: str, work: Callable[[], None]) -> None:
        self._dispatch.run(verb, work)


@dataclass(frozen=True, slots=True)
class _Call(Generic[T]):
    """A call that passed the door: what it is counted as, its slot, its work, and the view that it will fill."""

    name: str
    slot: Slot
    work: Callable[[], None]
    result: T


def _many(message: MessageLayout) -> str:
    return f"gather_many({message.name})"


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device if device.type == "cuda" else torch.device(device.type)
