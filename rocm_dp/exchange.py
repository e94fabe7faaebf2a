"""TokenExchange: the gather and the combine around a MoE layer. Shapes: L local rows, G global rows, H width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_dp.checks import checked_rows
from rocm_dp.control import Op
from rocm_dp.dispatch import Dispatcher
from rocm_dp.errors import ConfigError
from rocm_dp.graphs import GraphPlan
from rocm_dp.group_verbs import GroupVerbs
from rocm_dp.kept_calls import KeptCalls
from rocm_dp.making import CallMaker, Shape
from rocm_dp.options import ExchangeStats, Options
from rocm_dp.pending import outside
from rocm_dp.plan import digest64
from rocm_dp.routing import Table, Use
from rocm_dp.tuned import agreed_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from rocm_dp.groups import Groups
    from rocm_dp.layout import RankLayout
    from rocm_dp.measured import MeasuredTable
    from rocm_dp.pending import Pending
    from rocm_dp.plan import TokenPlan
    from rocm_dp.routing import OverlapVerdict, TransportVerdict


class TokenExchange(GroupVerbs):
    """Gathers the rows of all ranks and combines expert outputs back to their owners.

    A context manager that owns its comm stream, slots, events and peer memory, and borrows ``groups``. Constructing
    it is collective: everything but the layout's rank must be equal on all ranks, or RankMismatchError is raised on
    all. ``hidden`` H and ``dtype`` of the rows; ``device`` of all tensors; ``max_rows``: the most rows a global
    buffer will have, ``max_local_rows``: the most that one dp rank will have in it (None: max_rows). With
    ``max_rows`` each buffer is allocated exactly once; without, buffers grow, but never while a graph is
    captured.

    On one node peer memory carries the calls if it passes a self-test here, once for each ``groups``; ``explain``
    says so, or why not. Its memory is made and grown by all ranks at once.

    Every rank of a dp rank passes the same rows. Inputs are never written. A result is valid until the next call
    on the same (verb, batch); every row of it is written, padding rows with zeros. Wrong tensors raise
    TensorError (DtypeError for a sum of fp8 or integers), plans that don't fit ConfigError or CapacityError, all
    before any communication. A rank that is lost raises RankMismatchError within the groups' timeout on CPU
    ranks; on GPUs the host learns of it when it waits for the device (``close``, or ``Options.max_in_flight``).
    Over peer memory a kernel gives up after ``Options.timeout``, its result reads NaN where rows did not come,
    and the next call or ``close`` raises PeerTimeoutError.

    Exchanges on the same groups share one comm stream, so their calls must come in one order on every rank. Each is
    made by the same verb on all of them, ``gather`` or ``gather_async``. In code that torch.compile compiles, the
    verbs cut a region: new counts compile nothing anew.
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
        # Forced, all_reduce sums in a copy of the global buffer; the others never need more than a dp rank's rows.
        combine_rows = max_rows if options.transport == "all_reduce" else self.max_local_rows
        shape = Shape(hidden, dtype, self.device, max_rows, self.max_local_rows, combine_rows)
        table = Table((options.transport,)) if options.transport else Table(measured=self._measured())
        self._dispatch = Dispatcher(groups, options, self.device, (max_rows, self.max_local_rows), table)
        self._maker = CallMaker(layout, groups, shape, self._dispatch.slots, self._dispatch.over_memory)
        confirm = options.confirm_calls
        self._calls = KeptCalls(self._dispatch, self._maker, groups.control, confirm=confirm)

    def gather(
        self, local: torch.Tensor, plan: TokenPlan | GraphPlan, *, partial: bool = False, batch: int = 0
    ) -> torch.Tensor:
        """Gather ``local`` [L, H] of every dp rank into the global buffer [G, H], on the current stream.

        ``partial``: the ranks of an attention-tp group hold addends of the rows, not copies of them.
        """
        if torch.compiler.is_compiling():
            return outside(TokenExchange.gather, self, local, plan, partial=partial, batch=batch)
        quick = self._calls.quick.get(("gather", plan, batch, partial))
        if quick is not None:
            result: torch.Tensor | None = quick(local)
            if result is not None:
                return result
        return self._dispatch.run(self._calls.gather(local, plan, batch, partial=partial), (local,))

    def gather_async(
        self, local: torch.Tensor, plan: TokenPlan | GraphPlan, *, partial: bool = False, batch: int = 0
    ) -> Pending[torch.Tensor]:
        """Like ``gather``, on the comm stream, with few compute units; all ranks make this call, none the other.

        Raises SlotBusyError while (gather, batch) is in flight.
        """
        if torch.compiler.is_compiling():
            return outside(TokenExchange.gather_async, self, local, plan, partial=partial, batch=batch)
        quick = self._calls.quick.get(("gather_async", plan, batch, partial))
        if quick is not None:
            pending: Pending[torch.Tensor] | None = quick(local)
            if pending is not None:
                return pending
        call = self._calls.gather(local, plan, batch, partial=partial, overlap=True)
        return self._dispatch.launch(call, (local,))

    def combine(self, partial: torch.Tensor, plan: TokenPlan | GraphPlan, *, batch: int = 0) -> torch.Tensor:
        """Sum ``partial`` [G, H] over all ranks; return this dp rank's rows [L, H], on the current stream."""
        if torch.compiler.is_compiling():
            return outside(TokenExchange.combine, self, partial, plan, batch=batch)
        quick = self._calls.quick.get(("combine", plan, batch, self._calls.pulled(partial, batch)))
        if quick is not None:
            result: torch.Tensor | None = quick(partial)
            if result is not None:
                return result
        return self._dispatch.run(self._calls.combine(partial, plan, batch), (partial,))

    def combine_async(
        self, partial: torch.Tensor, plan: TokenPlan | GraphPlan, *, batch: int = 0
    ) -> Pending[torch.Tensor]:
        """Like ``combine``, on the comm stream, as ``gather_async``."""
        if torch.compiler.is_compiling():
            return outside(TokenExchange.combine_async, self, partial, plan, batch=batch)
        quick = self._calls.quick.get(("combine_async", plan, batch, self._calls.pulled(partial, batch)))
        if quick is not None:
            pending: Pending[torch.Tensor] | None = quick(partial)
            if pending is not None:
                return pending
        return self._dispatch.launch(self._calls.combine(partial, plan, batch, overlap=True), (partial,))

    def combine_input(self, plan: TokenPlan | GraphPlan, *, batch: int = 0) -> torch.Tensor:
        """Return a [G, H] buffer that all ranks can read, for experts to write their output to.

        ``combine`` of this very tensor needs no push: each owner reads its rows from all ranks and sums. All ranks
        pass theirs, or none does. It is this rank's to write until that call, and again behind it on its stream. On
        AMD, whose links are better written than read, combine pushes from it as from any other. Collective on the
        first use of a batch. Raises TransportRefusedError where ``plan`` does not go over peer memory.
        """
        return self._calls.combine_input(plan, batch)

    def gather_many(
        self, tensors: Sequence[torch.Tensor], plan: TokenPlan | GraphPlan, *, batch: int = 0
    ) -> list[torch.Tensor]:
        """Gather tensors [L, any width] of any dtypes in one message, e.g. hidden, ids, weights, scales.

        Returns a contiguous [G, width] tensor for each. The first call with new widths and dtypes is confirmed
        with all ranks, and has buffers of its own.
        """
        if torch.compiler.is_compiling():
            return outside(TokenExchange.gather_many, self, tensors, plan, batch=batch)
        return self._dispatch.run(self._calls.many(tensors, plan, batch), tensors)

    def gather_many_async(
        self, tensors: Sequence[torch.Tensor], plan: TokenPlan | GraphPlan, *, batch: int = 0
    ) -> Pending[list[torch.Tensor]]:
        """Like ``gather_many``, on the comm stream, as ``gather_async``."""
        if torch.compiler.is_compiling():
            return outside(TokenExchange.gather_many_async, self, tensors, plan, batch=batch)
        return self._dispatch.launch(self._calls.many(tensors, plan, batch, overlap=True), tensors)

    def scatter(self, full: torch.Tensor, plan: TokenPlan) -> torch.Tensor:
        """Return this dp rank's rows of ``full`` [G, any width] as a view [L, width]; no communication."""
        self._dispatch.check_plan(plan)
        if isinstance(plan, GraphPlan):
            raise ConfigError("scatter needs counts on the host, got a GraphPlan")
        full = checked_rows("full", full, plan.rows, device=self.device)
        start = plan.starts[self.layout.dp_rank]
        return full[start : start + plan.counts[self.layout.dp_rank]]

    def graph_plan(self, *, capacity: int, per_rank_capacity: int) -> GraphPlan:
        """Return a plan whose counts live on the device, for graphs that serve all counts within a capacity.

        Collective. ``capacity``: rows of the global buffer, ``per_rank_capacity``: rows of a local one.
        Raises ConfigError or CapacityError when they don't fit this exchange, TransportRefusedError when no
        transport here reads counts on the device.
        """
        dp_size, capacities = self.layout.dp_size, {"capacity": capacity, "per_rank_capacity": per_rank_capacity}
        # Judged first by one that needs no device.
        self._dispatch.router.choose(GraphPlan(dp_size, **capacities, device=torch.device("cpu")))
        self.groups.control.call_equal(Op.GRAPH_PLAN, capacities)
        plan = GraphPlan(dp_size, **capacities, device=self.device)
        self._dispatch.check_plan(plan)
        return plan

    def reserve(
        self,
        *,
        batches: int = 1,
        many: Sequence[tuple[int, torch.dtype]] = (),
        plans: Sequence[GraphPlan] = (),
    ) -> None:
        """Allocate and compile now all that ``batches`` batches will need; collective.

        ``many``: the (width, dtype) of each tensor that gather_many will take; ``plans``: what will be captured.
        Raises ConfigError without ``max_rows``, whose sizes these are.
        """
        if self.max_rows is None or self.max_local_rows is None:
            raise ConfigError("reserve() needs max_rows at construction, got None")
        if type(batches) is not int or batches < 1:
            raise ConfigError(f"batches must be an int of at least 1, got {batches!r}")
        self._dispatch.check_open()
        message = self._calls.message(many) if many else None
        for batch in range(batches):
            if not self._dispatch.router.always_peer:
                self._maker.reserve_groups(message, batch)
            if self._dispatch.over_memory.peer is not None:
                self._maker.reserve_peer(message, batch, plans)

    def explain(
        self, plan: TokenPlan | GraphPlan, *, overlap: bool = False, graph: bool = False
    ) -> list[TransportVerdict]:
        """Return, for each transport, whether it would carry this plan, and why or why not.

        ``overlap``: by the async verbs, beside computation; ``graph``: in a graph. There, where ROCm needs captured
        steps padded to SUM_LEN, the transports over torch.distributed say so, why, and what it costs.
        """
        self._dispatch.check_plan(plan)
        return self._dispatch.router.explain(plan, Use(overlap=overlap, graph=graph))

    def overlap_verdict(self, plan: TokenPlan | GraphPlan, *, graph: bool = False) -> OverlapVerdict:
        """Return whether a whole step of ``plan`` is faster as two halves that take turns, and why or why not.

        The same on every rank; to be asked when ``Agreement.overlap`` says that all can. ``graph``: in a graph.
        """
        self._dispatch.check_plan(plan)
        return self._dispatch.router.overlap_verdict(plan, graph=graph)

    @property
    def comm_stream(self) -> torch.cuda.Stream | None:
        """The stream that the async verbs run on, to record events on; None on the CPU, where calls run inline."""
        return self._dispatch.stream

    def stats(self) -> ExchangeStats:
        """Return everything this exchange ever made: see ExchangeStats."""
        return self._dispatch.stats()

    def drain(self) -> None:
        """Order the current stream after every call in flight and make their Pendings stale; local.

        For the way out after an error between a call and its ``wait``: the exchange can be used again.
        """
        self._dispatch.drain()

    def give_up(self, error: BaseException) -> None:
        """Tell the other ranks that this one comes to no call any more, and why; local, and for good.

        For the way out after an error that left calls unmade which the others make. Those of them that wait in peer
        memory are let go at once, and get a PeerTimeoutError that names this rank and its error; over process
        groups they wait for the groups' timeout. Here every further call raises ClosedError with the error.
        """
        self._calls.forget()
        self._dispatch.give_up(error)

    def close(self) -> None:
        """Give up every buffer and event once the device is done with them; a second call does nothing.

        Collective where peer memory was used: nobody's memory goes while another rank maps it. Raises
        RankMismatchError or PeerTimeoutError when it isn't done within ``Options.timeout``: a rank is lost.
        """
        self._calls.forget()
        self._dispatch.close(wait=True)

    def __enter__(self) -> TokenExchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.forget()
        # After an error the others may never come: don't wait for them, and let the error through.
        self._dispatch.close(wait=kind is None)

    def _measured(self) -> MeasuredTable:
        where = self.options.table
        return agreed_table(self.groups, where, device=self.device, hidden=self.hidden, dtype=self.dtype)

    def _run(self, verb: str, work: Callable[[], None]) -> None:
        self._dispatch.run_group_verb(verb, work)


def _with_index(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device if device.type == "cuda" else torch.device(device.type)
