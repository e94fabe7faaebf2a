"""``copy_engine``: DMA between peer-mapped buffers, so that no compute unit is taken from what runs beside.

Rows go straight from the caller's tensor into the peers' buffers, to several at once where that pays. One wave
waits for the peers; a combine is then summed by one kernel on the owner, in the order of the ranks, so bit for bit
as over ``peer``. The channels and their two slots are those of ``peer``: calls of both may follow each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_dp.kernels import peer as kernels
from rocm_dp.transports.copy_calls import CopyCombine, CopyGather, Engine
from rocm_dp.transports.launch import Chain, Job
from rocm_dp.transports.places import Key, Places, rounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rocm_dp.kernels.launch import Prepared
    from rocm_dp.memory.copies import Copier, Lanes
    from rocm_dp.transports.launch import Launch
    from rocm_dp.transports.peer import PeerTransport


class CopyEngineTransport:
    """Makes the launches of one exchange in its ``places``; attention tp is summed by ``peer``."""

    def __init__(self, places: Places, peer: PeerTransport, copier: Copier, lanes: Lanes) -> None:
        self._places, self._peer, self._copier, self._lanes = places, peer, copier, lanes
        self._alone = places.layout.replicas == 1

    def gather(self, key: Key, rows: kernels.Rows, fields: Sequence[tuple[int, torch.dtype]]) -> CopyGather:
        """Return the gather from all ranks of ``fields``, a width and a dtype each."""
        reserve = self._places.reserve
        room = (rows.rows, reserve.rows if reserve else None)
        return self._gather(key, rows, fields, party=self._places.world, room=room)

    def gather_partial(self, key: Key, rows: kernels.Rows, scratch: torch.Tensor) -> Launch:
        """Return the gather from all ranks of rows that are first summed over tp, in ``scratch`` [L, H]."""
        sums = self._peer.tp_sums(key, rows, scratch)
        return Chain(sums, scratch, self.gather(key, rows, [(scratch.shape[1], scratch.dtype)]))

    def combine(self, key: Key, rows: kernels.Rows, out: torch.Tensor, *, out_rows: int = 0) -> Launch:
        """Return the sum over all ranks of this dp rank's rows, by way of ``out`` [L, H].

        ``out_rows``: zero the rows behind the own ones up to this one.
        """
        places, party, dtype = self._places, self._places.world, out.dtype
        row_bytes = out.shape[1] * out.itemsize
        channel, stage_rows = places.staged(key, rows, row_bytes, party)
        blocks = kernels.blocks_for(rounded(stage_rows * row_bytes), places.channels.lanes)

        def form(width: int) -> Prepared:
            what = ("sum", party.size, width, dtype)
            return places.form(what, lambda: kernels.sum_form(party, width, dtype))

        job = Job(places.channels, channel, rows, party, blocks)
        behind = out_rows if self._alone else 0
        sums = CopyCombine(job, out, self._engine(party, ()), form, stage_rows=stage_rows, out_rows=behind)
        if self._alone:
            return sums
        shares, own, fields, room = places.shares(key, rows, out)
        return Chain(sums, out, self._gather(shares, own, fields, party=places.copies, room=room))

    def _gather(
        self,
        key: Key,
        rows: kernels.Rows,
        fields: Sequence[tuple[int, torch.dtype]],
        *,
        party: kernels.Party,
        room: tuple[int, int | None],
    ) -> CopyGather:
        places = self._places
        channel, placed = places.gathered(key, fields, room)
        widths = tuple(kernels.vector_bytes(field.row_bytes) for field in placed)
        job = Job(places.channels, channel, rows, party, 1)
        return CopyGather(job, placed, self._engine(party, widths), widths)

    def _engine(self, party: kernels.Party, widths: tuple[int, ...]) -> Engine:
        form = self._places.form
        opens = form(("open", party.size), lambda: kernels.open_form(party))
        meets = form(("meet", party.size, widths), lambda: kernels.meet_form(party, widths))
        return Engine(self._copier, self._lanes, opens, meets)
