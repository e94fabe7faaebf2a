"""What every verb of an exchange needs: a route, a slot, a stream, and a named error when a rank is lost."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from rocm_dp import routing
from rocm_dp.comm_stream import side_stream
from rocm_dp.errors import CapacityError, ClosedError, ConfigError, TensorError
from rocm_dp.memory.slots import SlotPool
from rocm_dp.options import ExchangeStats
from rocm_dp.pending import Pending
from rocm_dp.plan import digest64
from rocm_dp.transports import registry
from rocm_dp.transports.collectives import CollectiveFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from rocm_dp.comm_stream import SideStream
    from rocm_dp.control import Op
    from rocm_dp.groups import Groups
    from rocm_dp.memory.slots import Slot
    from rocm_dp.options import Options
    from rocm_dp.plan import TokenPlan
    from rocm_dp.transports.base import Transport

T = TypeVar("T")

_ROUTES_KEPT = 256
_GRACE_S = 5.0  # what is merely under way when an error passes is done long before
_POISON = 0xFF  # NaN in every float dtype


class Dispatcher:
    """Owns the slots of one exchange; routes and runs its calls on the side stream of its groups."""

    def __init__(
        self,
        groups: Groups,
        options: Options,
        device: torch.device,
        max_rows: int | None,
        max_local_rows: int | None,
    ) -> None:
        self._groups, self._options, self._device = groups, options, device
        self._max_rows, self._max_local_rows = max_rows, max_local_rows
        self._facts = routing.Facts(replicas=groups.layout.replicas)
        self._table = routing.Table((options.transport,)) if options.transport else routing.Table()
        self._transports = registry.build(groups.layout, groups)
        self._side = _attach(groups, device, options)
        self._slots = SlotPool(device, self._side.events)
        self._routes: dict[TokenPlan, str] = {}
        self._calls: Counter[str] = Counter()
        self._closed = False

    def check_open(self) -> None:
        """Raise ClosedError after ``close``, after a rank was lost, or when the groups were closed."""
        if self._closed:
            raise ClosedError("this TokenExchange is closed")
        self._groups.check_open()

    def check_plan(self, plan: TokenPlan) -> None:
        """Raise ConfigError or CapacityError, the same on every rank, unless ``plan`` can be carried here."""
        self.check_open()
        dp_size = self._groups.layout.dp_size
        if len(plan.counts) != dp_size:
            raise ConfigError(f"the plan has counts for {len(plan.counts)} dp ranks, the layout has {dp_size}")
        if self._max_rows is not None and plan.rows > self._max_rows:
            raise CapacityError(f"the plan needs {plan.rows} rows, max_rows is {self._max_rows}")
        if self._max_local_rows is not None and max(plan.sizes) > self._max_local_rows:
            raise CapacityError(f"a dp rank needs {max(plan.sizes)} rows, max_local_rows is {self._max_local_rows}")

    def explain(self, plan: TokenPlan) -> tuple[routing.TransportVerdict, ...]:
        """Return every transport's verdict on ``plan``."""
        return routing.choose(plan, self._facts, self._table)

    def route(self, plan: TokenPlan) -> tuple[str, Transport]:
        """Return the transport for ``plan``; raise TransportRefusedError with every reason when none can."""
        name = self._routes.get(plan)
        if name is None:
            name = routing.chosen_name(self.explain(plan))
            if len(self._routes) >= _ROUTES_KEPT:
                self._routes.clear()
            self._routes[plan] = name
        return name, self._transports[name]

    def confirm(self, op: Op, verb: str, plan: TokenPlan, batch: int, *, partial: bool = False) -> None:
        """With ``confirm_calls``: raise RankMismatchError on every rank unless all make this very call."""
        self._slots.check_free(verb, batch)
        if self._options.confirm_calls:
            fields = {"verb": digest64(verb.encode()), "digest": plan.digest, "batch": batch, "partial": partial}
            self._groups.control.call_equal(op, fields, shown={"verb": verb, "digest": plan})

    def slot(
        self, verb: str, batch: int, nbytes: int, *, reserve: int | None, inputs: Sequence[torch.Tensor] = ()
    ) -> Slot:
        """Return the slot of (verb, batch), poisoned when the options say so.

        Raises TensorError when one of ``inputs`` lies in it.
        """
        self.check_open()
        slot = self._slots.take(verb, batch, nbytes, reserve=reserve)
        if any(slot.holds(tensor) for tensor in inputs):
            raise TensorError(
                f"an input of {verb} is a view of the buffer that the call writes (batch {batch}): clone it first"
            )
        if self._options.poison:
            slot.buffer.fill_(_POISON)
        return slot

    def reserve(self, verb: str, batch: int, nbytes: int) -> None:
        """Make the slot of (verb, batch) with ``nbytes`` if it isn't there; results in it stay as they are."""
        self.check_open()
        self._slots.ensure(verb, batch, nbytes)

    def run(self, call: str, work: Callable[[], None]) -> None:
        """Run ``work`` on the current stream, after every launch so far."""
        self.check_open()
        self._guarded(call, lambda: self._side.inline(work))

    def launch(
        self, call: str, slot: Slot, work: Callable[[], None], inputs: tuple[torch.Tensor, ...], result: T
    ) -> Pending[T]:
        """Run ``work`` on the comm stream; ``inputs`` live until the Pending is waited for."""
        slot.inputs = inputs
        self._guarded(call, lambda: self._side.launch(slot, work))
        return Pending(self._side, slot, result)

    def drain(self) -> None:
        """Order the current stream after every call in flight, and make their Pendings stale."""
        for slot in self._slots.busy():
            self._side.join(slot)
            slot.inputs = None
            slot.generation += 1

    def close(self, *, wait: bool) -> None:
        """Give up every buffer and event once the device is done with them; a second call does nothing.

        ``wait`` False: after an error the device may never be done, so wait for moments only. Raises
        RankMismatchError when it isn't done within ``Options.timeout``.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self._side.finish(self._options.timeout if wait else min(_GRACE_S, self._options.timeout))
        except TimeoutError as error:
            # The device may yet write the buffers: they live as long as the groups.
            self._groups.attached[self] = self
            if wait:
                raise self._groups.control.lost("close") from error
            return
        self.drain()
        self._slots.close()
        self._side.users -= 1
        if not self._side.users:
            del self._groups.attached[self._device]
            self._side.close()

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

    def _guarded(self, call: str, work: Callable[[], None]) -> None:
        try:
            work()
        except (CollectiveFailedError, TimeoutError) as error:
            raise self._groups.control.lost(call) from error
        self._calls[call] += 1


def _stream_options(options: Options) -> dict[str, float]:
    names = ("max_events", "max_in_flight", "timeout")
    return {name: getattr(options, name) for name in names}


def _attach(groups: Groups, device: torch.device, options: Options) -> SideStream:
    """Return the side stream of ``groups``: one for all exchanges on them, since they share communicators."""
    if device not in groups.attached:
        groups.attached[device] = side_stream(device, options)
    side: SideStream = groups.attached[device]
    wanted, given = _stream_options(side.options), _stream_options(options)
    if wanted != given:
        raise ConfigError(f"exchanges on the same groups share a comm stream: it has {wanted}, got {given}")
    side.users += 1
    return side
