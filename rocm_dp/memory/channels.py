"""Channels: peer memory for each (verb, batch), and the table on the device that the peer kernels read."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from rocm_dp.control import Op
from rocm_dp.errors import CapacityError
from rocm_dp.kernels import peer as kernels
from rocm_dp.kernels.driver import Arguments
from rocm_dp.memory.peer import PeerBuffer

if TYPE_CHECKING:
    from rocm_dp.groups import Groups

MAX_CHANNELS = 255  # of one exchange; a channel's row in the table takes at most 168 bytes
LANES = 128  # blocks of one call, at most
_CPU_LANES = 2  # interpreted blocks run one after the other
_ALIGN = 256  # bytes: where a slot begins
_GROWTH = 1.5
_LOOKS, _CPU_LOOKS = 20_000, 200  # enough to time them: about 10 ms


class Late(NamedTuple):
    """A wait that ran out: the channel's key, the epoch, and the ranks that did not come."""

    key: tuple[str, int]
    epoch: int
    missing: tuple[int, ...]


class Channel:
    """The peer memory of one (verb, batch): ``slots`` of ``slot_bytes`` on every rank; two are used in turns."""

    __slots__ = ("buffer", "key", "place", "slot", "slot_bytes", "slots")

    def __init__(self, key: tuple[str, int], place: int, buffer: PeerBuffer, slot_bytes: int, slots: int) -> None:
        self.key, self.place, self.buffer, self.slot_bytes, self.slots = key, place, buffer, slot_bytes, slots
        self.slot = 1  # the one used last; the kernel's own note of it begins with 1 too

    @property
    def range(self) -> tuple[int, int]:
        """Where this rank's memory of the channel begins and ends."""
        begin = self.buffer.tensor.data_ptr()
        return begin, begin + self.slots * self.slot_bytes

    def address(self, rank: int, slot: int) -> int:
        """Return where ``slot`` of a rank's memory begins in this process."""
        return self.buffer.of_ranks[rank] + slot * self.slot_bytes

    def view(self, slot: int, offset: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [rows, width] of ``dtype``, ``offset`` bytes into ``slot``."""
        begin = slot * self.slot_bytes + offset
        nbytes = rows * width * dtype.itemsize
        # An inference view could not be written outside inference mode later.
        with torch.inference_mode(mode=False):
            return self.buffer.tensor[begin : begin + nbytes].view(dtype).view(rows, width)


class Channels:
    """All channels of one exchange. Made collectively, grown collectively, closed collectively.

    ``timeout``: seconds that a kernel waits for its peers; ``kind`` of peer memory. Raises PeerRefusedError on
    every rank when one of them can't share memory.
    """

    def __init__(self, groups: Groups, device: torch.device, *, timeout: float, kind: str = "ipc") -> None:
        self._groups, self.device, self._ranks = groups, device, groups.layout.world_size
        self.lanes = min(row["lanes"] for row in groups.control.call(Op.LANES, {"lanes": _lanes(device)}))
        pad_bytes = (1 + MAX_CHANNELS) * LANES * self._ranks * 8
        self._kind = kind
        self._pads = PeerBuffer(pad_bytes, groups=groups, device=device, uncached=True, kind=kind)
        self._made: dict[tuple[str, int], Channel] = {}
        self.buffers_made = self.growths = 0
        self.captured = False  # since a graph has calls on a channel, turns of the slots need not add up
        try:
            with torch.inference_mode(mode=False):
                self._table = torch.zeros(
                    1 + MAX_CHANNELS, kernels.HEAD + 2 * self._ranks, dtype=torch.int64, device=device
                )
                self._word = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
                self._table[0, 1] = self._word.data_ptr()
            # Read before every call: through ctypes it costs a tenth of a microsecond.
            self.late_word = ctypes.c_int64.from_address(self._word.data_ptr())
            self.table = self._table.data_ptr()
            self.looks = max(1, int(timeout * self._looks_per_second()))
            self._gone = kernels.give_up_form(self._ranks, LANES)
        except BaseException:
            self._pads.close(collective=False)
            raise
        groups.channels.append(self)

    @property
    def late(self) -> bool:
        """Whether a kernel's wait has run out; no call to the device."""
        return self.late_word.value != 0

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's channels."""
        return sum(channel.buffer.tensor.numel() for channel in self._made.values())

    def get(self, key: tuple[str, int], nbytes: int, *, reserve: int | None, slots: int = 2) -> Channel:
        """Return the channel with room for ``nbytes`` in each slot; made or grown at need, by all ranks at once.

        ``reserve``: bytes to allocate once and for all (None: grow). Raises CapacityError for more than that,
        inside a capture, and for too many channels.
        """
        channel = self._made.get(key)
        if reserve is not None and nbytes > reserve:
            raise CapacityError(f"{key[0]} needs {nbytes} bytes, {reserve} are reserved")
        if (channel is None or reserve is None) and self.capturing:
            raise CapacityError(
                f"{key[0]} of batch {key[1]} in a graph needs max_rows and reserve() before the capture"
            )
        if channel is not None and nbytes <= channel.slot_bytes:
            return channel
        wanted = nbytes if reserve is None else reserve
        if channel is None:
            return self._make(key, wanted, slots)
        self._grow(channel, max(wanted, int(channel.slot_bytes * _GROWTH)))
        return channel

    def first_late(self) -> Late | None:
        """Return what the first channel whose wait ran out says; waits for the device."""
        rows = self._table.tolist()
        for channel in self._made.values():
            words = rows[channel.place // self._table.shape[1]]
            if words[3]:
                missing = tuple(rank for rank in range(self._ranks) if words[4] >> rank & 1)
                return Late(channel.key, words[3], missing)
        return None

    def give_up(self, stream: int) -> None:
        """Tell all peers, on the raw ``stream``, that this rank comes to no call any more."""
        if self._made:
            arguments = Arguments((self.table, self._table.shape[1], self._groups.layout.rank))
            self._gone(len(self._made), stream, arguments)

    def close(self, *, collective: bool) -> None:
        """Give all memory back; ``collective`` False: without waiting for the other ranks."""
        self._groups.channels.remove(self)
        for channel in self._made.values():
            channel.buffer.close(collective=collective)
        self._pads.close(collective=collective)
        self._made.clear()

    def _make(self, key: tuple[str, int], nbytes: int, slots: int) -> Channel:
        row = len(self._made) + 1
        if row > MAX_CHANNELS:
            raise CapacityError(f"{key[0]} of batch {key[1]} needs a channel, all {MAX_CHANNELS} are in use")
        slot_bytes = -(-nbytes // _ALIGN) * _ALIGN
        buffer = self._allocate(slots * slot_bytes)
        channel = Channel(key, row * self._table.shape[1], buffer, slot_bytes, slots)
        pads = self._pads.addresses + row * LANES * self._ranks * 8
        start = [0, 0, 1, 0, 0]
        with torch.inference_mode(mode=False):
            head = torch.tensor(start, dtype=torch.int64, device=self.device)
            self._table[row] = torch.cat([head, buffer.addresses, pads])
        self._settle()
        self._made[key] = channel
        return channel

    def _grow(self, channel: Channel, nbytes: int) -> None:
        # Every rank is here with the same plan. What can fail comes first: the old memory is good until then.
        slot_bytes = -(-nbytes // _ALIGN) * _ALIGN
        grown, outgrown = self._allocate(channel.slots * slot_bytes), channel.buffer
        self._settle()
        row = channel.place // self._table.shape[1]
        with torch.inference_mode(mode=False):
            self._table[row, kernels.HEAD : kernels.HEAD + self._ranks] = grown.addresses
        channel.buffer, channel.slot_bytes = grown, slot_bytes
        self._settle()
        self.growths += 1
        # It waits for the device, so no kernel uses the old memory.
        outgrown.close()

    def _allocate(self, nbytes: int) -> PeerBuffer:
        self.buffers_made += 1
        return PeerBuffer(max(_ALIGN, nbytes), groups=self._groups, device=self.device, kind=self._kind)

    def _settle(self) -> None:
        """Let the table reach the device before any stream's kernel reads it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _looks_per_second(self) -> float:
        """Time looks at a flag in an own pad, the fastest of a few tries: other processes may share the device."""
        form, looks = kernels.look_form(self._ranks), _LOOKS if self.device.type == "cuda" else _CPU_LOOKS
        arguments = Arguments((self._pads.tensor.data_ptr(), self._groups.layout.rank, looks))
        best = 0.0
        for _ in range(3):
            self._settle()
            start = time.perf_counter()
            form(1, self._stream(), arguments)
            self._settle()
            best = max(best, looks / (time.perf_counter() - start))
        return best

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    @property
    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _lanes(device: torch.device) -> int:
    if device.type == "cpu":
        return _CPU_LANES
    return min(LANES, torch.cuda.get_device_properties(device).multi_processor_count)
