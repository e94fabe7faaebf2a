"""What GPU ranks run: stream order, allocations, run-ahead and graphs can only be seen on a device."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
from exchange_cases import MANY, Grid, H, an_exchange, any_bits, numbers
from lifetime_cases import MOST, flat, reserved
from peer_exchange_cases import over_peers

from rocm_dp import Groups, Options, PaddingMode, TokenExchange, TokenPlan, reference
from rocm_dp.comm_stream import CommStream
from rocm_dp.control import Op
from rocm_dp.errors import CapacityError, PeerTimeoutError, RankMismatchError
from rocm_dp.overlap import interleave
from rocm_dp.testing import rank_device

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from contextlib import AbstractContextManager

    from rocm_dp.comm_stream import Work
    from rocm_dp.memory.slots import Slot

SLEEP = 20_000_000  # device clock cycles, about 10 ms


def sleep(cycles: int) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def memory_of_forwards(rank: int, transport: str, forwards: int) -> tuple[int, float]:
    """Forwards of 61 layers in two batches of real width, the host never waiting: bytes that torch reserved more in
    them, and all that it has reserved over what is live.
    """
    tokens, hidden = 4096, 7168
    plans = TokenPlan((tokens, tokens // 2), PaddingMode.SUM_LEN).halves()
    torch.cuda.empty_cache()
    options = Options(transport=transport)
    with reserved(rank, Grid(2, 2), options, hidden=hidden, most=tokens, many=()) as exchange:

        def ones(rows: int) -> torch.Tensor:
            return torch.ones(rows, hidden, dtype=torch.bfloat16, device=exchange.device)

        locals_, partials = [ones(plan.counts[rank]) for plan in plans], [ones(plan.rows) for plan in plans]

        def layers(batch: int) -> Generator[None, None, None]:
            for _ in range(61):
                pending = exchange.gather_async(locals_[batch], plans[batch], batch=batch)
                yield
                pending.wait()
                pending = exchange.combine_async(partials[batch], plans[batch], batch=batch)
                yield
                pending.wait()

        interleave(layers(0), layers(1))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what opening used and gave back is not of the forwards
        before = torch.cuda.memory_reserved()
        for _ in range(forwards):
            interleave(layers(0), layers(1))
        grown = torch.cuda.memory_reserved() - before
        torch.cuda.synchronize()
        return grown, torch.cuda.memory_reserved() / torch.cuda.memory_allocated()


def allocations_per_call(rank: int, grid: Grid, transport: str, counts: Sequence[int]) -> dict[str, int]:
    """Device allocations that each verb makes in 20 calls after warm-up."""
    plan = TokenPlan(tuple(counts), PaddingMode.SUM_LEN)
    with reserved(rank, grid, Options(transport=transport)) as exchange:
        own = plan.counts[exchange.layout.dp_rank]
        local = any_bits(own, H, torch.bfloat16, seed=1).to(exchange.device)
        whole = any_bits(plan.rows, H, torch.bfloat16, seed=2).to(exchange.device)
        many = [any_bits(own, width, dtype, seed=3).to(exchange.device) for width, dtype in MANY]
        verbs: dict[str, Callable[[], object]] = {
            "gather": lambda: exchange.gather(local, plan),
            "combine": lambda: exchange.combine(whole, plan),
            "gather_many": lambda: exchange.gather_many(many, plan),
            "gather_async": lambda: exchange.gather_async(local, plan, batch=1).wait(),
            "combine_async": lambda: exchange.combine_async(whole, plan, batch=1).wait(),
        }
        made = {}
        for name, verb in verbs.items():
            for _ in range(3):
                verb()
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            for _ in range(20):
                verb()
            torch.cuda.synchronize()
            made[name] = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        return made


def order_of_streams(rank: int, grid: Grid, rounds: int, broken: str) -> int:
    """Inputs written late on the compute stream, dropped at once, memory churned: how many results were wrong.

    ``broken``: "join" or "ready" takes one of the two orderings away.
    """
    wrong = 0
    # What is alive by now is left out of every later collection: one of it all outlasts the device's sleep.
    gc.freeze()
    with reserved(rank, grid, Options()) as exchange:
        dp = exchange.layout.dp_rank
        for seed in range(rounds):
            plan = TokenPlan(tuple((seed * 7 + 11 * d) % MOST for d in range(grid.dp)), PaddingMode.SUM_LEN)
            locals_ = [any_bits(n, H, torch.bfloat16, seed * 64 + d) for d, n in enumerate(plan.counts)]
            late = torch.empty_like(locals_[dp], device=exchange.device)
            source = locals_[dp].to(exchange.device)
            torch.cuda.synchronize()
            sleep(SLEEP)
            late.copy_(source)
            with _without(broken):
                pending = exchange.gather_async(late, plan, batch=seed % 2)
                del late
                gc.collect()
                churn = [torch.full((plan.counts[dp], H), 7.0, dtype=torch.bfloat16, device=exchange.device)]
                got = pending.wait().clone()
            churn.clear()
            want = reference.gather(
                [locals_[d] for d in range(grid.dp) for _ in range(exchange.layout.replicas)], plan
            )
            wrong += not reference.same_bits(got.cpu(), want)
    return wrong


def _without(what: str) -> AbstractContextManager[object]:
    if what == "join":

        def join(self: CommStream, slot: Slot) -> None:
            pass

        return patch.object(CommStream, "join", join)
    if what == "ready":

        def launch(self: CommStream, slot: Slot, work: Work, *, raw: bool, records: int = 0) -> None:
            with torch.cuda.stream(self._stream):
                work(self._stream.cuda_stream)
            slot.done.record(self._stream)

        return patch.object(CommStream, "launch", launch)
    if what == "callers":

        def current(self: CommStream, *, capturing: bool) -> torch.cuda.Stream:
            return torch.cuda.current_stream(self._device)

        return patch.object(CommStream, "_current", current)
    return nullcontext()


def run_ahead(rank: int, grid: Grid, limit: int, calls: int) -> tuple[int, set[tuple[int, ...]]]:
    """Launch ``calls`` calls without one host sync behind a sleeping device: the most records in flight."""
    plan = TokenPlan((8,) * grid.dp, PaddingMode.SUM_LEN)
    most, resources = 0, set()
    with reserved(rank, grid, Options(max_in_flight=limit)) as exchange:
        local = any_bits(8, H, torch.bfloat16, seed=1).to(exchange.device)
        exchange.gather_async(local, plan).wait()
        torch.cuda.synchronize()
        sleep(SLEEP * 10)
        for call in range(calls):
            exchange.gather_async(local, plan, batch=call % 2).wait()
            most = max(most, exchange.stats().records_in_flight)
            resources.add(flat(exchange.stats()))
        torch.cuda.synchronize()
    return most, resources


def captured(rank: int, grid: Grid, transport: str, replays: int) -> int:
    """Capture a gather and a combine once, sync and on the comm stream; replay them with other values."""
    plan = TokenPlan((5,) * grid.dp if transport == "all_gather" else (5, 3), PaddingMode.SUM_LEN)
    with reserved(rank, grid, Options(transport=transport), torch.float32) as exchange:
        own = plan.counts[exchange.layout.dp_rank]
        local = torch.zeros(own, H, device=exchange.device)
        whole = torch.zeros(plan.rows, H, device=exchange.device)

        def step() -> list[torch.Tensor]:
            pending = exchange.gather_async(local, plan, batch=1)
            out = [exchange.combine(whole, plan), pending.wait()]
            return [*out, exchange.gather(local, plan)]

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            combined, on_comm, gathered = step()
        for seed in range(replays):
            locals_ = [numbers(n, H, torch.float32, seed * 64 + d) for d, n in enumerate(plan.counts)]
            wholes = [numbers(plan.rows, H, torch.float32, seed * 64 + 32 + r) for r in range(grid.world)]
            local.copy_(locals_[exchange.layout.dp_rank])
            whole.copy_(wholes[rank])
            for out in (combined, on_comm, gathered):
                out.fill_(float("nan"))
            # Over peer memory another rank's replay may fill them.
            torch.cuda.synchronize()
            exchange.groups.control.call(Op.CONFIRM, {})
            graph.replay()
            want = reference.gather(locals_, plan)
            assert reference.same_bits(gathered.cpu(), want), "gather in a graph differs"
            assert reference.same_bits(on_comm.cpu(), want), "gather on the comm stream in a graph differs"
            rows = reference.scatter_range(plan, exchange.layout.dp_rank)
            assert reference.sum_error(combined.cpu(), [w[rows] for w in wholes]) <= 1, "combine in a graph differs"
        del graph
    return replays


def capture_that_ends_with_a_wait(rank: int, grid: Grid) -> int:
    """Async calls alone in a capture, then eager calls; and eager calls waited for elsewhere, then a capture."""
    plan = TokenPlan((5, 3), PaddingMode.SUM_LEN)
    wrong = 0
    with reserved(rank, grid, Options()) as exchange:
        locals_ = [any_bits(n, H, torch.bfloat16, seed=d) for d, n in enumerate(plan.counts)]
        local, want = locals_[rank].to(exchange.device), reference.gather(locals_, plan)
        for _ in range(3):
            exchange.gather_async(local, plan).wait()
        torch.cuda.synchronize()
        graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.graph(graph):
            captured_view = exchange.gather_async(local, plan).wait()
        wrong += not reference.same_bits(exchange.gather(local, plan).cpu(), want)
        graph.replay()
        wrong += not reference.same_bits(captured_view.cpu(), want)
        pending = exchange.gather_async(local, plan)
        with torch.cuda.stream(other):
            pending.wait()
        torch.cuda.synchronize()
        second = torch.cuda.CUDAGraph()
        with torch.cuda.graph(second):
            view = exchange.gather(local, plan)
        second.replay()
        wrong += not reference.same_bits(view.cpu(), want)
        del graph, second
    return wrong


def while_another_device_is_current(rank: int, grid: Grid) -> int:
    """Every verb on this rank's device while the process's current device is the other one."""
    plan, wrong = TokenPlan((5, 3), PaddingMode.MAX_LEN), 0
    with reserved(rank, grid, Options()) as exchange:
        locals_ = [any_bits(n, H, torch.bfloat16, seed=d) for d, n in enumerate(plan.counts)]
        local, want = locals_[rank].to(exchange.device), reference.gather(locals_, plan)
        with torch.cuda.device(1 - rank):
            for _ in range(3):
                got = exchange.gather(local, plan).cpu(), exchange.gather_async(local, plan).wait()
                torch.cuda.synchronize(exchange.device)
                wrong += sum(not reference.same_bits(rows.cpu(), want) for rows in got)
    return wrong


def growing_buffers_in_a_capture(rank: int, grid: Grid) -> str:
    """A buffer that may grow is refused inside a capture, made before or not: the graph would keep the old one."""
    plan = TokenPlan((5,) * grid.dp, PaddingMode.SUM_LEN)
    with an_exchange(rank, grid) as exchange:
        local = any_bits(5, H, torch.bfloat16, seed=1).to(exchange.device)
        said = []
        for _ in range(2):
            torch.cuda.synchronize()
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device=exchange.device)
                try:
                    exchange.gather(local, plan)
                except CapacityError as error:
                    said.append(str(error))
            exchange.gather(local, plan)
        assert len(said) == 2
        return said[1]


def two_callers_two_exchanges(rank: int, grid: Grid, rounds: int) -> int:
    """Two exchanges on the same groups, called from two streams by turns, sync and async: how many were wrong."""
    wrong = 0
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]  # type: ignore[no-untyped-call]
    with (
        reserved(rank, grid, Options()) as first,
        TokenExchange(first.layout, first.groups, device=first.device, hidden=H, dtype=torch.float32) as second,
    ):
        assert first.stats().streams_made == second.stats().streams_made == 1
        for seed in range(rounds):
            plan = TokenPlan(tuple((seed * 5 + 7 * d) % MOST for d in range(grid.dp)), PaddingMode.SUM_LEN)
            for exchange, stream in ((first, streams[seed % 2]), (second, streams[1 - seed % 2])):
                locals_ = [any_bits(n, H, exchange.dtype, seed * 64 + d) for d, n in enumerate(plan.counts)]
                with torch.cuda.stream(stream):
                    mine = locals_[rank].to(exchange.device, non_blocking=True)
                    pending = None if seed % 3 else exchange.gather_async(mine, plan)
                    got = (exchange.gather(mine, plan) if pending is None else pending.wait()).cpu()
                wrong += not reference.same_bits(got, reference.gather(locals_, plan))
    return wrong


def callers_that_never_wait(rank: int, grid: Grid, rounds: int, broken: str) -> int:
    """Calls from two streams by turns, of which rank 0 holds up one: how many were wrong, or came too late.

    ``broken``: "callers" takes the order of a caller after the last one away.
    """
    plan, wrong = TokenPlan((MOST, 3), PaddingMode.SUM_LEN), 0
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]  # type: ignore[no-untyped-call]
    try:
        with reserved(rank, grid, Options(timeout=2.0)) as exchange, _without(broken):
            for seed in range(rounds):
                every = [
                    [any_bits(n, H, torch.bfloat16, seed * 64 + 8 * turn + d) for d, n in enumerate(plan.counts)]
                    for turn in range(2)
                ]
                mine = [locals_[rank].to(exchange.device) for locals_ in every]
                torch.cuda.synchronize()
                got = []
                for turn, stream in enumerate(streams):
                    with torch.cuda.stream(stream):
                        if (rank, turn) == (0, 0):
                            sleep(SLEEP)
                        got.append(exchange.gather(mine[turn], plan).clone())
                torch.cuda.synchronize()
                for there, locals_ in zip(got, every, strict=True):
                    wrong += not reference.same_bits(there.cpu(), reference.gather(locals_, plan))
    except PeerTimeoutError:
        wrong += 1
    return wrong


def spread_copies(rank: int, grid: Grid, steps: int) -> int:
    """Copies to each peer on a stream of its own, as on AMD: how many results differ, and streams are made once."""
    wrong, one_stream = 0, CommStream.lanes
    with (
        patch.object(CommStream, "lanes", lambda self, _: one_stream(self, grid.world - 1)),
        over_peers(rank, grid, transport="copy_engine") as exchange,
    ):
        made = exchange.stats()
        for step in range(steps):
            plan = TokenPlan(tuple((step * 3 + d) % 5 for d in range(grid.dp)), PaddingMode.SUM_LEN)
            locals_ = [numbers(n, H, torch.float32, seed=step * 64 + d) for d, n in enumerate(plan.counts)]
            partials = [numbers(plan.rows, H, torch.float32, seed=step * 64 + r) for r in range(grid.world)]
            got = exchange.gather_async(locals_[rank].to(exchange.device), plan).wait()
            wrong += not reference.same_bits(got.cpu(), reference.gather(locals_, plan))
            own = [p[reference.scatter_range(plan, rank)] for p in partials]
            wrong += reference.sum_error(exchange.combine(partials[rank].to(exchange.device), plan).cpu(), own) > 1
        now = exchange.stats()
        wrong += (now.streams_made, now.events_made) != (made.streams_made, made.events_made)
        wrong += made.streams_made != grid.world
    return wrong


def transports_in_a_graph(rank: int, grid: Grid, path: str, where: str) -> tuple[dict[str, int], dict[str, int]]:
    """Eager calls, then the same in a capture, by a table that has other transports for graphs: what was called.

    ``where``: the capture is on torch's stream for captures, or on the "same" stream as the eager calls.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    layout, plan = grid.layout(rank), TokenPlan((4, 4), PaddingMode.SUM_LEN)
    with (
        Groups.create(layout) as groups,
        TokenExchange(
            layout,
            groups,
            device=rank_device(),
            hidden=H,
            dtype=torch.float32,
            max_rows=MOST,
            options=Options(table=path),
        ) as exchange,
    ):
        exchange.reserve(batches=1)
        local = torch.ones(4, H, device=exchange.device)

        def calls() -> None:
            exchange.gather(local, plan)
            exchange.gather_async(local, plan).wait()

        with torch.cuda.stream(stream):
            for _ in range(3):
                calls()
        torch.cuda.synchronize()
        eager = dict(exchange.stats().calls)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream if where == "same" else None):
            calls()
        graph.replay()
        torch.cuda.synchronize()
        graph.reset()
        both = dict(exchange.stats().calls)
        return eager, {name: both[name] - eager.get(name, 0) for name in both}


def raise_with_a_call_in_flight(rank: int) -> tuple[str, float]:
    """Rank 0 launches a gather and fails; rank 1 stays away. How long the exchange held up the error."""
    plan = TokenPlan((5, 3), PaddingMode.SUM_LEN)
    layout = Grid(2, 2).layout(rank)
    groups = Groups.create(layout, timeout=timedelta(seconds=20))
    local = any_bits(plan.counts[rank], H, torch.bfloat16, seed=1).to(rank_device())
    try:
        with TokenExchange(layout, groups, device=rank_device(), hidden=H, dtype=torch.bfloat16) as exchange:
            exchange.gather(local, plan)
            torch.cuda.synchronize()
            start = time.monotonic()
            if rank == 0:
                exchange.gather_async(local, plan)
                raise ValueError("the attention of rank 0 failed")
            time.sleep(15)
            exchange.gather(local, plan)
    except (ValueError, RankMismatchError) as error:
        return str(error), time.monotonic() - start
    finally:
        torch.cuda.synchronize()
        groups.close()
    return "", 0.0
