"""Slots: one buffer and two events for each (verb, batch), made once and used for ever."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from rocm_dp.errors import CapacityError, SlotBusyError

if TYPE_CHECKING:
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

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in the buffer, so that the next use would overwrite it."""
        return 0 <= tensor.data_ptr() - self.buffer.data_ptr() < self.buffer.numel() and tensor.numel() > 0

    def view(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first ``rows`` rows of ``width`` elements as a contiguous tensor over the buffer."""
        return self.buffer[: rows * width * dtype.itemsize].view(dtype).view(rows, width)


class SlotPool:
    """Makes slots on first use and grows them when allowed; nothing is allocated after warm-up."""

    def __init__(self, device: torch.device, events: EventPool) -> None:
        self._device, self._events = device, events
        self._slots: dict[tuple[str, int], Slot] = {}
        self._outgrown: deque[tuple[torch.Tensor, Event]] = deque()
        self.buffers_made = 0
        self.growths = 0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, outgrown ones that are still waited for included."""
        live = sum(slot.buffer.numel() for slot in self._slots.values())
        return live + sum(buffer.numel() for buffer, _ in self._outgrown)

    def take(self, verb: str, batch: int, nbytes: int, *, reserve: int | None = None) -> Slot:
        """Return the slot of (verb, batch) for its next use, with room for ``nbytes``.

        ``reserve``: allocate exactly so many bytes, once; None: grow as needed. Raises SlotBusyError while the
        last use is outstanding, CapacityError for more than was reserved, or inside a capture for a buffer that
        is not made yet or may grow: the graph would go on to use the old one.
        """
        self.check_free(verb, batch)
        slot = self._slots.get((verb, batch))
        if reserve is not None and nbytes > reserve:
            raise CapacityError(f"{verb} needs {nbytes} bytes, {reserve} are reserved")
        if (slot is None or reserve is None) and self._capturing():
            raise CapacityError(
                f"{verb} of batch {batch} in a graph needs max_rows and reserve() before the capture"
            )
        if reserve is None:
            self._sweep()
        if slot is None:
            slot = self._make(verb, batch, nbytes if reserve is None else reserve)
        elif slot.buffer.numel() < nbytes:
            self._grow(slot, nbytes)
        slot.generation += 1
        return slot

    def ensure(self, verb: str, batch: int, nbytes: int) -> None:
        """Make the slot of (verb, batch) with ``nbytes`` if it isn't there."""
        if (verb, batch) not in self._slots:
            self._make(verb, batch, nbytes)

    def check_free(self, verb: str, batch: int) -> None:
        """Raise SlotBusyError while the last use of (verb, batch) is outstanding."""
        slot = self._slots.get((verb, batch))
        if slot is not None and slot.inputs is not None:
            raise SlotBusyError(
                f"{verb} of batch {batch} is still in flight: wait() for its Pending before the next call"
            )

    def busy(self) -> list[Slot]:
        """Return the slots whose Pending is outstanding."""
        return [slot for slot in self._slots.values() if slot.inputs is not None]

    def close(self) -> None:
        """Drop every buffer and give every event back; the caller has ordered the streams."""
        for slot in self._slots.values():
            self._events.give_back(slot.ready)
            self._events.give_back(slot.done)
        for _, done in self._outgrown:
            self._events.give_back(done)
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
        buffer = self._allocate(max(nbytes, int(slot.buffer.numel() * _GROWTH)))
        done = self._events.take(_owner(*slot.key))
        # The device may still use the old buffer: keep it until it has come to here. The current stream is behind
        # the comm stream's last use of it, since that was waited for.
        slot.done.record()
        self._outgrown.append((slot.buffer, slot.done))
        slot.buffer, slot.done = buffer, done
        self.growths += 1

    def _sweep(self) -> None:
        while self._outgrown and self._outgrown[0][1].query():
            self._events.give_back(self._outgrown.popleft()[1])

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        # An inference tensor could not be written outside inference mode later.
        with torch.inference_mode(mode=False):
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self.buffers_made += 1
        return buffer


def _owner(verb: str, batch: int) -> str:
    return f"slot ({verb}, {batch})"
