"""Slots: one buffer and two events for each (verb, batch), made once and used for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_dp.errors import CapacityError, SlotBusyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.memory.events import Event, EventPool

_GROWTH = 1.5  # so that slowly rising counts grow a buffer a few times, not at every new maximum


class Slot:
    """The buffer of one (verb, batch), and the events that order its use on the comm stream."""

    __slots__ = ("buffer", "done", "generation", "inputs", "key", "ready")

    def __init__(self, key: tuple[str, int], buffer: torch.Tensor, ready: Event, done: Event) -> None:
        self.key, self.buffer, self.ready, self.done = key, buffer, ready, done
        self.generation = 0
        # The tensors that the comm stream still reads; not None while a Pending is outstanding.
        self.inputs: tuple[torch.Tensor, ...] | None = None

    def begin(self) -> None:
        """Begin the next use, which makes Pendings of the last one stale; SlotBusyError while it is outstanding."""
        self.check_free()
        self.generation += 1

    def check_free(self) -> None:
        """Raise SlotBusyError while the last use is outstanding."""
        if self.inputs is not None:
            verb, batch = self.key
            raise SlotBusyError(
                f"{verb} of batch {batch} is still in flight: wait() for its Pending before the next call"
            )

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in the buffer, so that the next use would overwrite it."""
        low, high = self.range
        return tensor.numel() > 0 and low <= tensor.data_ptr() < high

    @property
    def range(self) -> tuple[int, int]:
        """Where the buffer begins and ends."""
        begin = self.buffer.data_ptr()
        return begin, begin + self.buffer.numel()

    def view(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first ``rows`` rows of ``width`` elements as a contiguous tensor over the buffer."""
        return self.buffer[: rows * width * dtype.itemsize].view(dtype).view(rows, width)


class SlotPool:
    """Makes slots on first use and grows them when allowed; nothing is allocated after warm-up.

    ``ordered``: returns the caller's stream, ordered after every call so far (None on the CPU).
    """

    def __init__(
        self, device: torch.device, events: EventPool, ordered: Callable[[], torch.cuda.Stream | None]
    ) -> None:
        self._device, self._events, self._ordered = device, events, ordered
        self._slots: dict[tuple[str, int], Slot] = {}
        # One event for all outgrown buffers: with one for each, timing would decide how many there are.
        self._outgrown: list[torch.Tensor] = []
        self._left: Event | None = None
        self.buffers_made = 0
        self.growths = 0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, outgrown ones that are still waited for included."""
        live = sum(slot.buffer.numel() for slot in self._slots.values())
        return live + sum(buffer.numel() for buffer in self._outgrown)

    def take(self, verb: str, batch: int, nbytes: int, *, reserve: int | None = None) -> Slot:
        """Return the slot of (verb, batch) with room for ``nbytes``, for a call to be made for it.

        ``reserve``: allocate exactly so many bytes, once, when any are needed; None: grow as needed. Raises
        SlotBusyError while the last use is outstanding, CapacityError for more than was reserved, or inside a
        capture for a buffer that is not made yet or may grow: the graph would go on to use the old one.
        """
        self.check_free(verb, batch)
        slot = self._slots.get((verb, batch))
        if reserve is not None and nbytes > reserve:
            raise CapacityError(f"{verb} needs {nbytes} bytes, {reserve} are reserved")
        if reserve is None or slot is None or slot.buffer.numel() < nbytes:
            self.check_not_capturing(verb, batch)
        if reserve is None:
            self._sweep()
        wanted = reserve if reserve is not None and nbytes else nbytes
        if slot is None:
            slot = self._make(verb, batch, wanted)
        elif slot.buffer.numel() < nbytes:
            self._grow(slot, max(wanted, int(slot.buffer.numel() * _GROWTH)) if reserve is None else wanted)
        return slot

    @property
    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def check_not_capturing(self, verb: str, batch: int) -> None:
        """Raise CapacityError inside a capture, for what may allocate."""
        if self.capturing:
            raise CapacityError(
                f"{verb} of batch {batch} in a graph needs max_rows and reserve() before the capture"
            )

    def check_free(self, verb: str, batch: int) -> None:
        """Raise SlotBusyError while the last use of (verb, batch) is outstanding."""
        if (verb, batch) in self._slots:
            self._slots[verb, batch].check_free()

    def busy(self) -> list[Slot]:
        """Return the slots whose Pending is outstanding."""
        return [slot for slot in self._slots.values() if slot.inputs is not None]

    def close(self) -> None:
        """Drop every buffer and give every event back; the caller has ordered the streams."""
        for slot in self._slots.values():
            self._events.give_back(slot.ready)
            self._events.give_back(slot.done)
        if self._left is not None:
            self._events.give_back(self._left)
            self._left = None
        self._slots.clear()
        self._outgrown.clear()

    def _make(self, verb: str, batch: int, nbytes: int) -> Slot:
        buffer = self._allocate(nbytes)
        ready = self._events.take(_owner(verb, batch))
        try:
            done = self._events.take(_owner(verb, batch))
        except BaseException:
            self._events.give_back(ready)
            raise
        slot = self._slots[verb, batch] = Slot((verb, batch), buffer, ready, done)
        return slot

    def _grow(self, slot: Slot, nbytes: int) -> None:
        if not slot.buffer.numel():
            slot.buffer = self._allocate(nbytes)
            return
        buffer = self._allocate(nbytes)
        if self._left is None:
            self._left = self._events.take("buffers outgrown")
        # The device may still use the old buffer, on the comm stream or on that of an earlier caller: keep it until
        # it has come to here, which is behind all of them, and behind the growths before.
        self._left.record(self._ordered())
        self._outgrown.append(slot.buffer)
        slot.buffer = buffer
        self.growths += 1

    def _sweep(self) -> None:
        if self._outgrown and self._left is not None and self._left.query():
            self._outgrown.clear()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        # An inference tensor could not be written outside inference mode later.
        with torch.inference_mode(mode=False):
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self.buffers_made += nbytes > 0
        return buffer


def _owner(verb: str, batch: int) -> str:
    return f"slot ({verb}, {batch})"
