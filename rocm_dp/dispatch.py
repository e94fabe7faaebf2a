"""What every verb of an exchange needs: a route, a slot, a stream, and a named error when a rank is lost."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rocm_dp import routing
from rocm_dp.comm_stream import side_stream
from rocm_dp.errors import CapacityError, ClosedError, ConfigError, RocmDpError
from rocm_dp.memory.slots import SlotPool
from rocm_dp.options import ExchangeStats
from rocm_dp.pending import Pending
from rocm_dp.transports import registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.control import Op
    from rocm_dp.groups import Groups
    from rocm_dp.memory.slots import Slot
    from rocm_dp.options import Options
    from rocm_dp.plan import TokenPlan
    from rocm_dp.transports.base import Transport

_ROUTES_KEPT = 256
_POISON = 0xFF  # NaN in every float dtype


class Dispatcher:
    """Owns the side stream, the slots and the events of one exchange; routes and runs its calls."""

    def __init__(self, groups: Groups, options: Options, device: torch.device, max_rows: int | None) -> None:
        self._groups, self._options, self._max_rows = groups, options, max_rows
        self._layout = groups.layout
        self._facts = routing.Facts(replicas=self._layout.replicas)
        self._table = routing.Table((options.transport,)) if options.transport else routing.Table()
        self._transports = registry.build(self._layout, groups)
        self._side = side_stream(device, max_events=options.max_events, max_in_flight=options.max_in_flight)
        self._slots = SlotPool(device, self._side.events)
        self._routes: dict[TokenPlan, str] = {}
        self._calls: Counter[str] = Counter()
        self._closed = False
        self._failure: str | None = None
        # gloo reports a lost rank as a plain RuntimeError.
        gloo = dist.get_backend(groups.world) == "gloo"
        self._lost_rank_errors: type[RuntimeError] = RuntimeError if gloo else dist.DistError

    def check_plan(self, plan: TokenPlan) -> None:
        """Raise ClosedError, ConfigError or CapacityError unless ``plan`` can be carried here; local."""
        if self._closed:
            raise ClosedError("this TokenExchange is closed")
        if self._failure:
            raise ClosedError(f"this TokenExchange can't be used after: {self._failure}")
        self._groups.check_open()
        if len(plan.counts) != self._layout.dp_size:
            raise ConfigError(
                f"the plan has counts for {len(plan.counts)} dp ranks, the layout has {self._layout.dp_size}"
            )
        if self._max_rows is not None and plan.rows > self._max_rows:
            raise CapacityError(f"the plan needs {plan.rows} rows, max_rows is {self._max_rows}")

    def explain(self, plan: TokenPlan) -> tuple[routing.TransportVerdict, ...]:
        """Return every transport's verdict on ``plan``."""
        return routing.choose(plan, self._facts, self._table)

    def route(self, verb: str, plan: TokenPlan) -> Transport:
        """Return the transport for ``plan``; raise TransportRefusedError with every reason when none can."""
        name = self._routes.get(plan)
        if name is None:
            name = routing.chosen_name(self.explain(plan))
            if len(self._routes) >= _ROUTES_KEPT:
                self._routes.clear()
            self._routes[plan] = name
        self._calls[f"{name}.{verb}"] += 1
        return self._transports[name]

    def slot(self, verb: str, batch: int, nbytes: int, *, reserve: int | None) -> Slot:
        """Return the slot of (verb, batch), poisoned when the options say so."""
        slot = self._slots.take(verb, batch, nbytes, reserve=reserve)
        if self._options.poison:
            slot.buffer.fill_(_POISON)
        return slot

    def confirm(self, op: Op, plan: TokenPlan, batch: int, *, partial: bool = False) -> None:
        """With ``confirm_calls``: raise RankMismatchError on every rank unless all make this very call."""
        if self._options.confirm_calls:
            self._groups.control.call_equal(
                op, {"digest": plan.digest, "batch": batch, "partial": partial}, shown={"digest": plan}
            )

    def run(self, verb: str, work: Callable[[], None]) -> None:
        """Run ``work`` on the current stream, after every launch so far."""
        self._guard(verb, lambda: self._side.inline(work))

    def launch(
        self, slot: Slot, view: torch.Tensor, work: Callable[[], None], inputs: tuple[torch.Tensor, ...]
    ) -> Pending:
        """Run ``work`` on the comm stream; ``inputs`` live until the Pending is waited for."""
        slot.inputs = inputs
        try:
            self._guard(slot.key[0], lambda: self._side.launch(slot, work))
        except BaseException:
            slot.inputs = None
            raise
        return Pending(self._side, slot, view)

    def drain(self) -> None:
        """Order the current stream after every call in flight, and make their Pendings stale."""
        for slot in self._slots.busy():
            self._side.join(slot)
            slot.inputs = None
            slot.generation += 1

    def close(self) -> None:
        """Drain, wait for the comm stream, give up every buffer and event. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self.drain()
            self._side.close()
            self._slots.close()

    def stats(self) -> ExchangeStats:
        """Count everything ever made."""
        return ExchangeStats(
            slots=len(self._slots),
            buffers_made=self._slots.buffers_made,
            buffer_bytes=self._slots.nbytes,
            growths=self._slots.growths,
            events_made=self._side.events.made,
            events_held=self._side.events.held,
            streams_made=self._side.streams_made,
            records_in_flight=self._side.in_flight,
            pendings=len(self._slots.busy()),
            calls=tuple(sorted(self._calls.items())),
        )

    def _guard(self, verb: str, work: Callable[[], None]) -> None:
        try:
            work()
        except self._lost_rank_errors as error:
            if isinstance(error, RocmDpError):
                raise
            lost = self._groups.control.lost(verb)
            self._failure = str(lost)
            raise lost from error
