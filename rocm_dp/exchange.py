"""TokenExchange: the gather and the combine around a MoE layer. Shapes: L local rows, G global rows, H width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_dp.checks import check_rows, check_summed
from rocm_dp.control import Op
from rocm_dp.dispatch import Dispatcher
from rocm_dp.errors import CapacityError, ConfigError
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

    Call = tuple[Slot, torch.Tensor, Callable[[], None]]


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
    all before any communication; a rank that is lost raises RankMismatchError.
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
        if groups.layout != layout:
            raise ConfigError(f"the groups are those of {groups.layout}, the exchange's layout is {layout}")
        groups.check_open()
        self.layout, self.groups, self.options = layout, groups, options
        self.device = _with_index(torch.device(device))
        self.hidden, self.dtype, self.max_rows = hidden, dtype, max_rows
        self.max_local_rows = max_rows if max_local_rows is None else max_local_rows
        self._dispatch = Dispatcher(groups, options, self.device, max_rows)
        self._messages: dict[tuple[tuple[int, torch.dtype], ...], MessageLayout] = {}
        groups.control.call_equal(
            Op.EXCHANGE,
            {
                "hidden": hidden,
                "dtype": digest64(str(dtype).encode()),
                "max_rows": max_rows or 0,
                "max_local_rows": max_local_rows or 0,
                "options": digest64(repr(options).encode()),
            },
            shown={"dtype": dtype, "options": options},
        )

    def gather(
        self, local: torch.Tensor, plan: TokenPlan, *, partial: bool = False, batch: int = 0
    ) -> torch.Tensor:
        """Gather ``local`` [L, H] of every dp rank into the global buffer [G, H], on the current stream.

        ``partial``: the ranks of an attention-tp group hold addends of the rows, not copies of them.
        """
        _, view, work = self._gather_call(local, plan, partial=partial, batch=batch)
        self._run("gather", work)
        return view

    def gather_async(
        self, local: torch.Tensor, plan: TokenPlan, *, partial: bool = False, batch: int = 0
    ) -> Pending:
        """Like ``gather``, on the comm stream. Raises SlotBusyError while (gather, batch) is in flight."""
        slot, view, work = self._gather_call(local, plan, partial=partial, batch=batch)
        return self._dispatch.launch(slot, view, work, (local,))

    def combine(self, partial: torch.Tensor, plan: TokenPlan, *, batch: int = 0) -> torch.Tensor:
        """Sum ``partial`` [G, H] over all ranks; return this dp rank's rows [L, H], on the current stream."""
        _, view, work = self._combine_call(partial, plan, batch=batch)
        self._run("combine", work)
        return view

    def combine_async(self, partial: torch.Tensor, plan: TokenPlan, *, batch: int = 0) -> Pending:
        """Like ``combine``, on the comm stream. Raises SlotBusyError while (combine, batch) is in flight."""
        slot, view, work = self._combine_call(partial, plan, batch=batch)
        return self._dispatch.launch(slot, view, work, (partial,))

    def gather_many(
        self, tensors: Sequence[torch.Tensor], plan: TokenPlan, *, batch: int = 0
    ) -> list[torch.Tensor]:
        """Gather tensors [L, any width] of any dtypes in one message, e.g. hidden, ids, weights, scales.

        Returns a contiguous [G, width] tensor for each. The first call with new widths and dtypes is confirmed
        with all ranks.
        """
        self._dispatch.check_plan(plan)
        count = plan.counts[self.layout.dp_rank]
        for index, tensor in enumerate(tensors):
            check_rows(f"tensors[{index}]", tensor, count, width=None, dtype=None, device=self.device)
        message = self._message([(tensor.shape[1], tensor.dtype) for tensor in tensors])
        transport = self._dispatch.route("gather_many", plan)
        buffers = self._message_buffers(message, plan.rows, count, batch)
        packed, arrived, *views = (view for _, view in buffers)

        def work() -> None:
            message.pack(packed, tensors)
            transport.gather(arrived, packed, plan, partial=False)
            message.unpack(views, arrived)

        self._dispatch.confirm(Op.GATHER_MANY, plan, batch)
        self._run("gather_many", work)
        return views

    def scatter(self, full: torch.Tensor, plan: TokenPlan) -> torch.Tensor:
        """Return this dp rank's rows of ``full`` [G, any width] as a view [L, width]; no communication."""
        self._dispatch.check_plan(plan)
        check_rows("full", full, plan.rows, width=None, dtype=None, device=self.device)
        start = plan.starts[self.layout.dp_rank]
        return full[start : start + plan.counts[self.layout.dp_rank]]

    def reserve(self, *, batches: int = 1, many: Sequence[tuple[int, torch.dtype]] = ()) -> None:
        """Allocate now all that ``batches`` batches will need; collective when ``many`` is given.

        ``many``: the (width, dtype) of each tensor that gather_many will take. Raises ConfigError without
        ``max_rows``, whose sizes these are.
        """
        if self.max_rows is None or self.max_local_rows is None:
            raise ConfigError("reserve() needs max_rows at construction, got None")
        message = self._message(many) if many else None
        for batch in range(batches):
            self._buffer("gather", batch, 0, (self.hidden, self.dtype), self.max_rows)
            self._buffer("combine", batch, 0, (self.hidden, self.dtype), self.max_local_rows)
            if message:
                self._message_buffers(message, 0, 0, batch)

    def explain(self, plan: TokenPlan) -> list[TransportVerdict]:
        """Return, for each transport, whether it would carry this plan, and why or why not."""
        self._dispatch.check_plan(plan)
        return list(self._dispatch.explain(plan))

    def stats(self) -> ExchangeStats:
        """Return everything this exchange ever made; after warm-up only ``calls`` changes."""
        return self._dispatch.stats()

    def drain(self) -> None:
        """Order the current stream after every call in flight and make their Pendings stale; local.

        For the way out after an error between a call and its ``wait``: the exchange can be used again.
        """
        self._dispatch.drain()

    def close(self) -> None:
        """Wait for the comm stream and give up every buffer and event; local; a second call does nothing."""
        self._dispatch.close()

    def __enter__(self) -> TokenExchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _gather_call(self, local: torch.Tensor, plan: TokenPlan, *, partial: bool, batch: int) -> Call:
        self._dispatch.check_plan(plan)
        count = plan.counts[self.layout.dp_rank]
        check_rows("local", local, count, width=self.hidden, dtype=self.dtype, device=self.device)
        if partial:
            check_summed("gather(partial=True)", self.dtype)
        transport = self._dispatch.route("gather", plan)
        slot, out = self._buffer("gather", batch, plan.rows, (self.hidden, self.dtype), self.max_rows)
        self._dispatch.confirm(Op.GATHER, plan, batch, partial=partial)
        source = local.detach()
        return slot, out, lambda: transport.gather(out, source, plan, partial=partial)

    def _combine_call(self, partial: torch.Tensor, plan: TokenPlan, *, batch: int) -> Call:
        self._dispatch.check_plan(plan)
        check_rows("partial", partial, plan.rows, width=self.hidden, dtype=self.dtype, device=self.device)
        check_summed("combine", self.dtype)
        if self.max_local_rows is not None and max(plan.sizes) > self.max_local_rows:
            raise CapacityError(f"a dp rank needs {max(plan.sizes)} rows, max_local_rows is {self.max_local_rows}")
        transport = self._dispatch.route("combine", plan)
        rows, first = transport.combine_rows(plan)
        own = plan.counts[self.layout.dp_rank]
        whole = rows > plan.sizes[self.layout.dp_rank]  # the sum is made in a copy of the global buffer
        verb, most = ("combine.whole", self.max_rows) if whole else ("combine", self.max_local_rows)
        slot, out = self._buffer(verb, batch, rows, (self.hidden, self.dtype), most)
        self._dispatch.confirm(Op.COMBINE, plan, batch)
        source = partial.detach()
        return slot, out[first : first + own], lambda: transport.combine(out, source, plan)

    def _buffer(
        self, verb: str, batch: int, rows: int, field: tuple[int, torch.dtype], most: int | None
    ) -> tuple[Slot, torch.Tensor]:
        """Return the slot of (verb, batch) and its first ``rows`` rows; ``most`` rows are reserved."""
        width, dtype = field
        row_bytes = width * dtype.itemsize
        reserve = None if most is None else most * row_bytes
        slot = self._dispatch.slot(verb, batch, rows * row_bytes, reserve=reserve)
        return slot, slot.view(rows, width, dtype)

    def _message_buffers(
        self, message: MessageLayout, rows: int, local_rows: int, batch: int
    ) -> list[tuple[Slot, torch.Tensor]]:
        """Return the packed rows, the message as it arrives, and one output for each field."""
        whole = (message.row_bytes, torch.uint8)
        # Buffers of their own for each kind of message: a wider one would outgrow what was reserved.
        verb = f"gather_many.{message.name}"
        return [
            self._buffer(f"{verb}.pack", batch, local_rows, whole, self.max_local_rows),
            self._buffer(f"{verb}.message", batch, rows, whole, self.max_rows),
            *(
                self._buffer(f"{verb}.{index}", batch, rows, field, self.max_rows)
                for index, field in enumerate(message.fields)
            ),
        ]

    def _message(self, fields: Sequence[tuple[int, torch.dtype]]) -> MessageLayout:
        """Return the layout for ``fields``; a new one is confirmed with all ranks once."""
        key = tuple(fields)
        if key not in self._messages:
            message = MessageLayout(key)
            names = digest64(repr(key).encode())
            self.groups.control.call_equal(Op.SIGNATURE, {"fields": names}, shown={"fields": key})
            self._messages[key] = message
        return self._messages[key]

    def _run(self, verb: str, work: Callable[[], None]) -> None:
        self._dispatch.run(verb, work)


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
