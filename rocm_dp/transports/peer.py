"""``peer``: Triton kernels over peer-mapped memory, one launch and one wait for the peers in most calls.

Gathered rows are handed out where the peers wrote them. With several replicas of a dp rank (attention tp or cp)
each moves or sums a share of the rows, and a second launch within the dp rank brings the shares together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from rocm_dp.errors import CapacityError
from rocm_dp.graphs import GraphPlan
from rocm_dp.kernels import peer as kernels
from rocm_dp.kernels.launch import on_device
from rocm_dp.plan import MAX_ROWS
from rocm_dp.transports.peer_calls import CombineLaunch, Field, GatherLaunch, Job, PullLaunch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rocm_dp.kernels.launch import Prepared
    from rocm_dp.layout import RankLayout
    from rocm_dp.memory.channels import Channel, Channels
    from rocm_dp.plan import TokenPlan

MAX_FIELDS = kernels.MAX_FIELDS
_ALIGN = 16
_HIP = torch.version.hip is not None
_STEPS = 4
_STEP_BYTES = 4 * 2**20  # what a step must move at least to be worth one more wait


Key: TypeAlias = "tuple[str, int]"
Launch: TypeAlias = "GatherLaunch | CombineLaunch | PullLaunch | Chain"


class Room(NamedTuple):
    """Rows to have room for: of the global buffer, and of one dp rank in it."""

    rows: int
    local_rows: int


class PeerTransport:
    """Makes the launches of one exchange on its ``channels``; new channels are made by all ranks at once.

    ``reserve``: the most that a plan may need, for which channels are made once (None: they grow with the plans).
    """

    def __init__(self, layout: RankLayout, channels: Channels, *, reserve: Room | None = None) -> None:
        self._layout, self._channels, self._reserve = layout, channels, reserve
        self._forms: dict[object, Prepared] = {}
        replicas = layout.replicas

        def party(first: int, size: int) -> kernels.Party:
            return kernels.Party(first, size, layout.rank, layout.world_size, layout.dp_size, replicas)

        self._world = party(0, layout.world_size)
        self._copies = party(layout.dp_rank * replicas, replicas)
        self._tp = party(layout.rank - layout.tp_rank, layout.tp_size)

    def gather(self, key: Key, rows: kernels.Rows, fields: Sequence[tuple[int, torch.dtype]]) -> GatherLaunch:
        """Return the gather from all ranks of ``fields``, a width and a dtype each."""
        room = self._reserve.rows if self._reserve else None
        return self._gather(key, rows, fields, party=self._world, room=(rows.rows, room))

    def gather_partial(self, key: Key, rows: kernels.Rows, scratch: torch.Tensor) -> Chain:
        """Return the gather from all ranks of rows that are first summed over tp, in ``scratch`` [L, H]."""
        sums = self._combine((f"{key[0]} sums", key[1]), rows, scratch, party=self._tp, out_rows=0)
        return Chain(sums, scratch, self.gather(key, rows, [(scratch.shape[1], scratch.dtype)]))

    def combine(
        self, key: Key, rows: kernels.Rows, out: torch.Tensor, *, out_rows: int = 0
    ) -> CombineLaunch | Chain:
        """Return the sum over all ranks of this dp rank's rows, by way of ``out`` [L, H].

        ``out_rows``: zero the rows behind the own ones up to this one.
        """
        alone = self._layout.replicas == 1
        sums = self._combine(key, rows, out, party=self._world, out_rows=out_rows if alone else 0)
        return sums if alone else self._shared(key, rows, sums, out)

    def pull(self, key: Key, rows: kernels.Rows, out: torch.Tensor, *, out_rows: int = 0) -> PullLaunch | Chain:
        """Like ``combine``, for addends that every rank has written to its ``input_of`` this key."""
        party, dtype = self._world, out.dtype
        alone = self._layout.replicas == 1
        channel = self._input(key, rows, out.shape[1] * out.itemsize)
        nbytes = -(-rows.most // party.replicas) * out.shape[1] * out.itemsize
        blocks = kernels.blocks_for(nbytes * party.size, self._channels.lanes)

        def form(width: int) -> Prepared:
            what = ("pull", width, dtype)
            return self._form(party, what, rows, lambda **on: kernels.pull_form(party, width, dtype, **on))

        job = Job(self._channels, channel, rows, party, blocks)
        sums = PullLaunch(job, out, form, out_rows=out_rows if alone else 0)
        return sums if alone else self._shared(key, rows, sums, out)

    def input_of(self, key: Key, rows: kernels.Rows, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's [rows, width] of addends that ``pull`` sums."""
        channel = self._input(key, rows, width * dtype.itemsize)
        return channel.view(0, 0, rows.rows, width, dtype)

    def _input(self, key: Key, rows: kernels.Rows, row_bytes: int) -> Channel:
        reserved = None if self._reserve is None else self._reserve.rows * row_bytes
        name = (f"{key[0]} input", key[1])
        return self._channels.get(name, rows.rows * row_bytes, reserve=reserved, slots=1)

    def _shared(self, key: Key, rows: kernels.Rows, sums: CombineLaunch | PullLaunch, out: torch.Tensor) -> Chain:
        """Return ``sums``, which leaves a share of the rows in ``out``, and the gather of all the shares."""
        own = replace(rows, rows=out.shape[0])
        # The own rows differ from rank to rank, room for them must not.
        room = (rows.most, self._reserve.local_rows if self._reserve else None)
        shares = (f"{key[0]} shares", key[1])
        field = (out.shape[1], out.dtype)
        return Chain(sums, out, self._gather(shares, own, [field], party=self._copies, room=room))

    def _gather(
        self,
        key: Key,
        rows: kernels.Rows,
        fields: Sequence[tuple[int, torch.dtype]],
        *,
        party: kernels.Party,
        room: tuple[int, int | None],
    ) -> GatherLaunch:
        """Return a gather within ``party``; ``room``: rows to make room for, and rows reserved (None: grow)."""
        placed, nbytes = _placed(fields, room[0])
        reserved = None if room[1] is None else _placed(fields, room[1])[1]
        channel = self._channels.get(key, nbytes, reserve=reserved)
        share = -(-rows.most // party.replicas)
        blocks = kernels.blocks_for(share * sum(field.row_bytes for field in placed), self._channels.lanes)

        def form(widths: tuple[int, ...]) -> Prepared:
            return self._form(party, widths, rows, lambda **on: kernels.gather_form(party, widths, **on))

        return GatherLaunch(Job(self._channels, channel, rows, party, blocks), placed, form)

    def _combine(
        self, key: Key, rows: kernels.Rows, out: torch.Tensor, *, party: kernels.Party, out_rows: int
    ) -> CombineLaunch:
        row_bytes, dtype = out.shape[1] * out.itemsize, out.dtype
        stage_rows = -(-rows.most // party.replicas)
        stage_bytes = _rounded(stage_rows * row_bytes)
        reserved = None
        if self._reserve is not None:
            most = -(-self._reserve.local_rows // party.replicas)
            reserved = party.size * _rounded(most * row_bytes)
        channel = self._channels.get(key, party.size * stage_bytes, reserve=reserved)
        blocks = kernels.blocks_for(stage_bytes * max(1, party.size - 1), self._channels.lanes)
        # Not on AMD: nobody measured there that it pays.
        steps = 1 if _HIP else max(1, min(_STEPS, stage_bytes * (party.size - 1) // _STEP_BYTES))
        turns = -(-stage_bytes // (blocks * kernels.block_bytes() * steps))

        def form(width: int) -> Prepared:
            what = (width, dtype, steps > 1)
            return self._form(
                party, what, rows, lambda **on: kernels.combine_form(party, width, dtype, stepped=steps > 1, **on)
            )

        job = Job(self._channels, channel, rows, party, blocks)
        return CombineLaunch(
            job, out, form, stage_rows=stage_rows, schedule=(steps, max(1, turns)), out_rows=out_rows
        )

    def _form(
        self, party: kernels.Party, what: object, rows: kernels.Rows, make: Callable[..., Prepared]
    ) -> Prepared:
        key = (party.size, what, bool(rows.on_device))
        if key not in self._forms:
            if self._channels.capturing:
                raise CapacityError("a kernel in a graph needs reserve(), with its plan, before the capture")
            with on_device(self._channels.device):
                self._forms[key] = make(on_device=bool(rows.on_device))
        return self._forms[key]


class Chain:
    """A launch that leaves its result in ``between`` [L, H], and a gather that takes it from there."""

    __slots__ = ("_address", "_between", "_first", "_then")

    def __init__(self, first: CombineLaunch | PullLaunch, between: torch.Tensor, then: GatherLaunch) -> None:
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

    def holds(self, address: int) -> bool:
        """Return whether ``address`` lies in peer memory that calls write."""
        return self._first.holds(address) or self._then.holds(address)

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


def _placed(fields: Sequence[tuple[int, torch.dtype]], rows: int) -> tuple[list[Field], int]:
    """Return where each field of ``rows`` rows lies in a slot, and the bytes that they take together."""
    placed, at = [], 0
    for width, dtype in fields:
        field = Field(width, dtype, at)
        placed.append(field)
        at += _rounded(rows * field.row_bytes)
    return placed, at


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def rows_of(plan: TokenPlan | GraphPlan) -> kernels.Rows:
    """Return a plan's rows as the kernels take them."""
    if isinstance(plan, GraphPlan):
        return kernels.Rows((), (), plan.capacity, plan.per_rank_capacity, plan.counts.data_ptr())
    if plan.rows > MAX_ROWS:
        raise CapacityError(f"peer memory takes {MAX_ROWS} rows at most, the plan has {plan.rows}")
    return kernels.Rows(plan.counts, plan.starts, plan.rows, max(plan.counts))
