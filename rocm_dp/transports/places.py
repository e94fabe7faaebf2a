"""Where the rows of each call lie in peer memory, and who takes part: alike for kernels and copy engines."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from rocm_dp.errors import CapacityError
from rocm_dp.graphs import GraphPlan
from rocm_dp.kernels import peer as kernels
from rocm_dp.kernels.launch import on_device
from rocm_dp.plan import MAX_ROWS
from rocm_dp.transports.launch import Field

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from rocm_dp.kernels.launch import Prepared
    from rocm_dp.layout import RankLayout
    from rocm_dp.memory.channels import Channel, Channels
    from rocm_dp.plan import TokenPlan

_ALIGN = 16

Key: TypeAlias = "tuple[str, int]"


class Room(NamedTuple):
    """Rows to have room for: of the global buffer, and of one dp rank in it."""

    rows: int
    local_rows: int


class Places:
    """The channels of one exchange by what is called; new ones are made by all ranks at once.

    ``reserve``: the most that a plan may need, for which channels are made once (None: they grow with the plans).
    ``world``: all ranks; ``copies``: those of this dp rank; ``tp``: those of this attention-tp group.
    """

    def __init__(self, layout: RankLayout, channels: Channels, *, reserve: Room | None = None) -> None:
        self.layout, self.channels, self.reserve = layout, channels, reserve
        self._forms: dict[object, Prepared] = {}
        replicas = layout.replicas

        def party(first: int, size: int) -> kernels.Party:
            return kernels.Party(first, size, layout.rank, layout.world_size, layout.dp_size, replicas)

        self.world = party(0, layout.world_size)
        self.copies = party(layout.dp_rank * replicas, replicas)
        self.tp = party(layout.rank - layout.tp_rank, layout.tp_size)

    def gathered(
        self, key: Key, fields: Sequence[tuple[int, torch.dtype]], room: tuple[int, int | None]
    ) -> tuple[Channel, list[Field]]:
        """Return the channel of a gather of ``fields``, a width and a dtype each, and where each lies in a slot.

        ``room``: rows to make room for, and rows reserved (None: grow).
        """
        placed, nbytes = _placed(fields, room[0])
        reserved = None if room[1] is None else _placed(fields, room[1])[1]
        return self.channels.get(key, nbytes, reserve=reserved), placed

    def staged(self, key: Key, rows: kernels.Rows, row_bytes: int, party: kernels.Party) -> tuple[Channel, int]:
        """Return the channel of a combine, and for how many rows of each sender a slot has room."""
        stage_rows = -(-rows.most // party.replicas)
        reserved = None
        if self.reserve is not None:
            most = -(-self.reserve.local_rows // party.replicas)
            reserved = party.size * rounded(most * row_bytes)
        return self.channels.get(key, party.size * rounded(stage_rows * row_bytes), reserve=reserved), stage_rows

    def shares(
        self, key: Key, rows: kernels.Rows, out: torch.Tensor
    ) -> tuple[Key, kernels.Rows, list[tuple[int, torch.dtype]], tuple[int, int | None]]:
        """Return key, rows, fields and room of the gather, by the ``copies``, of the shares in ``out`` [L, H]."""
        # The own rows differ from rank to rank, room for them must not.
        room = (rows.most, self.reserve.local_rows if self.reserve else None)
        return (f"{key[0]} shares", key[1]), replace(rows, rows=out.shape[0]), [(out.shape[1], out.dtype)], room

    def input(self, key: Key, rows: kernels.Rows, row_bytes: int) -> Channel:
        """Return the channel whose memory experts write to, and a pulled combine reads."""
        reserved = None if self.reserve is None else self.reserve.rows * row_bytes
        name = (f"{key[0]} input", key[1])
        return self.channels.get(name, rows.rows * row_bytes, reserve=reserved, slots=1)

    def form(self, what: object, make: Callable[[], Prepared]) -> Prepared:
        """Return the compiled kernel known as ``what``; CapacityError when it would be made in a capture."""
        if what not in self._forms:
            if self.channels.capturing:
                raise CapacityError("a kernel in a graph needs reserve(), with its plan, before the capture")
            with on_device(self.channels.device):
                self._forms[what] = make()
        return self._forms[what]


def share_of(rows: kernels.Rows, party: kernels.Party, rank: int) -> tuple[int, int, int]:
    """Return where a rank's dp rank begins in the rows of ``party``, and which of its rows are the rank's share.

    As ``share_of`` in ``kernels/peer_triton.py``, for counts on the host.
    """
    dp, part = rank // party.replicas, rank % party.replicas
    held = rows.counts[dp]
    begin = rows.starts[dp] - rows.starts[party.first // party.replicas]
    return begin, part * held // party.replicas, (part + 1) * held // party.replicas


def gaps_of(rows: kernels.Rows, party: kernels.Party) -> Iterator[tuple[int, int]]:
    """Yield the rows [low, high) that nobody holds: behind each dp rank's, and behind the last."""
    first = party.first // party.replicas
    origin, ranks = rows.starts[first], range(first, first + party.size // party.replicas)
    for dp in ranks:
        behind = rows.starts[dp] - origin + rows.counts[dp]
        until = rows.rows if dp == ranks[-1] else min(rows.starts[dp + 1] - origin, rows.rows)
        if behind < until:
            yield behind, until


def rounded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to where the next area may begin."""
    return -(-nbytes // _ALIGN) * _ALIGN


def rows_of(plan: TokenPlan | GraphPlan) -> kernels.Rows:
    """Return a plan's rows as the kernels take them."""
    if isinstance(plan, GraphPlan):
        return kernels.Rows((), (), plan.capacity, plan.per_rank_capacity, plan.counts.data_ptr())
    if plan.rows > MAX_ROWS:
        raise CapacityError(f"peer memory takes {MAX_ROWS} rows at most, the plan has {plan.rows}")
    return kernels.Rows(plan.counts, plan.starts, plan.rows, max(plan.counts))


def _placed(fields: Sequence[tuple[int, torch.dtype]], rows: int) -> tuple[list[Field], int]:
    """Return where each field of ``rows`` rows lies in a slot, and the bytes that they take together."""
    placed, at = [], 0
    for width, dtype in fields:
        field = Field(width, dtype, at)
        placed.append(field)
        at += rounded(rows * field.row_bytes)
    return placed, at
