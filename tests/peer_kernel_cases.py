"""What ranks do with the peer transport, on memory of CPU ranks (interpreted) or of GPUs, several ranks on each."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from exchange_cases import Grid, any_bits, numbers
from rocm_dp.kernels import peer as kernels

from rocm_dp import Groups, PaddingMode, TokenPlan, reference
from rocm_dp.control import Op
from rocm_dp.graphs import GraphPlan
from rocm_dp.memory.channels import Channels
from rocm_dp.plan import split_rows
from rocm_dp.transports.peer import PeerTransport
from rocm_dp.transports.places import Places, Room, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rocm_dp.memory.channels import Late
    from rocm_dp.transports.launch import Launch
    from rocm_dp.transports.peer_calls import GatherLaunch

CAPACITY = 24
LONG = 100.0  # seconds; far more than any test waits
FIELDS = ((12, torch.float32), (3, torch.bfloat16), (5, torch.float8_e4m3fn), (1, torch.int64))


@dataclass(frozen=True)
class Peers:
    """A transport and where it works."""

    grid: Grid
    rank: int
    groups: Groups
    channels: Channels
    transport: PeerTransport
    device: torch.device

    def launch(self, call: Launch, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Run a launch on the current stream and return what it filled."""
        results = call.results[call.next_slot]
        stream = torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0
        call([tensor.data_ptr() for tensor in tensors], stream)
        return results

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of ``tensor`` on the device."""
        return tensor.to(self.device, copy=True)


def a_device(rank: int) -> torch.device:
    """A GPU, shared by as many ranks as need be; the CPU where Triton interprets."""
    if kernels.usable(torch.device("cpu")) == "":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@contextmanager
def peers(rank: int, grid: Grid, *, timeout: float = LONG, reserve: bool = True) -> Iterator[Peers]:
    layout, device = grid.layout(rank), a_device(rank)
    with Groups.create(layout, backend="gloo", timeout=timedelta(seconds=60)) as groups:
        channels = Channels(groups, device, timeout=timeout)
        room = Room(CAPACITY, CAPACITY) if reserve else None
        yield Peers(grid, rank, groups, channels, PeerTransport(Places(layout, channels, reserve=room)), device)
        channels.close(collective=True)


def plans(dp: int, steps: int, seed: int = 11) -> list[TokenPlan]:
    """Random counts, a third of them zero; packed, aligned and padded plans in turn."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for step in range(steps):
        align = (1, 2, 1)[step % 3]
        counts = torch.randint(0, CAPACITY // dp // align * align + 1, (dp,), generator=generator)
        counts[torch.rand(dp, generator=generator) < 0.3] = 0
        padding = (PaddingMode.SUM_LEN, PaddingMode.SUM_LEN, PaddingMode.MAX_LEN)[step % 3]
        made.append(TokenPlan(tuple(counts.tolist()), padding, align=align))
    return made


def gathers(rank: int, grid: Grid, steps: int) -> tuple[int, list[int]]:
    """Gathers of all fields at once and of each alone: how many results differ, and how far each channel came."""
    wrong = 0
    with peers(rank, grid) as at:
        for step, plan in enumerate(plans(grid.dp, steps)):
            every = [[any_bits(n, w, d, seed=step * 64 + r) for w, d in FIELDS] for r, n in enumerate(plan.counts)]
            dp = at.groups.layout.dp_rank
            mine = [at.to(tensor) for tensor in every[dp]]
            locals_ = [every[d] for d in range(grid.dp) for _ in range(at.groups.layout.replicas)]
            rows = rows_of(plan)
            together = at.launch(at.transport.gather(("fields", 0), rows, FIELDS), *mine)
            for got, want in zip(together, reference.gather_many(locals_, plan), strict=True):
                wrong += not reference.same_bits(got.cpu(), want)
            index = step % len(FIELDS)
            call = at.transport.gather((f"field {index}", 0), rows, FIELDS[index : index + 1])
            got = at.launch(call, mine[index])[0]
            wrong += not reference.same_bits(got.cpu(), reference.gather([row[index] for row in locals_], plan))
        return wrong, epochs(at)


def epochs(at: Peers) -> list[int]:
    """The epoch of every channel in use."""
    return [int(row[0]) for row in at.channels._table[1:].tolist() if row[0]]


def combines(rank: int, grid: Grid, width: int, dtype: torch.dtype, steps: int) -> int:
    """The sum in float32 in rank order, bit for bit: how many results differ."""
    wrong = 0
    with peers(rank, grid) as at:
        own = torch.empty(CAPACITY, width, dtype=dtype, device=at.device)
        for step, plan in enumerate(plans(grid.dp, steps)):
            partials = [numbers(plan.rows, width, dtype, seed=step * 64 + r) for r in range(grid.world)]
            count = plan.counts[at.groups.layout.dp_rank]
            own.fill_(float("nan"))
            call = at.transport.combine(("combine", 0), rows_of(plan), own[:count])
            got = at.launch(call, at.to(partials[rank]))[0].cpu()
            part = [partial[reference.scatter_range(plan, at.groups.layout.dp_rank)] for partial in partials]
            wrong += not right_sum(at, got, part)
            wrong += not bool(own[count:].isnan().all())
    return wrong


def right_sum(at: Peers, got: torch.Tensor, addends: Sequence[torch.Tensor]) -> bool:
    """Whether ``got`` is the sum in float32 in the order of ``addends``."""
    total = torch.zeros(got.shape)
    for addend in addends:
        total += addend.float()
    # Interpreted, a float32 is cut to bfloat16, not rounded: only there the order's own bits aren't met.
    if got.dtype is torch.bfloat16 and at.device.type == "cpu":
        return reference.sum_error(got, addends) <= 1
    return reference.same_bits(got, total.to(got.dtype))


def partial_gathers(rank: int, grid: Grid, steps: int) -> int:
    """Rows that the ranks of attention tp hold addends of: how many results differ."""
    wrong, width = 0, 12
    with peers(rank, grid) as at:
        layout = at.groups.layout
        scratch = torch.empty(CAPACITY, width, device=at.device)
        for step, plan in enumerate(plans(grid.dp, steps)):
            layouts = [grid.layout(r) for r in range(grid.world)]
            locals_ = [
                numbers(plan.counts[a.dp_rank], width, torch.float32, seed=step * 64 + a.dp_rank * 8 + a.tp_rank)
                for a in layouts
            ]
            count = plan.counts[layout.dp_rank]
            call = at.transport.gather_partial(("gather", 0), rows_of(plan), scratch[:count])
            got = at.launch(call, at.to(locals_[rank]))[0].cpu()
            want = torch.zeros(plan.rows, width)
            for dp, rows in enumerate(
                locals_[first : first + layout.tp_size] for first in range(0, grid.world, layout.replicas)
            ):
                total = torch.zeros(plan.counts[dp], width)
                for addend in rows:
                    total += addend
                want[reference.scatter_range(plan, dp)] = total
            wrong += not reference.same_bits(got, want)
    return wrong


def counts_on_the_device(rank: int, grid: Grid, steps: int) -> int:
    """One gather and one combine, made once, run with other counts each time: how many results differ."""
    wrong, width = 0, 12
    with peers(rank, grid) as at:
        layout = at.groups.layout
        plan = GraphPlan(grid.dp, capacity=CAPACITY, per_rank_capacity=CAPACITY // 2, device=at.device)
        local = torch.empty(plan.per_rank_capacity, width, device=at.device)
        partial = torch.empty(plan.capacity, width, device=at.device)
        out = torch.empty(plan.per_rank_capacity, width, device=at.device)
        gather = at.transport.gather(("gather", 0), rows_of(plan), [(width, torch.float32)])
        combine = at.transport.combine(("combine", 0), rows_of(plan), out, out_rows=plan.per_rank_capacity)
        for step in range(steps):
            counts = [min(n, plan.per_rank_capacity) for n in plans(grid.dp, step + 1)[-1].counts]
            packed = TokenPlan(tuple(counts), PaddingMode.SUM_LEN)
            plan.update(counts)
            locals_ = [numbers(n, width, torch.float32, seed=step * 64 + dp) for dp, n in enumerate(counts)]
            local.fill_(float("nan"))
            local[: counts[layout.dp_rank]] = at.to(locals_[layout.dp_rank])
            got = at.launch(gather, local)[0].cpu()
            want = torch.cat([*locals_, torch.zeros(CAPACITY - packed.rows, width)])
            wrong += not reference.same_bits(got, want)
            partials = [
                numbers(packed.rows, width, torch.float32, seed=step * 64 + 32 + r) for r in range(grid.world)
            ]
            partial.fill_(float("nan"))
            partial[: packed.rows] = at.to(partials[rank])
            out.fill_(float("nan"))
            got = at.launch(combine, partial)[0].cpu()
            mine = reference.scatter_range(packed, layout.dp_rank)
            count = counts[layout.dp_rank]
            wrong += not right_sum(at, got[:count], [p[mine] for p in partials])
            wrong += bool(got[count:].count_nonzero()) or got.shape[0] != plan.per_rank_capacity
    return wrong


def shares_are_cut_alike(rows: int, parts: int) -> bool:
    """The kernels cut shares as ``split_rows`` does."""
    return all(
        (part * rows // parts, (part + 1) * rows // parts) == cut
        for part, cut in enumerate(split_rows(rows, parts))
    )


def with_a_slow_rank(rank: int, world: int, timeout: float, slots: int, steps: int) -> int:
    """Rank 0 comes late to every call and reads late: how many results differ on this rank.

    ``slots`` 1: the kernel is told that it goes to the slot that was used last, but not that it was.
    """
    grid, wrong = Grid(world, world), 0
    with peers(rank, grid, timeout=timeout) as at:
        plan = TokenPlan((2,) * world, PaddingMode.SUM_LEN)
        call = at.transport.gather(("gather", 0), rows_of(plan), FIELDS[:1])
        for step in range(steps):
            locals_ = [any_bits(2, *FIELDS[0], seed=step * 64 + d) for d in range(world)]
            if rank == 0 and step % 2:
                time.sleep(0.1)
            if timeout < 1:
                at.channels._table[0, 0] = 0
            if slots == 1:
                one_slot(at, call)
            got = at.launch(call, at.to(locals_[rank]))[0]
            if rank == 0 and not step % 2:
                time.sleep(0.1)
            wrong += not reference.same_bits(got.cpu(), reference.gather(locals_, plan))
    return wrong


def one_slot(at: Peers, call: GatherLaunch) -> None:
    """Make the next call use slot 0 again, and hide from the kernel that it did."""
    channel = call._job.channel
    channel.slot = 1
    at.channels._table[channel.place // at.channels._table.shape[1], 2] = 1


def same_slot_again(rank: int, world: int, steps: int) -> tuple[int, int]:
    """Replay slot 0 for ever, as a graph with an odd number of calls does: how many differ, and the epochs."""
    grid, wrong = Grid(world, world), 0
    with peers(rank, grid) as at:
        plan = TokenPlan((2,) * world, PaddingMode.SUM_LEN)
        call = at.transport.gather(("gather", 0), rows_of(plan), FIELDS[:1])
        for step in range(steps):
            call._job.channel.slot = 1
            locals_ = [any_bits(2, *FIELDS[0], seed=step * 64 + d) for d in range(world)]
            got = at.launch(call, at.to(locals_[rank]))[0]
            if rank == 0:
                time.sleep(0.05)
            wrong += not reference.same_bits(got.cpu(), reference.gather(locals_, plan))
        return wrong, epochs(at)[0]


def one_rank_never_calls(rank: int, world: int) -> tuple[bool, Late | None, bool, float]:
    """Rank 1 stays away from the second call: what the others learn, whether rows are NaN, how long it took."""
    grid = Grid(world, world)
    with peers(rank, grid, timeout=1.0) as at:
        plan = TokenPlan((2,) * world, PaddingMode.SUM_LEN)
        call = at.transport.gather(("gather", 0), rows_of(plan), FIELDS[:1])
        combine = at.transport.combine(("combine", 0), rows_of(plan), torch.empty(2, 12, device=at.device))
        local, partial = at.to(any_bits(2, *FIELDS[0], seed=1)), torch.zeros(2 * world, 12, device=at.device)
        at.launch(call, local)
        at.launch(combine, partial)
        # Those that do call start together, so that only the absent one is missed.
        at.groups.control.call(Op.CONFIRM, {})
        start, spoilt = time.monotonic(), False
        if rank != 1:
            got = at.launch(call, local)[0]
            # What was queued behind it must not wait once more.
            for _ in range(20):
                at.launch(combine, partial)
            spoilt = bool(got[2:4].isnan().all()) and bool(combine.results[0][0].isnan().all())
        took = time.monotonic() - start
        return at.channels.late, at.channels.first_late(), spoilt, took


def epochs_far_on(rank: int, world: int, steps: int) -> int:
    """A channel whose epoch is about to pass 2^32: how many results differ."""
    grid, wrong = Grid(world, world), 0
    with peers(rank, grid) as at:
        plan = TokenPlan((2,) * world, PaddingMode.SUM_LEN)
        call = at.transport.gather(("gather", 0), rows_of(plan), FIELDS[:1])
        at.channels._table[call._job.channel.place // at.channels._table.shape[1], 0] = 2**32 - 2
        for step in range(steps):
            locals_ = [any_bits(2, *FIELDS[0], seed=step * 64 + d) for d in range(world)]
            got = at.launch(call, at.to(locals_[rank]))[0]
            wrong += not reference.same_bits(got.cpu(), reference.gather(locals_, plan))
        assert epochs(at) == [2**32 - 2 + steps]
    return wrong
