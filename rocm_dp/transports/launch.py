"""What every launch over peer memory offers, whoever moves the rows; and two of them, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rocm_dp.kernels import peer as kernels
    from rocm_dp.memory.channels import Channel, Channels


class Launch(Protocol):
    """A call worked out for one plan: what is left to do is to fill in the addresses of its inputs."""

    @property
    def results(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What a call fills, by slot."""

    @property
    def stale(self) -> bool:
        """Whether memory that it was worked out for was outgrown since."""

    @property
    def next_slot(self) -> int:
        """The slot that the next call fills."""

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The peer memory of this rank that calls write."""

    @property
    def records(self) -> int:
        """Event records that a call makes of its own."""

    def one(self, address: int, stream: int) -> None:
        """Launch on the raw ``stream`` for the only input, at an aligned ``address``."""

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on the raw ``stream`` for inputs at ``addresses``."""


class Field(NamedTuple):
    """One tensor of a gather: ``width`` elements of ``dtype`` in a row, its area ``offset`` bytes into a slot."""

    width: int
    dtype: torch.dtype
    offset: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.width * self.dtype.itemsize


class Job(NamedTuple):
    """What every launch needs: its channel, the rows it moves, and who takes part, in how many blocks."""

    channels: Channels
    channel: Channel
    rows: kernels.Rows
    party: kernels.Party
    blocks: int

    def numbers(self, tag: int) -> list[int]:
        """Return the numbers that all kernels begin with; ``tag``: of ``tag_of``."""
        party = self.party
        head = (self.channels.table, self.channel.place, *self.rows.words())
        return [*head, party.first, party.rank, tag, self.rows.rows, self.rows.most, self.channels.looks]


def tag_of(slot: int, blocks: int) -> int:
    """Return what peers see of a call in its flags, so that one by another verb or transport is found."""
    return 2 * blocks + slot


class TwoSlots:
    """What launches have in common that use the two slots of their job's channel by turns; ``results`` by slot."""

    __slots__ = ("_job", "_memory", "results")

    def __init__(self, job: Job, results: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
        self._job, self._memory, self.results = job, job.channel.buffer, results

    @property
    def stale(self) -> bool:
        """Whether the channel's memory was outgrown since."""
        return self._job.channel.buffer is not self._memory

    @property
    def next_slot(self) -> int:
        """The slot that the next call uses."""
        return self._job.channel.slot ^ 1

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The peer memory of this rank that calls write."""
        return (self._job.channel.range,)

    def repeat_slot(self) -> None:
        """Make the next call use the slot of the last one, as the replay of a graph may."""
        self._job.channel.slot ^= 1
        self._job.channels.captured = True


class Chain:
    """A launch that leaves its result in ``between`` [L, H], and a gather that takes it from there."""

    __slots__ = ("_address", "_between", "_first", "_then")

    def __init__(self, first: Launch, between: torch.Tensor, then: Launch) -> None:
        self._first, self._between, self._then = first, between, then
        self._address = (between.data_ptr(),)

    @property
    def stale(self) -> bool:
        """Whether memory of one of the two was outgrown since."""
        return self._first.stale or self._then.stale

    @property
    def results(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What a call fills, by slot."""
        return self._then.results

    @property
    def next_slot(self) -> int:
        """The slot that the next call fills."""
        return self._then.next_slot

    @property
    def records(self) -> int:
        """Event records that a call makes of its own."""
        return self._first.records + self._then.records

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The peer memory of this rank that calls write."""
        return (*self._first.ranges, *self._then.ranges)

    def one(self, address: int, stream: int) -> None:
        """Launch both on the raw ``stream`` for the addends at an aligned ``address``."""
        self._first.one(address, stream)
        self._then(self._address, stream)

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launch both on the raw ``stream``."""
        self._first(addresses, stream)
        self._then(self._address, stream)
