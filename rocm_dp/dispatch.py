"""What every verb of an exchange needs: a route, a slot, a stream, and a named error when a rank is lost."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rocm_dp.calls import PeerCall
from rocm_dp.comm_stream import side_stream
from rocm_dp.control import Op
from rocm_dp.errors import ClosedError, ConfigError, PeerRefusedError, PeerTimeoutError
from rocm_dp.kernels.launch import on_device
from rocm_dp.memory.channels import Late
from rocm_dp.memory.events import wait_for
from rocm_dp.memory.slots import SlotPool
from rocm_dp.options import ExchangeStats
from rocm_dp.over_memory import copy_lanes, facts_here, open_memory
from rocm_dp.pending import Pending
from rocm_dp.plan import digest64
from rocm_dp.quick import quick_async_way, quick_way
from rocm_dp.router import Router
from rocm_dp.transports.collectives import CollectiveFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_dp.calls import Call
    from rocm_dp.comm_stream import SideStream
    from rocm_dp.graphs import GraphPlan
    from rocm_dp.groups import Groups
    from rocm_dp.options import Options
    from rocm_dp.plan import TokenPlan
    from rocm_dp.routing import Table

T = TypeVar("T")

_GRACE_S = 5.0  # what is merely under way when an error passes is done long before


class Dispatcher:
    """Owns the slots and channels of one exchange and runs its calls on the side stream of its groups.

    ``most``: rows of the global buffer and of one dp rank in it, at most (None: any). ``router``: what can be
    carried, and how; ``over_memory``: what makes launches over peer memory, where there is any.
    """

    def __init__(
        self,
        groups: Groups,
        options: Options,
        device: torch.device,
        most: tuple[int | None, int | None],
        table: Table,
    ) -> None:
        self._groups, self._options, self._device = groups, options, device
        self._side = _attach(groups, device, options)
        try:
            with on_device(device):
                lanes = copy_lanes(self._side, groups.layout.world_size)
                facts = facts_here(groups, device, lanes, table, options.peer_memory)
                self._channels, self.over_memory = open_memory(groups, device, lanes, facts, options, most)
        except BaseException:
            self._detach()
            raise
        self.router = Router(groups.layout.dp_size, device, *most, facts, table)
        self.slots = SlotPool(device, self._side.events, self._side.ordered)
        self._calls: Counter[str] = Counter()
        self._closed, self._told = "", False

    def check_open(self) -> None:
        """Raise ClosedError after ``close``, after a rank was lost, or when the groups were closed.

        Raises PeerTimeoutError, once, when a kernel has waited for a peer in vain.
        """
        if self._closed:
            raise ClosedError(self._closed)
        self._groups.check_open()
        if self._channels_late():
            raise self._timed_out()

    def check_plan(self, plan: TokenPlan | GraphPlan) -> None:
        """Raise ConfigError or CapacityError, the same on every rank, unless ``plan`` can be carried here."""
        self.check_open()
        self.router.check(plan)

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The stream that ``launch`` uses; None on the CPU."""
        return self._side.stream

    def confirm(
        self,
        op: Op,
        key: tuple[str, int],
        plan: TokenPlan | GraphPlan,
        transport: str,
        *,
        partial: bool,
        overlap: bool,
    ) -> None:
        """With ``confirm_calls``: raise RankMismatchError on every rank unless all make this very call."""
        verb, batch = key
        self.slots.check_free(verb, batch)
        if self._options.confirm_calls:
            # Beside computation the same transport may launch another grid.
            called = f"{verb}, async" if overlap else verb
            names = {"verb": digest64(called.encode()), "transport": digest64(transport.encode())}
            fields = {**names, "digest": plan.digest, "batch": batch, "partial": partial}
            shown = {"verb": called, "transport": transport, "digest": plan}
            self._groups.control.call_equal(op, fields, shown=shown)

    def note_capture(self) -> None:
        """Take it that from here on graphs are replayed between calls."""
        if self._channels is not None:
            self._channels.captured = True

    def quick(self, call: Call[T], *, overlap: bool) -> Callable[[torch.Tensor], Any] | None:
        """Return a short way to make ``call`` again, with ``overlap`` on the comm stream; None: there is none."""
        watched = self._options.confirm_calls or self._options.poison
        if watched or self._channels is None or not isinstance(call, PeerCall) or not call.fixed:
            return None
        # What makes records is noted, on the long way.
        if call.records and not overlap:
            return None
        way: Callable[..., Callable[[torch.Tensor], Any]] = quick_async_way if overlap else quick_way
        return way(call, side=self._side, groups=self._groups, channels=self._channels, count=self._calls)

    def run(self, call: Call[T], tensors: Sequence[torch.Tensor]) -> T:
        """Run ``call`` on the current stream, after every launch so far; return what it fills."""
        tensors, result = self._begin(call, tensors)

        def work(stream: int) -> None:
            call.run(tensors, stream)

        self._guarded(call.name, lambda: self._side.inline(work, raw=call.raw, records=call.records))
        return result

    def launch(self, call: Call[T], tensors: Sequence[torch.Tensor]) -> Pending[T]:
        """Run ``call`` on the comm stream; its inputs live until the Pending is waited for."""
        tensors, result = self._begin(call, tensors)
        slot = call.slot
        slot.inputs = tuple(tensors)

        def work(stream: int) -> None:
            call.run(tensors, stream)

        self._guarded(call.name, lambda: self._side.launch(slot, work, raw=call.raw, records=call.records))
        return Pending(self._side, slot, result)

    def run_group_verb(self, name: str, work: Callable[[], None]) -> None:
        """Run a collective of one group on the current stream, after every launch so far."""
        self.check_open()
        self._guarded(name, lambda: self._side.inline(lambda _: work(), raw=False))

    def drain(self) -> None:
        """Order the current stream after every call in flight, and make their Pendings stale."""
        for slot in self.slots.busy():
            self._side.join(slot)
            slot.inputs = None
            slot.generation += 1

    def give_up(self, error: BaseException) -> None:
        """Let no other rank wait for this one, and refuse further calls."""
        # First what they will read when they are let go.
        self._groups.control.gave_up(f"{type(error).__name__}: {error}")
        self._let_go()

    def _let_go(self) -> None:
        """Set the flags of every exchange on these groups, so that no peer waits for this rank any more."""
        if self.slots.capturing:
            # What is captured does not run: close() does it.
            return
        # The error that led here is the one to tell, not that of a device that is lost too.
        with suppress(Exception):
            for channels in self._groups.channels:
                self._side.inline(channels.give_up, raw=True)

    def close(self, *, wait: bool) -> None:
        """Give up every buffer and event once the device is done with them; a second call does nothing.

        ``wait`` False: after an error the device or the other ranks may never be done, so wait for moments only.
        Raises RankMismatchError or PeerTimeoutError when a rank is lost.
        """
        if self._closed:
            return
        self._closed = "this TokenExchange is closed"
        if self._groups.control.failure:
            self._let_go()
        try:
            # A kernel that has just begun to wait for a peer is done after as long again.
            self._side.finish(2 * self._options.timeout if wait else min(_GRACE_S, self._options.timeout))
        except TimeoutError as error:
            # The device may yet write the buffers: they live as long as the groups.
            self._groups.attached[self] = self
            if wait:
                raise self._groups.control.lost("close") from error
            return
        late = self._timed_out() if wait and self._channels_late() and not self._told else None
        self.drain()
        self.slots.close()
        try:
            if self._channels is not None:
                self._channels.close(collective=wait and not self._channels_late())
        finally:
            self._detach()
        if late is not None:
            raise late

    def _detach(self) -> None:
        self._side.users -= 1
        if not self._side.users:
            del self._groups.attached[self._device]
            self._side.close()

    def stats(self) -> ExchangeStats:
        """Count everything ever made."""
        peer = self._channels
        return ExchangeStats(
            slots=len(self.slots),
            buffers_made=self.slots.buffers_made + (peer.buffers_made if peer else 0),
            buffer_bytes=self.slots.nbytes + (peer.nbytes if peer else 0),
            growths=self.slots.growths + (peer.growths if peer else 0),
            events_made=self._side.events.made,
            events_held=self._side.events.held,
            streams_made=self._side.streams_made,
            records_in_flight=self._side.in_flight,
            pendings=len(self.slots.busy()),
            calls=tuple(sorted(self._calls.items())),
        )

    def _channels_late(self) -> bool:
        return self._channels is not None and self._channels.late

    def _begin(self, call: Call[T], tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], T]:
        tensors = call.checked(tensors)
        if not call.fixed:
            self.slots.check_not_capturing(*call.slot.key)
        call.slot.begin()
        if self._options.poison:
            self._poison(call)
        return tensors, call.result()

    def _poison(self, call: Call[T]) -> None:
        if not call.raw:
            call.poison()
        elif not self.slots.capturing:
            # No peer may write before all have poisoned.
            call.poison()
            if self._device.type == "cuda":
                wait_for(torch.cuda.current_stream(self._device), self._options.timeout)
            self._groups.control.call(Op.POISON, {})

    def _guarded(self, call: str, work: Callable[[], None]) -> None:
        try:
            work()
        except (CollectiveFailedError, TimeoutError, PeerRefusedError) as error:
            raise self._groups.control.lost(call) from error
        self._calls[call] += 1

    def _timed_out(self) -> PeerTimeoutError:
        """Close the groups to further calls; return the error of the first call that waited in vain."""
        assert self._channels is not None
        self._told = True
        late = self._channels.first_late() or Late(("a call", 0), 0, ())
        (verb, batch), epoch, missing = late
        lost = self._groups.control.lost(f"{verb} of batch {batch}")
        # The others need not wait for calls that this rank won't make either.
        self._let_go()
        ranks = ", ".join(map(str, missing)) or "some rank"
        call = f"{verb} of batch {batch} (epoch {epoch})"
        what = f"gave up, made another call, or did not come in {self._options.timeout:g} s"
        text = f"{call}: rank {ranks} {what}; {lost}"
        return PeerTimeoutError(text, verb=verb, batch=batch, epoch=epoch, missing=missing)


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
