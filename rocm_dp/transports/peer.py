"""``peer``: Triton kernels over peer-mapped memory, one launch and one wait for the peers in most calls.

Gathered rows are handed out where the peers wrote them. With several replicas of a dp rank (attention tp or cp)
each moves or sums a share of the rows, and a second launch within the dp rank brings the shares together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_dp.kernels import peer as kernels
from rocm_dp.transports.launch import Chain, Job
from rocm_dp.transports.peer_calls import CombineLaunch, GatherLaunch, PullLaunch
from rocm_dp.transports.places import Key, Places, rounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_dp.kernels.launch import Prepared
    from rocm_dp.transports.launch import Launch

_HIP = torch.version.hip is not None
# Beside computation one block in so many, and these at least: each takes a compute unit that would multiply. So an
# overlapped layer took 2 to 7 % less time, at all sizes, on H200.
_THINNED, _LEAST_BLOCKS = 8, 4
_STEPS = 4
_STEP_BYTES = 4 * 2**20  # what a step must move at least to be worth one more wait


class PeerTransport:
    """Makes the launches of one exchange in its ``places``; ``beside``: for calls that run beside computation."""

    def __init__(self, places: Places, *, beside: bool = False) -> None:
        self._places, self._alone, self._beside = places, places.layout.replicas == 1, beside

    def gather(self, key: Key, rows: kernels.Rows, fields: Sequence[tuple[int, torch.dtype]]) -> GatherLaunch:
        """Return the gather from all ranks of ``fields``, a width and a dtype each."""
        reserve = self._places.reserve
        room = (rows.rows, reserve.rows if reserve else None)
        return self._gather(key, rows, fields, party=self._places.world, room=room)

    def gather_partial(self, key: Key, rows: kernels.Rows, scratch: torch.Tensor) -> Chain:
        """Return the gather from all ranks of rows that are first summed over tp, in ``scratch`` [L, H]."""
        sums = self.tp_sums(key, rows, scratch)
        return Chain(sums, scratch, self.gather(key, rows, [(scratch.shape[1], scratch.dtype)]))

    def tp_sums(self, key: Key, rows: kernels.Rows, scratch: torch.Tensor) -> CombineLaunch:
        """Return the sum over tp of rows that are to be gathered, in ``scratch`` [L, H]."""
        return self._combine((f"{key[0]} sums", key[1]), rows, scratch, party=self._places.tp, out_rows=0)

    def combine(self, key: Key, rows: kernels.Rows, out: torch.Tensor, *, out_rows: int = 0) -> Launch:
        """Return the sum over all ranks of this dp rank's rows, by way of ``out`` [L, H].

        ``out_rows``: zero the rows behind the own ones up to this one.
        """
        behind = out_rows if self._alone else 0
        sums = self._combine(key, rows, out, party=self._places.world, out_rows=behind)
        return sums if self._alone else self._shared(key, rows, sums, out)

    def pull(self, key: Key, rows: kernels.Rows, out: torch.Tensor, *, out_rows: int = 0) -> Launch:
        """Like ``combine``, for addends that every rank has written to its ``input_of`` this key."""
        places, party, dtype = self._places, self._places.world, out.dtype
        channel = places.input(key, rows, out.shape[1] * out.itemsize)
        nbytes = -(-rows.most // party.replicas) * out.shape[1] * out.itemsize
        blocks = self._blocks_for(nbytes * party.size)
        on_device = bool(rows.on_device)

        def form(width: int) -> Prepared:
            what = ("pull", width, dtype, on_device)
            return places.form(what, lambda: kernels.pull_form(party, width, dtype, on_device=on_device))

        job = Job(places.channels, channel, rows, party, blocks)
        sums = PullLaunch(job, out, form, out_rows=out_rows if self._alone else 0)
        return sums if self._alone else self._shared(key, rows, sums, out)

    def input_of(self, key: Key, rows: kernels.Rows, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's [rows, width] of addends that ``pull`` sums."""
        channel = self._places.input(key, rows, width * dtype.itemsize)
        return channel.view(0, 0, rows.rows, width, dtype)

    def _blocks_for(self, nbytes: int) -> int:
        """Return how many blocks move ``nbytes``; the same on every rank."""
        blocks = kernels.blocks_for(nbytes, self._places.channels.lanes)
        return max(blocks // _THINNED, min(blocks, _LEAST_BLOCKS)) if self._beside else blocks

    def _shared(self, key: Key, rows: kernels.Rows, sums: Launch, out: torch.Tensor) -> Chain:
        """Return ``sums``, which leaves a share of the rows in ``out``, and the gather of all the shares."""
        shares, own, fields, room = self._places.shares(key, rows, out)
        return Chain(sums, out, self._gather(shares, own, fields, party=self._places.copies, room=room))

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
        places, on_device = self._places, bool(rows.on_device)
        channel, placed = places.gathered(key, fields, room)
        share = -(-rows.most // party.replicas)
        blocks = self._blocks_for(share * sum(field.row_bytes for field in placed))

        def form(widths: tuple[int, ...]) -> Prepared:
            what = ("gather", party.size, widths, on_device)
            return places.form(what, lambda: kernels.gather_form(party, widths, on_device=on_device))

        return GatherLaunch(Job(places.channels, channel, rows, party, blocks), placed, form)

    def _combine(
        self, key: Key, rows: kernels.Rows, out: torch.Tensor, *, party: kernels.Party, out_rows: int
    ) -> CombineLaunch:
        places, dtype, on_device = self._places, out.dtype, bool(rows.on_device)
        row_bytes = out.shape[1] * out.itemsize
        channel, stage_rows = places.staged(key, rows, row_bytes, party)
        stage_bytes = rounded(stage_rows * row_bytes)
        blocks = self._blocks_for(stage_bytes * max(1, party.size - 1))
        # Not on AMD: nobody measured there that it pays.
        steps = 1 if _HIP else max(1, min(_STEPS, stage_bytes * (party.size - 1) // _STEP_BYTES))
        turns = -(-stage_bytes // (blocks * kernels.block_bytes() * steps))

        def form(width: int) -> Prepared:
            stepped = steps > 1
            what = ("combine", party.size, width, dtype, stepped, on_device)
            return places.form(
                what, lambda: kernels.combine_form(party, width, dtype, on_device=on_device, stepped=stepped)
            )

        job = Job(places.channels, channel, rows, party, blocks)
        return CombineLaunch(
            job, out, form, stage_rows=stage_rows, schedule=(steps, max(1, turns)), out_rows=out_rows
        )
