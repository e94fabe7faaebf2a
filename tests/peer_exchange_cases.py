"""What ranks do with an exchange over peer memory: graphs' plans, lost ranks, a self-test that fails."""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from unittest.mock import patch

import torch
from bad_kernels import no_wait
from exchange_cases import MANY, Grid, H, an_exchange, any_bits, numbers
from peer_kernel_cases import a_device
from rocm_dp.kernels import copied_triton, pull_triton
from rocm_dp.kernels import peer as kernels
from rocm_dp.kernels.launch import Prepared
from rocm_dp.kernels.peer_triton import buffer_of

from rocm_dp import Groups, Options, PaddingMode, TokenExchange, TokenPlan, reference
from rocm_dp.errors import (
    CapacityError,
    ConfigError,
    PeerRefusedError,
    PeerTimeoutError,
    RankMismatchError,
    RocmDpError,
    TensorError,
    TransportRefusedError,
)
from rocm_dp.memory import links
from rocm_dp.memory.channels import Channels
from rocm_dp.transports import peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from rocm_dp.kernels.driver import Arguments


CAPACITY = 20
MOST = 10  # rows of a dp rank


@contextmanager
def over_peers(
    rank: int,
    grid: Grid,
    dtype: torch.dtype = torch.float32,
    *,
    timeout: float = 60.0,
    transport: str | None = "peer",
    **options: object,
) -> Iterator[TokenExchange]:
    """An exchange on peer memory alone, with all reserved, on a GPU shared with other ranks or on the CPU."""
    layout, device = grid.layout(rank), a_device(rank)
    chosen = Options(transport=transport, timeout=timeout, **options)  # type: ignore[arg-type]
    with (
        Groups.create(layout, backend="gloo", timeout=timedelta(seconds=60)) as groups,
        TokenExchange(
            layout,
            groups,
            device=device,
            hidden=H,
            dtype=dtype,
            max_rows=CAPACITY,
            max_local_rows=MOST,
            options=chosen,
        ) as exchange,
    ):
        exchange.reserve(batches=2)
        yield exchange


def random_counts(grid: Grid, generator: torch.Generator) -> tuple[int, ...]:
    """Zeros, one-sided and full counts, and anything between, that fit into CAPACITY."""
    while True:
        counts = torch.randint(0, MOST + 1, (grid.dp,), generator=generator)
        kind = int(torch.randint(0, 5, (), generator=generator))
        if kind == 0:
            counts[:] = 0
        elif kind == 1:
            counts[torch.rand(grid.dp, generator=generator) < 0.5] = 0
        elif kind == 2:
            counts[1:] = 0
        if int(counts.sum()) <= CAPACITY:
            return tuple(counts.tolist())


Step: TypeAlias = "Callable[[], tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]]"


def graph_steps(rank: int, grid: Grid, steps: int, run: Callable[[Step], Step]) -> int:
    """One step of every verb, made once by ``run`` and repeated with other counts: how many results differ."""
    wrong, generator = 0, torch.Generator().manual_seed(3)
    with over_peers(rank, grid) as exchange:
        plan = exchange.graph_plan(capacity=CAPACITY, per_rank_capacity=MOST)
        exchange.reserve(plans=[plan], many=MANY[:4])
        dp, device = exchange.layout.dp_rank, exchange.device
        local = torch.zeros(MOST, H, device=device)
        many = [torch.zeros(MOST, width, dtype=dtype, device=device) for width, dtype in MANY[:4]]
        partial = torch.zeros(CAPACITY, H, device=device)

        def step() -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
            pending = exchange.gather_async(local, plan, batch=1)
            return exchange.combine(partial, plan), exchange.gather_many(many, plan), pending.wait()

        again = run(step)
        before = made(exchange)
        for seed in range(steps):
            counts = random_counts(grid, generator)
            packed = TokenPlan(counts, PaddingMode.SUM_LEN)
            plan.update(counts)
            locals_ = [numbers(n, H, torch.float32, seed * 64 + d) for d, n in enumerate(counts)]
            manys = [[any_bits(n, w, t, seed * 64 + d) for w, t in MANY[:4]] for d, n in enumerate(counts)]
            partials = [numbers(packed.rows, H, torch.float32, seed * 64 + 32 + r) for r in range(grid.world)]
            local[: counts[dp]] = locals_[dp].to(device)
            for tensor, given in zip(many, manys[dp], strict=True):
                tensor[: counts[dp]] = given.to(device)
            partial[: packed.rows] = partials[rank].to(device)
            combined, gathered_many, gathered = again()
            wrong += not equal_and_zero_behind(gathered, torch.cat(locals_))
            for index, got in enumerate(gathered_many):
                wrong += not equal_and_zero_behind(got, torch.cat([one[index] for one in manys]))
            mine = [p[reference.scatter_range(packed, dp)] for p in partials]
            wrong += reference.sum_error(combined[: counts[dp]].cpu(), mine) > 1
            wrong += bool(combined[counts[dp] :].count_nonzero())
        assert made(exchange) == before, "events, bytes or threads were added"
    return wrong


def made(exchange: TokenExchange) -> tuple[object, ...]:
    """What must not grow while a graph is replayed, the calls left out."""
    stats = exchange.stats()
    on_device = torch.cuda.memory_stats()["allocated_bytes.all.current"] if exchange.device.type == "cuda" else 0
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - by the kernel's own list
    return replace(stats, calls=()), threading.active_count(), descriptors, on_device


def equal_and_zero_behind(got: torch.Tensor, want: torch.Tensor) -> bool:
    rows = want.shape[0]
    behind = got[rows:].contiguous().view(-1).view(torch.uint8)
    return reference.same_bits(got[:rows].cpu(), want) and not behind.count_nonzero()


def captured_steps(rank: int, grid: Grid, steps: int) -> int:
    """One captured step of every verb, the comm stream within, replayed with other counts each time."""
    graphs = []

    def run(step: Step) -> Step:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        graphs.append(graph)

        def again() -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
            graph.replay()
            return results

        return again

    try:
        return graph_steps(rank, grid, steps, run)
    finally:
        graphs.clear()


def eager_graph_steps(rank: int, grid: Grid, steps: int) -> int:
    """The same calls again and again, without a graph."""
    return graph_steps(rank, grid, steps, lambda step: step)


def bounds_of_a_graph_plan(rank: int, grid: Grid) -> list[str]:
    """What a GraphPlan refuses; its counts stay as they were."""
    said: list[str] = []

    def expect(kind: type[RocmDpError], call: Callable[[], object]) -> None:
        try:
            call()
        except kind as error:
            said.append(str(error))

    with over_peers(rank, grid) as exchange:
        plan = exchange.graph_plan(capacity=12, per_rank_capacity=8)
        plan.update([8] + [0] * (grid.dp - 1))
        expect(CapacityError, lambda: plan.update([9] + [0] * (grid.dp - 1)))
        expect(CapacityError, lambda: plan.update([8, 5]))
        expect(ConfigError, lambda: plan.update([1]))
        expect(ConfigError, lambda: plan.update([-1, 0]))
        expect(ConfigError, lambda: exchange.graph_plan(capacity=0, per_rank_capacity=1))
        expect(ConfigError, lambda: exchange.graph_plan(capacity=4, per_rank_capacity=5))
        expect(CapacityError, lambda: exchange.graph_plan(capacity=CAPACITY + 1, per_rank_capacity=1))
        expect(ConfigError, lambda: exchange.scatter(torch.zeros(12, H), plan))  # type: ignore[arg-type]
        assert plan.counts.tolist() == [8] + [0] * (grid.dp - 1)
        short = torch.zeros(7, H, device=exchange.device)
        expect(RocmDpError, lambda: exchange.gather(short, plan))
    return said


def refused_graph_plan(rank: int, grid: Grid) -> str:
    """Without peer memory no transport reads counts on the device."""
    with an_exchange(rank, grid) as exchange:
        try:
            exchange.graph_plan(capacity=4, per_rank_capacity=2)
        except TransportRefusedError as error:
            return str(error)
    return ""


def a_late_rank_within_the_bound(rank: int, world: int) -> bool:
    """A rank that comes late, but in time, is waited for."""
    grid = Grid(world, world)
    plan = TokenPlan((2,) * world, PaddingMode.SUM_LEN)
    with over_peers(rank, grid, timeout=30.0) as exchange:
        local = torch.full((2, H), float(rank), device=exchange.device)
        if rank == 1:
            time.sleep(0.5)
        got = exchange.gather(local, plan)
        return got[:, 0].tolist() == [float(r) for r in range(world) for _ in range(2)]


def verdicts(rank: int, grid: Grid, broken: str) -> list[tuple[str, bool, str]]:
    """What explain() says when one rank can't, or its self-test goes wrong; calls still come out right."""
    plan = TokenPlan((2, 1), PaddingMode.SUM_LEN)
    with _broken(broken if rank == 1 else ""), an_exchange(rank, grid) as exchange:
        locals_ = [any_bits(n, H, torch.bfloat16, seed=d) for d, n in enumerate(plan.counts)]
        got = exchange.gather(locals_[rank].to(exchange.device), plan)
        assert reference.same_bits(got.cpu(), reference.gather(locals_, plan))
        return [(one.name, one.chosen, one.reason) for one in exchange.explain(plan)]


@contextmanager
def _broken(what: str) -> Iterator[None]:
    honest = kernels.two_a_word
    breaks: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "": lambda: patch.object(os, "environ", os.environ),
        "another host": lambda: patch.object(links, "host_id", lambda: 4711),
        "no triton": lambda: patch.object(kernels, "peer_triton", None),
        "wrong kernels": lambda: patch.object(
            kernels, "two_a_word", lambda numbers: honest([max(0, number - 1) for number in numbers])
        ),
        "no compiler": lambda: patch.object(kernels, "look_form", side_effect=RuntimeError("no C compiler")),
        "no memory": lambda: patch.object(Channels, "_looks_per_second", side_effect=RuntimeError("out of it")),
        "an error": lambda: patch.object(Channels, "get", side_effect=RuntimeError("no such thing")),
    }
    with breaks[what]():
        yield


def two_exchanges_one_self_test(rank: int, grid: Grid) -> tuple[int, bool]:
    """The self-test runs once for the groups, whatever the number of exchanges on them."""
    layout = grid.layout(rank)
    with Groups.create(layout) as groups:
        made = 0
        honest = Channels.__init__

        def counted(self: Channels, *args: object, **kwargs: object) -> None:
            nonlocal made
            made += 1
            honest(self, *args, **kwargs)  # type: ignore[arg-type]

        with patch.object(Channels, "__init__", counted):
            for _ in range(3):
                TokenExchange(layout, groups, device="cpu", hidden=H, dtype=torch.float32).close()
        return made, groups.qualified[torch.device("cpu"), "ipc"] == {"peer": "", "copy_engine": ""}


def results_outlive_the_exchange(rank: int, grid: Grid) -> bool:
    """A result is memory of its own right: it can be read after the exchange was closed."""
    plan = TokenPlan((2,) * grid.dp, PaddingMode.SUM_LEN)
    with over_peers(rank, grid) as exchange:
        got = exchange.gather(torch.full((2, H), 7.0, device=exchange.device), plan)
    return bool((got == 7).all())


def growing(rank: int, grid: Grid) -> tuple[int, bool]:
    """Without max_rows channels grow, and results stay right."""
    right = True
    with an_exchange(rank, grid, torch.float32, transport="peer") as exchange:
        for rows in range(1, 40, 3):
            plan = TokenPlan((rows,) * grid.dp, PaddingMode.SUM_LEN)
            got = exchange.gather(torch.full((rows, H), 1.0 + rank), plan)
            right = right and got.shape[0] == plan.rows and bool((got[:rows] == 1).all())
            out = exchange.combine(torch.ones(plan.rows, H), plan)
            right = right and bool((out == grid.world).all())
        return exchange.stats().growths, right


def over_symmetric_memory(rank: int, grid: Grid) -> list[tuple[str, bool]]:
    """The same verbs over torch's symmetric memory: what explain() says, and whether results are right."""
    plan = TokenPlan(tuple(3 + dp for dp in range(grid.dp)), PaddingMode.SUM_LEN)
    with an_exchange(rank, grid, torch.float32, peer_memory="symmetric") as exchange:
        locals_ = [numbers(n, H, torch.float32, seed=dp) for dp, n in enumerate(plan.counts)]
        local = locals_[exchange.layout.dp_rank].to(exchange.device)
        right = all(reference.same_bits(exchange.gather(local, plan).cpu(), torch.cat(locals_)) for _ in range(20))
        return [(exchange.explain(plan)[0].reason, right)]


def other_slots(rank: int, grid: Grid) -> tuple[bool, bool]:
    """Rank 0 lost a turn: whether that was told, and whether all that was not right read NaN."""
    plan = TokenPlan((2,) * grid.dp, PaddingMode.SUM_LEN)
    told, honest = False, True
    try:
        with over_peers(rank, grid, timeout=1.0) as exchange:
            for turn in range(6):
                if (rank, turn) == (0, 3):
                    next(iter(exchange._calls._calls.values())).launch.repeat_slot()  # type: ignore[attr-defined]
                locals_ = [numbers(2, H, torch.float32, seed=turn * 8 + dp) for dp in range(grid.dp)]
                got = exchange.gather(locals_[rank].to(exchange.device), plan).cpu()
                for part, want in zip((got[:2], got[2:]), locals_, strict=True):
                    honest = honest and bool(torch.equal(part, want) or part.isnan().any())
    except RocmDpError:
        told = True
    return told, honest


def reserved_partial_gather(rank: int, grid: Grid) -> bool:
    """After reserve() a gather of addends makes nothing, on the ranks of the first dp rank and of the others."""
    plan = TokenPlan((3,) * grid.dp, PaddingMode.SUM_LEN)
    with over_peers(rank, grid) as exchange:
        before = made(exchange)
        got = exchange.gather(torch.ones(3, H, device=exchange.device), plan, partial=True)
        small = exchange.combine(torch.ones(plan.rows, H, device=exchange.device), plan)
        right = bool((got == exchange.layout.tp_size).all()) and bool((small == grid.world).all())
        return right and made(exchange) == before


def a_growth_is_refused(rank: int, grid: Grid) -> tuple[str, bool]:
    """What was there before a refused growth is there after it."""
    with an_exchange(rank, grid, torch.float32, transport="peer") as exchange:

        def gathered(rows: int) -> bool:
            plan = TokenPlan((rows,) * grid.dp, PaddingMode.SUM_LEN)
            got = exchange.gather(torch.full((rows, H), float(rank)), plan)
            return got[::rows, 0].tolist() == [float(dp) for dp in range(grid.dp)]

        right, said = gathered(2), ""
        with patch.object(Channels, "_allocate", side_effect=PeerRefusedError("no memory")):
            try:
                gathered(64)
            except PeerRefusedError as error:
                said = str(error)
        return said, right and gathered(2) and gathered(64) and exchange.stats().growths == 1


def results_belong_to_the_caller(rank: int, grid: Grid) -> list[object]:
    """A list that is emptied and a result of inference mode that is written stay the caller's own affair."""
    plan = TokenPlan((2,) * grid.dp, PaddingMode.SUM_LEN)
    seen: list[object] = []
    with an_exchange(rank, grid, torch.float32, transport="peer") as exchange:
        many = [torch.ones(2, 3), torch.ones(2, 1)]
        for _ in range(4):
            got = exchange.gather_many(many, plan)
            seen.append(len(got))
            got.clear()
        with torch.inference_mode():
            result = exchange.gather(torch.ones(2, H), plan)
        result.mul_(2)
        seen.append(bool((result == 2).all()))
        whole = torch.zeros(2 * H * 4 + 1, dtype=torch.uint8)
        odd = torch.frombuffer(whole.numpy(), dtype=torch.float32, count=2 * H, offset=1).view(2, H)
        for wrong in (odd, torch.empty(2, H, device="meta"), torch.ones(2, 2 * H)[:, ::2]):
            try:
                exchange.gather(wrong, plan)
            except TensorError as error:
                seen.append(str(error).split(" got ")[0])
    return seen


def pulled_combines(rank: int, grid: Grid, steps: int) -> tuple[int, int, dict[str, int]]:
    """Combines of what was written where all can read it, pushed ones between: how many differ, and the epochs."""
    wrong, generator = 0, torch.Generator().manual_seed(8)
    with over_peers(rank, grid) as exchange:
        for step in range(steps):
            plan = TokenPlan(random_counts(grid, generator), PaddingMode.SUM_LEN)
            partials = [numbers(plan.rows, H, torch.float32, seed=step * 64 + r) for r in range(grid.world)]
            given = exchange.combine_input(plan)
            given.copy_(partials[rank])
            if rank == 0:
                time.sleep(0.02)
            own = [p[reference.scatter_range(plan, exchange.layout.dp_rank)] for p in partials]
            wrong += reference.sum_error(exchange.combine(given, plan).cpu(), own) > 1
            # At once: nobody may still be reading it.
            given.fill_(float("nan"))
            pushed = exchange.combine(partials[rank].to(exchange.device), plan)
            wrong += reference.sum_error(pushed.cpu(), own) > 1
        channels = exchange._dispatch._channels
        assert channels is not None
        place = channels._made["combine input", 0].place // channels._table.shape[1]
        return wrong, int(channels._table[place, 0]), dict(exchange.stats().calls)


def overwritten_at_once(rank: int, grid: Grid, steps: int, waits: str) -> int:
    """Rank 0 owns all rows and reads slowly; the others are done at once and overwrite: how many results differ.

    ``waits`` "once": nobody waits until all have read.
    """
    wrong, plan = 0, TokenPlan((MOST, *[0] * (grid.dp - 1)), PaddingMode.SUM_LEN)

    def slow_buffer_of(*arguments: object) -> object:
        time.sleep(0.02)
        return buffer_of(*arguments)

    with over_peers(rank, grid) as exchange, ExitStack() as stack:
        if rank == 0:
            stack.enter_context(patch.object(pull_triton, "buffer_of", slow_buffer_of))
        if waits == "once":
            stack.enter_context(patch.object(pull_triton, "wait", no_wait))
        for step in range(steps):
            partials = [numbers(plan.rows, H, torch.float32, seed=step * 64 + r) for r in range(grid.world)]
            given = exchange.combine_input(plan)
            given.copy_(partials[rank])
            got = exchange.combine(given, plan).cpu()
            given.fill_(float("nan"))
            own = [p[reference.scatter_range(plan, exchange.layout.dp_rank)] for p in partials]
            wrong += reference.sum_error(got, own) > 1
            exchange.groups.control.texts("done")
    return wrong


def copies_and_kernels(rank: int, grid: Grid, steps: int) -> tuple[int, dict[str, int]]:
    """A prefill's verbs go by kernels, its async verbs by copies: how many differ, and what was called."""
    wrong, generator = 0, torch.Generator().manual_seed(9)
    with over_peers(rank, grid, transport=None) as exchange:
        for step in range(steps):
            plan = TokenPlan(random_counts(grid, generator), PaddingMode.SUM_LEN)
            dp, replicas = exchange.layout.dp_rank, exchange.layout.replicas
            locals_ = [numbers(n, H, torch.float32, seed=step * 64 + d) for d, n in enumerate(plan.counts)]
            want = reference.gather([rows for rows in locals_ for _ in range(replicas)], plan)
            mine = locals_[dp].to(exchange.device)
            wrong += not reference.same_bits(exchange.gather(mine, plan).cpu(), want)
            wrong += not reference.same_bits(exchange.gather_async(mine, plan).wait().cpu(), want)
            partials = [numbers(plan.rows, H, torch.float32, seed=step * 64 + r) for r in range(grid.world)]
            own = partials[rank].to(exchange.device)
            pushed = exchange.combine(own, plan).clone()
            wrong += not reference.same_bits(exchange.combine_async(own, plan).wait().cpu(), pushed.cpu())
            wrong += reference.sum_error(pushed.cpu(), [p[reference.scatter_range(plan, dp)] for p in partials]) > 1
        return wrong, dict(exchange.stats().calls)


def many_and_few_blocks(rank: int, grid: Grid, steps: int, times: int) -> tuple[int, int, int]:
    """Calls, and async ones with fewer blocks, in turns on the same channels: how many results differ, the most
    blocks of both. ``times``: as many rows as other cases have.
    """
    wrong, generator, most = 0, torch.Generator().manual_seed(9), {"sync": 0, "async": 0}
    honest, kind = Prepared.__call__, "sync"

    def noted(self: Prepared, blocks: int, stream: int, arguments: Arguments) -> None:
        most[kind] = max(most[kind], blocks)
        honest(self, blocks, stream, arguments)

    with (
        patch.object(peer, "_LEAST_BLOCKS", 1),  # CPU ranks have few blocks anyhow
        an_exchange(rank, grid, torch.float32, transport="peer") as exchange,
        patch.object(Prepared, "__call__", noted),
    ):
        for _ in range(steps):
            plan = TokenPlan(tuple(times * n for n in random_counts(grid, generator)), PaddingMode.SUM_LEN)
            own = exchange.layout.dp_rank
            mine = numbers(plan.counts[own], H, torch.float32, seed=own).to(exchange.device)
            addends = numbers(plan.rows, H, torch.float32, seed=rank).to(exchange.device)
            gathered, combined = exchange.gather(mine, plan).clone(), exchange.combine(addends, plan).clone()
            kind = "async"
            for _ in range(int(torch.randint(1, 3, (), generator=generator))):
                wrong += not reference.same_bits(exchange.gather_async(mine, plan).wait().cpu(), gathered.cpu())
                wrong += not reference.same_bits(exchange.combine_async(addends, plan).wait().cpu(), combined.cpu())
            kind = "sync"
        return wrong, most["sync"], most["async"]


def one_rank_by_the_async_verb(rank: int, grid: Grid, transport: str | None, verb: str) -> tuple[str, float, int]:
    """Rank 1 makes the call beside computation, so with other blocks or by copies: what each rank is told, after
    how long, and how many of its elements are neither right nor NaN.
    """
    plan = TokenPlan((MOST,) * grid.dp, PaddingMode.SUM_LEN)
    ones, start, wrong = torch.ones(MOST if verb == "gather" else plan.rows, H), time.monotonic(), 0
    with patch.object(peer, "_LEAST_BLOCKS", 1):
        try:
            with over_peers(rank, grid, transport=transport, timeout=20.0) as exchange:
                call = getattr(exchange, f"{verb}_async" if rank else verb)
                got = call(ones.to(exchange.device), plan)
                got = got.wait() if rank else got
                wrong = int(((got != (1 if verb == "gather" else grid.world)) & ~got.isnan()).sum())
        except PeerTimeoutError as error:
            return str(error), time.monotonic() - start, wrong
    return "nothing", time.monotonic() - start, wrong


def kernels_of_a_copied_gather(rank: int, grid: Grid) -> tuple[list[str], list[str]]:
    """The kernels that a gather by copies launches, before and after the exchange met a capture."""
    plan, launched = TokenPlan((2, 2), PaddingMode.SUM_LEN), list[str]()
    with over_peers(rank, grid, transport="copy_engine") as exchange:
        local = torch.ones(2, H, device=exchange.device)
        exchange.gather(local, plan)
        honest = Prepared.__call__

        def noted(self: Prepared, blocks: int, stream: int, arguments: Arguments) -> None:
            launched.append(self._interpreted.fn.__name__)  # type: ignore[union-attr]
            honest(self, blocks, stream, arguments)

        with patch.object(Prepared, "__call__", noted):
            exchange.gather(local, plan)
            before = list(launched)
            exchange._dispatch.note_capture()
            exchange.gather(local, plan)
        return before, launched[len(before) :]


def copies_of_a_late_rank(rank: int, grid: Grid, steps: int, meeting: str) -> int:
    """Rank 1 comes late with its copies: how many results differ. ``meeting`` "goes on": nobody waits for them."""
    wrong, plan = 0, TokenPlan((2, 2), PaddingMode.SUM_LEN)
    with over_peers(rank, grid, transport="copy_engine") as exchange, ExitStack() as stack:
        if meeting == "goes on":
            stack.enter_context(patch.object(copied_triton, "wait", no_wait))
        for step in range(steps):
            locals_ = [any_bits(2, H, torch.float32, seed=step * 64 + d) for d in range(2)]
            if rank == 1:
                time.sleep(0.3)
            got = exchange.gather(locals_[rank].to(exchange.device), plan).cpu()
            wrong += not reference.same_bits(got, reference.gather(locals_, plan))
    return wrong


class GivenUp(NamedTuple):
    """Whether what did not come reads NaN, what the next call said, and after how long."""

    spoilt: bool
    said: str
    seconds: float


def one_rank_gives_up(rank: int, grid: Grid, transport: str) -> GivenUp:
    """Rank 1 fails between two calls and gives up; rank 0 goes on."""
    plan, spoilt = TokenPlan((2, 2), PaddingMode.SUM_LEN), False
    with suppress(RankMismatchError), over_peers(rank, grid, transport=transport) as exchange:
        local = torch.ones(2, H, device=exchange.device)
        exchange.gather(local, plan)
        # Else the flag of the first call may be gone before it is looked at.
        exchange.groups.control.texts("both have the first")
        start = time.monotonic()
        try:
            if rank == 1:
                exchange.give_up(ValueError("half a batch was lost"))
            got = exchange.gather(local, plan)
            spoilt = bool(got[2:].isnan().all()) and bool((got[:2] == 1).all())
            exchange.gather(local, plan)
        except RocmDpError as error:
            return GivenUp(spoilt, f"{type(error).__name__}: {error}", time.monotonic() - start)
    return GivenUp(spoilt, "", 0.0)


def one_of_three_gives_up(rank: int, grid: Grid) -> GivenUp:
    """Rank 1 gives up on one exchange; ranks 0 and 2, which looks late, wait in another on the same groups."""
    plan, spoilt = TokenPlan((2, 2, 2), PaddingMode.SUM_LEN), False
    with suppress(RankMismatchError), over_peers(rank, grid) as first:
        second = TokenExchange(
            first.layout,
            first.groups,
            device=first.device,
            hidden=H,
            dtype=torch.float32,
            max_rows=CAPACITY,
            options=first.options,
        )
        local = torch.ones(2, H, device=first.device)
        second.gather(local, plan)
        first.groups.control.texts("all have the first")
        start = time.monotonic()
        try:
            if rank == 1:
                first.give_up(ValueError("a third was lost"))
            if rank == 2:
                time.sleep(1.0)
            got = second.gather(local, plan)
            spoilt = bool(got[2:4].isnan().all())
            second.gather(local, plan)
        except RocmDpError as error:
            return GivenUp(spoilt, f"{type(error).__name__}: {error}", time.monotonic() - start)
        finally:
            with suppress(RocmDpError):
                second.close()
    return GivenUp(spoilt, "", 0.0)


def no_combine_input(rank: int, grid: Grid) -> str:
    with an_exchange(rank, grid) as exchange:
        try:
            exchange.combine_input(TokenPlan((2,) * grid.dp, PaddingMode.SUM_LEN))
        except TransportRefusedError as error:
            return str(error)
    return ""
