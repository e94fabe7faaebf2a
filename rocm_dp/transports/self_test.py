"""What a transport over peer memory has to do right on this very machine before it is trusted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from rocm_dp.graphs import GraphPlan
from rocm_dp.memory.copies import copier_for
from rocm_dp.plan import PaddingMode, TokenPlan
from rocm_dp.transports.copy_engine import CopyEngineTransport
from rocm_dp.transports.peer import PeerTransport
from rocm_dp.transports.places import Places, Room, rows_of
from rocm_dp.transports.votes import FailedError, together, vote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rocm_dp.groups import Groups
    from rocm_dp.memory.channels import Channels
    from rocm_dp.memory.copies import Lanes
    from rocm_dp.transports.launch import Launch

_SEED = 20
# Rows that allow accesses of 16 bytes, and rows that don't.
_FIELDS = ((512, torch.bfloat16), (3, torch.int16), (6, torch.int32), (5, torch.uint8))
_SUMS = ((512, torch.bfloat16), (7, torch.float32))


@dataclass(frozen=True, slots=True)
class _Trial:
    """One launch on ``given``, what it fills, and what must be there."""

    what: str
    launch: Launch
    given: Sequence[torch.Tensor]
    results: list[torch.Tensor]
    wanted: Sequence[torch.Tensor]


class SelfTest:
    """Rounds of random counts, whose results every rank can work out alone: each bit must be as it finds.

    Sums are of small whole numbers, so that they are exact in every dtype and order. Between any two steps the
    ranks vote, so that an error on one of them stops all.
    """

    def __init__(self, groups: Groups, device: torch.device, channels: Channels, lanes: Lanes, name: str) -> None:
        self._groups, self._layout, self._device, self._channels = groups, groups.layout, device, channels
        self._generator = torch.Generator().manual_seed(_SEED)
        # Interpreted, a row takes as long as thousands on a GPU.
        on_gpu = device.type == "cuda"
        self._local_rows, self._rounds, self._calls = (384, 12, 60) if on_gpu else (6, 0, 4)
        room = Room(self._local_rows * self._layout.dp_size, self._local_rows)
        places = Places(self._layout, channels, reserve=room)
        peer = PeerTransport(places)
        self._transport: PeerTransport | CopyEngineTransport = peer
        if name == "copy_engine":
            self._transport = CopyEngineTransport(places, peer, copier_for(device), lanes)

    def run(self) -> None:
        """Raise FailedError on every rank with what was wrong, unless nothing was."""
        graph_plan = together(self._groups, self._graph_plan)
        for plan in self._plans():
            for make in (self._gather, *self._sums(), *self._on_device(graph_plan)):
                self._try(make, plan)
        self._burst()

    def _try(self, make: Callable[[TokenPlan], _Trial], plan: TokenPlan) -> None:
        trial = together(self._groups, lambda: self._poisoned(make(plan)))
        copies = together(self._groups, lambda: self._launched(trial))
        right = all(_same_bits(got, want) for got, want in zip(copies, trial.wanted, strict=True))
        wrong = "" if right else f"a wrong {trial.what} for counts {plan.counts} ({plan.padding.name})"
        if told := vote(self._groups, wrong):
            raise FailedError(f"its self-test found {told}")

    def _burst(self) -> None:
        """Many calls in a row without a look in between, some of them to the slot of the one before."""
        dp, rows, (width, dtype) = self._layout.dp_size, self._local_rows // 2, _FIELDS[0]
        plan = TokenPlan((rows,) * dp, PaddingMode.SUM_LEN)
        every = [
            [_bits(rows, width, dtype, seed=turn * dp + own) for own in range(dp)] for turn in range(self._calls)
        ]

        def step() -> list[torch.Tensor]:
            mine = [self._to(parts[self._layout.dp_rank]) for parts in every]
            launch = self._transport.gather(("burst", 0), rows_of(plan), _FIELDS[:1])
            copies = []
            for turn, local in enumerate(mine):
                if turn % 3 == 2:
                    launch.repeat_slot()
                [result] = launch.results[launch.next_slot]
                launch((local.data_ptr(),), self._stream())
                copies.append(result.clone())
            self._settle()
            return copies

        copies = together(self._groups, step)
        right = all(_same_bits(got.cpu(), torch.cat(parts)) for got, parts in zip(copies, every, strict=True))
        if told := vote(self._groups, "" if right else "a wrong gather among many in a row"):
            raise FailedError(f"its self-test found {told}")

    def _plans(self) -> Iterator[TokenPlan]:
        """Yield idle ranks, full ranks, and anything between."""
        dp, most = self._layout.dp_size, self._local_rows
        yield TokenPlan((0,) * dp, PaddingMode.SUM_LEN)
        yield TokenPlan((most,) * dp, PaddingMode.MAX_LEN)
        for turn in range(self._rounds):
            counts = torch.randint(0, most + 1, (dp,), generator=self._generator)
            counts[torch.rand(dp, generator=self._generator) < 0.25] = 0
            padding = PaddingMode.MAX_LEN if turn % 3 == 2 else PaddingMode.SUM_LEN
            yield TokenPlan(tuple(counts.tolist()), padding)

    def _gather(self, plan: TokenPlan) -> _Trial:
        """Four fields at once, the same rows on all ranks of a dp rank."""
        every = [[_bits(n, *field, seed=dp) for dp, n in enumerate(plan.counts)] for field in _FIELDS]
        given = [self._to(parts[self._layout.dp_rank]) for parts in every]
        launch = self._transport.gather(("gather", 0), rows_of(plan), _FIELDS)
        wanted = [self._to(_placed(parts, plan.starts, plan.rows)) for parts in every]
        return _Trial("gather", launch, given, launch.results[launch.next_slot], wanted)

    def _sums(self) -> Iterator[Callable[[TokenPlan], _Trial]]:
        for width, dtype in _SUMS:
            yield partial(self._combine, width=width, dtype=dtype)
            yield partial(self._partial_gather, width=width, dtype=dtype)

    def _combine(self, plan: TokenPlan, *, width: int, dtype: torch.dtype) -> _Trial:
        every = [_whole_numbers(plan.rows, width, dtype, seed=rank) for rank in range(self._layout.world_size)]
        start, count = plan.starts[self._layout.dp_rank], plan.counts[self._layout.dp_rank]
        out = torch.empty(count, width, dtype=dtype, device=self._device)
        launch = self._transport.combine((f"combine {dtype}", 0), rows_of(plan), out)
        given, wanted = self._to(every[self._layout.rank]), self._to(_sum_of(every)[start : start + count])
        return _Trial("combine", launch, [given], launch.results[launch.next_slot], [wanted])

    def _partial_gather(self, plan: TokenPlan, *, width: int, dtype: torch.dtype) -> _Trial:
        """Rows that the ranks of an attention-tp group hold addends of, its cp ranks the same ones."""
        tp, own = self._layout.tp_size, self._layout.dp_rank * self._layout.tp_size + self._layout.tp_rank
        every = [
            _whole_numbers(count, width, dtype, seed=dp * tp + turn)
            for dp, count in enumerate(plan.counts)
            for turn in range(tp)
        ]
        sums = [_sum_of(every[first : first + tp]) for first in range(0, len(every), tp)]
        given, wanted = self._to(every[own]), self._to(_placed(sums, plan.starts, plan.rows))
        scratch = torch.empty_like(given)
        launch = self._transport.gather_partial((f"partial {dtype}", 0), rows_of(plan), scratch)
        return _Trial("partial gather", launch, [given], launch.results[launch.next_slot], [wanted])

    def _graph_plan(self) -> GraphPlan:
        dp, rows = self._layout.dp_size, self._local_rows
        return GraphPlan(dp, capacity=rows * dp, per_rank_capacity=rows, device=self._device)

    def _on_device(self, graph_plan: GraphPlan) -> Iterator[Callable[[TokenPlan], _Trial]]:
        """Yield the calls whose counts are on the device, for what takes them."""
        if isinstance(self._transport, PeerTransport):
            yield partial(self._gather_on_device, graph_plan=graph_plan, peer=self._transport)
            yield partial(self._combine_on_device, graph_plan=graph_plan, peer=self._transport)

    def _gather_on_device(self, plan: TokenPlan, *, graph_plan: GraphPlan, peer: PeerTransport) -> _Trial:
        width, dtype = _SUMS[0]
        graph_plan.update(plan.counts)
        every = [_whole_numbers(self._local_rows, width, dtype, seed=dp) for dp in range(len(plan.counts))]
        real = [rows[:count] for rows, count in zip(every, plan.counts, strict=True)]
        starts = TokenPlan(plan.counts, PaddingMode.SUM_LEN).starts
        launch = peer.gather(("graph gather", 0), rows_of(graph_plan), [(width, dtype)])
        given, wanted = self._to(every[self._layout.dp_rank]), self._to(_placed(real, starts, graph_plan.rows))
        what = "gather with counts on the device"
        return _Trial(what, launch, [given], launch.results[launch.next_slot], [wanted])

    def _combine_on_device(self, plan: TokenPlan, *, graph_plan: GraphPlan, peer: PeerTransport) -> _Trial:
        width, dtype = _SUMS[0]
        graph_plan.update(plan.counts)
        world, own = self._layout.world_size, self._layout.dp_rank
        every = [_whole_numbers(graph_plan.rows, width, dtype, seed=rank) for rank in range(world)]
        start = TokenPlan(plan.counts, PaddingMode.SUM_LEN).starts[own]
        out = torch.empty(self._local_rows, width, dtype=dtype, device=self._device)
        launch = peer.combine(("graph combine", 0), rows_of(graph_plan), out, out_rows=self._local_rows)
        sums = _sum_of(every)[start : start + plan.counts[own]]
        given, wanted = self._to(every[self._layout.rank]), self._to(_placed([sums], (0,), self._local_rows))
        what = "combine with counts on the device"
        return _Trial(what, launch, [given], launch.results[launch.next_slot], [wanted])

    def _poisoned(self, trial: _Trial) -> _Trial:
        """Fill what the launch will write with 0xFF; the vote behind this step keeps peers from writing before."""
        for result in trial.results:
            result.view(-1).view(torch.uint8).fill_(0xFF)
        self._settle()
        return trial

    def _launched(self, trial: _Trial) -> list[torch.Tensor]:
        trial.launch([tensor.data_ptr() for tensor in trial.given], self._stream())
        copies = [result.clone() for result in trial.results]
        self._settle()
        if late := self._channels.first_late():
            raise TimeoutError(f"ranks {late.missing} did not come in time")
        return copies

    def _to(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, copy=True)

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0


def _bits(rows: int, width: int, dtype: torch.dtype, *, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, width * dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype)


def _whole_numbers(rows: int, width: int, dtype: torch.dtype, *, seed: int) -> torch.Tensor:
    return torch.randint(-8, 9, (rows, width), generator=torch.Generator().manual_seed(seed)).to(dtype)


def _sum_of(addends: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(addends)).float().sum(0).to(addends[0].dtype)


def _placed(parts: Sequence[torch.Tensor], starts: Sequence[int], rows: int) -> torch.Tensor:
    """Return [rows, width] with each part where it starts, and zeros elsewhere."""
    out = torch.zeros(rows, *parts[0].shape[1:], dtype=parts[0].dtype)
    for part, start in zip(parts, starts, strict=True):
        out[start : start + part.shape[0]] = part
    return out


def _same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (got, want)))
