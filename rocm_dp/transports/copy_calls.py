"""Calls whose rows are copied, worked out once: every copy is known but for the address of the input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch

from rocm_dp.kernels import peer as kernels
from rocm_dp.kernels.driver import Arguments
from rocm_dp.transports.launch import TwoSlots, tag_of
from rocm_dp.transports.places import gaps_of, rounded, share_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_dp.kernels.launch import Prepared
    from rocm_dp.memory.copies import Copier, Lanes
    from rocm_dp.transports.launch import Field, Job

_HEAD = 15  # numbers that a sum begins with; the address of its input follows
_UNALIGNED = 15
_HIP = torch.version.hip is not None


class Engine(NamedTuple):
    """What moves rows, the streams it does that on, and the kernels before and behind the copies."""

    copier: Copier
    lanes: Lanes
    opens: Prepared
    meets: Prepared


class Copy(NamedTuple):
    """One copy: of which input, from how many bytes into it, to which address, and how many bytes."""

    field: int
    offset: int
    to: int
    nbytes: int


class CopyLaunch(TwoSlots, ABC):
    """A call by copies: to the peers in turn, and last what stays on this rank."""

    def __init__(
        self,
        job: Job,
        results: tuple[list[torch.Tensor], list[torch.Tensor]],
        engine: Engine,
        numbers: Callable[[int], list[int]],
    ) -> None:
        super().__init__(job, results)
        self._engine = engine
        party, looks = job.party, job.channels.looks
        head = (job.channels.table, job.channel.place, party.first, party.rank)
        self._open = tuple(Arguments((*head, tag_of(slot, 1), looks)) for slot in range(2))
        self._meet = tuple(Arguments(numbers(slot)) for slot in range(2))
        self._copies = tuple(self._copies_to(slot) for slot in range(2))
        self._own = tuple(self._own_copies(slot) for slot in range(2))
        moved = sum(map(len, self._copies[0])) + len(self._own[0])
        # On AMD each copy holds a signal until it is done, as a record does.
        self.records = engine.lanes.records + (moved if _HIP else 0)

    def one(self, address: int, stream: int) -> None:
        """Launch on the raw ``stream`` for the only input."""
        self((address,), stream)

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on the raw ``stream`` for inputs at ``addresses``."""
        channel, (copier, lanes, opens, meets) = self._job.channel, self._engine
        slot = channel.slot ^ 1
        if self._job.channels.captured:
            opens(1, stream, self._open[slot])
        streams = lanes.fork(stream)
        for turn, copies in enumerate(self._copies[slot]):
            for field, offset, to, nbytes in copies:
                copier.copy(to, addresses[field] + offset, nbytes, streams[turn % len(streams)])
        for field, offset, to, nbytes in self._own[slot]:
            copier.copy(to, addresses[field] + offset, nbytes, stream)
        self._behind_copies(slot, stream)
        lanes.join(stream)
        meets(1, stream, self._meet[slot])
        channel.slot = slot

    def _behind_copies(self, slot: int, stream: int) -> None:
        """Do what may run beside the copies to peers."""

    def _copies_to(self, slot: int) -> list[list[Copy]]:
        """Return the copies for each peer, the next rank's first, so that no two ranks crowd one link."""
        party = self._job.party
        turns = [party.first + (party.rank - party.first + turn) % party.size for turn in range(1, party.size)]
        return [[copy for copy in self._copies_of(peer, slot) if copy.nbytes] for peer in turns]

    def _own_copies(self, _: int) -> list[Copy]:
        """Return the copies that stay on this rank: none, unless it keeps rows of its own."""
        return []

    @abstractmethod
    def _copies_of(self, peer: int, slot: int) -> list[Copy]:
        """Return the copies for one rank."""


class CopyGather(CopyLaunch):
    """A gather of up to four fields of a job; ``widths``: of access, should rows be spoilt."""

    def __init__(self, job: Job, fields: Sequence[Field], engine: Engine, widths: Sequence[int]) -> None:
        self._fields, self._widths = tuple(fields), tuple(widths)

        def views(slot: int) -> list[torch.Tensor]:
            return [job.channel.view(slot, one.offset, job.rows.rows, one.width, one.dtype) for one in self._fields]

        def numbers(slot: int) -> list[int]:
            begin = slot * job.channel.slot_bytes
            placed = [
                (0, begin + one.offset, one.row_bytes // width) for one, width in zip(fields, widths, strict=True)
            ]
            unused = [(0, 0, 0)] * (kernels.MAX_FIELDS - len(placed))
            return [*job.numbers(tag_of(slot, 1)), *(number for field in (*placed, *unused) for number in field)]

        super().__init__(job, (views(0), views(1)), engine, numbers)
        self._gaps = tuple(self._gaps_of(slot) for slot in range(2))

    def _behind_copies(self, slot: int, stream: int) -> None:
        for at, nbytes in self._gaps[slot]:
            self._engine.copier.zero(at, nbytes, stream)

    def _copies_of(self, peer: int, slot: int) -> list[Copy]:
        job = self._job
        begin, low, high = share_of(job.rows, job.party, job.party.rank)
        there = job.channel.address(peer, slot)
        return [
            Copy(
                index,
                low * one.row_bytes,
                there + one.offset + (begin + low) * one.row_bytes,
                (high - low) * one.row_bytes,
            )
            for index, one in enumerate(self._fields)
        ]

    def _own_copies(self, slot: int) -> list[Copy]:
        return [copy for copy in self._copies_of(self._job.party.rank, slot) if copy.nbytes]

    def _gaps_of(self, slot: int) -> list[tuple[int, int]]:
        job = self._job
        here = job.channel.address(job.party.rank, slot)
        return [
            (here + one.offset + low * one.row_bytes, (high - low) * one.row_bytes)
            for low, high in gaps_of(job.rows, job.party)
            for one in self._fields
        ]


class CopyCombine(CopyLaunch):
    """A combine of a job into ``out`` [*, width]; ``form`` compiles the sum for a width of access (bytes).

    ``stage_rows``: room for the rows of one sender; ``out_rows``: the rows of ``out`` up to which those behind the
    own ones are zeroed (0: none).
    """

    def __init__(
        self,
        job: Job,
        out: torch.Tensor,
        engine: Engine,
        form: Callable[[int], Prepared],
        *,
        stage_rows: int,
        out_rows: int,
    ) -> None:
        self._out, self._form, self._stage_rows, self._out_rows = out, form, stage_rows, out_rows
        self._row_bytes = out.shape[1] * out.itemsize
        unused = [0] * (3 * kernels.MAX_FIELDS)
        super().__init__(job, ([out], [out]), engine, lambda slot: [*job.numbers(tag_of(slot, 1)), *unused])
        self._sums: dict[int, tuple[Prepared, tuple[Arguments, Arguments]]] = {}
        self._sum_for(0)

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on the raw ``stream`` for the addends at ``addresses[0]``."""
        slot = self.next_slot
        form, both = self._sum_for(addresses[0] & _UNALIGNED)
        super().__call__(addresses, stream)
        both[slot].values[_HEAD] = addresses[0]
        form(self._job.blocks, stream, both[slot])

    def _sum_for(self, unaligned: int) -> tuple[Prepared, tuple[Arguments, Arguments]]:
        width = kernels.vector_bytes(self._row_bytes, unaligned, self._out.data_ptr())
        if width not in self._sums:
            both = (Arguments(self._numbers(0, width)), Arguments(self._numbers(1, width)))
            self._sums[width] = self._form(width), both
        return self._sums[width]

    def _numbers(self, slot: int, width: int) -> list[int]:
        job = self._job
        head = (job.channels.table, job.channel.place, *job.rows.words(), job.party.first, job.party.rank)
        begin, vecs = slot * job.channel.slot_bytes, self._row_bytes // width
        rows = (job.rows.rows, job.rows.most)
        return [*head, *rows, 0, self._out.data_ptr(), begin, vecs, self._stage_rows, self._out_rows]

    def _copies_of(self, peer: int, slot: int) -> list[Copy]:
        job = self._job
        begin, low, high = share_of(job.rows, job.party, peer)
        part = (job.party.rank - job.party.first) * rounded(self._stage_rows * self._row_bytes)
        to, size = job.channel.address(peer, slot) + part, (high - low) * self._row_bytes
        return [Copy(0, (begin + low) * self._row_bytes, to, size)]
