"""What ranks run to show that nothing is made per call and nothing is freed too early."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from exchange_cases import MANY, Case, Grid, H, an_exchange, any_bits, check_combine, check_gather

from rocm_dp import (
    Options,
    PaddingMode,
    Phase,
    RankLayout,
    TokenExchange,
    TokenPlan,
    confirm,
    interleave,
    reference,
)
from rocm_dp.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    DtypeError,
    RocmDpError,
    SlotBusyError,
    StaleViewError,
    TensorError,
)
from rocm_dp.groups import Groups
from rocm_dp.testing import rank_device

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from rocm_dp import ExchangeStats

MOST = 40


def flat(stats: ExchangeStats) -> tuple[int, ...]:
    return (
        stats.slots,
        stats.buffers_made,
        stats.buffer_bytes,
        stats.events_made,
        stats.events_held,
        stats.streams_made,
        stats.pendings,
    )


@contextmanager
def reserved(
    rank: int,
    grid: Grid,
    options: Options,
    dtype: torch.dtype = torch.bfloat16,
    *,
    hidden: int = H,
    most: int = MOST,
    many: Sequence[tuple[int, torch.dtype]] = MANY,
) -> Iterator[TokenExchange]:
    """An exchange with everything reserved for two batches of at most ``most`` rows a dp rank."""
    layout = grid.layout(rank)
    most = -(-most // layout.replicas) * layout.replicas
    with (
        Groups.create(layout) as groups,
        TokenExchange(
            layout,
            groups,
            device=rank_device(),
            hidden=hidden,
            dtype=dtype,
            max_rows=most * grid.dp,
            max_local_rows=most,
            options=options,
        ) as exchange,
    ):
        exchange.reserve(batches=2, many=many)
        yield exchange


def random_plans(grid: Grid, steps: int, seed: int) -> list[TokenPlan]:
    generator = torch.Generator().manual_seed(seed)
    plans = []
    for step in range(steps):
        counts = torch.randint(0, MOST + 1, (grid.dp,), generator=generator)
        counts[torch.rand(grid.dp, generator=generator) < 0.2] = 0
        padding = PaddingMode.MAX_LEN if step % 3 else PaddingMode.SUM_LEN
        plans.append(TokenPlan(tuple(counts.tolist()), padding, Phase.PREFILL if counts.any() else Phase.IDLE))
    return plans


def resources_over_steps(rank: int, grid: Grid, options: Options, steps: int) -> list[tuple[int, ...]]:
    """Every verb, sync and async, in both batches, with other counts each step: the resources after each step."""
    with reserved(rank, grid, options) as exchange:
        seen = [flat(exchange.stats())]
        for plan in random_plans(grid, steps, seed=5):
            one_step(exchange, plan)
            seen.append(flat(exchange.stats()))
    assert exchange.stats().events_held == 0
    return seen


def one_step(exchange: TokenExchange, plan: TokenPlan) -> None:
    own = plan.counts[exchange.layout.dp_rank]
    local = any_bits(own, H, torch.bfloat16, seed=exchange.layout.dp_rank).to(exchange.device)
    whole = any_bits(plan.rows, H, torch.bfloat16, seed=9).to(exchange.device)
    many = [any_bits(own, width, dtype, seed=1).to(exchange.device) for width, dtype in MANY]
    exchange.gather(local, plan)
    exchange.combine(whole, plan)
    exchange.gather_many(many, plan)
    exchange.gather_many_async(many, plan, batch=1).wait()
    gathers = [exchange.gather_async(local, plan, batch=batch) for batch in (0, 1)]
    for pending in gathers:
        pending.wait()
    for batch in (1, 0):
        exchange.combine_async(whole, plan, batch=batch).wait()


def errors_of(rank: int, grid: Grid) -> dict[str, str]:
    """The error text of every misuse; the exchange works before and after each."""
    plan = TokenPlan((3,) * grid.dp, PaddingMode.SUM_LEN)
    said: dict[str, str] = {}

    def expect(name: str, kind: type[RocmDpError], call: Callable[[], object]) -> None:
        try:
            call()
        except kind as error:
            said[name] = str(error)

    with an_exchange(rank, grid) as exchange:
        local = torch.zeros(3, H, dtype=torch.bfloat16, device=exchange.device)
        first = exchange.gather_async(local, plan)
        expect("busy", SlotBusyError, lambda: exchange.gather_async(local, plan))
        expect("busy sync", SlotBusyError, lambda: exchange.gather(local, plan))
        first.wait()
        first.wait()
        exchange.gather(local, plan)
        expect("stale", StaleViewError, first.wait)
        expect("dtype", ValueError, lambda: exchange.gather(local.float(), plan))  # type: ignore[arg-type]
        expect("rank", ValueError, lambda: exchange.gather(local[0], plan))  # type: ignore[arg-type]
        wide = torch.zeros(3, 2 * H, dtype=torch.bfloat16, device=exchange.device)
        expect("strides", ValueError, lambda: exchange.gather(wide[:, ::2], plan))  # type: ignore[arg-type]
        expect("partial rows", ValueError, lambda: exchange.combine(local[:1], plan))  # type: ignore[arg-type]
        expect("dp", ConfigError, lambda: exchange.gather(local, TokenPlan((3,), PaddingMode.SUM_LEN)))
        expect("reserve", ConfigError, exchange.reserve)
        expect("nothing", ValueError, lambda: exchange.gather_many([], plan))  # type: ignore[arg-type]
        for name, misuse in aliases(exchange, plan).items():
            expect(name, TensorError, misuse)
        expect("conjugate", TensorError, lambda: exchange.gather_many([conjugate(exchange)], plan))
        expect("list", TensorError, lambda: exchange.tp_all_reduce([1.0]))  # type: ignore[arg-type]
        expect("0-d", TensorError, lambda: exchange.tp_all_gather(torch.zeros((), device=exchange.device)))
        assert exchange.gather(local, plan).shape == (plan.rows, H)
    expect("closed", ClosedError, lambda: exchange.gather(local, plan))
    for name, call in {
        "closed tp": lambda: exchange.tp_all_reduce(local),
        "closed scatter": lambda: exchange.scatter(local, plan),
        "closed groups": lambda: confirm(plan, groups=exchange.groups),
    }.items():
        expect(name, ClosedError, call)
    expect("closed pending", StaleViewError, first.wait)
    with an_exchange(rank, grid, torch.float8_e4m3fn) as exchange:
        rows = torch.zeros(plan.rows, H, dtype=torch.float8_e4m3fn, device=exchange.device)
        expect("fp8 combine", DtypeError, lambda: exchange.combine(rows, plan))
        expect("fp8 partial", DtypeError, lambda: exchange.gather(rows[:3], plan, partial=True))
    return said


def aliases(exchange: TokenExchange, plan: TokenPlan) -> dict[str, Callable[[], object]]:
    """Calls whose input is a view of the buffer that they write."""
    ones = torch.ones(3, H, dtype=torch.bfloat16, device=exchange.device)
    own = exchange.scatter(exchange.gather(ones, plan), plan)
    message = exchange.gather_many([own.clone()], plan)[0]
    return {
        "alias gather": lambda: exchange.gather(own, plan),
        "alias many": lambda: exchange.gather_many([exchange.scatter(message, plan)], plan),
    }


def conjugate(exchange: TokenExchange) -> torch.Tensor:
    return torch.zeros(3, 1, dtype=torch.complex64, device=exchange.device).conj()


def columns_of_any_stride(rank: int, grid: Grid) -> bool:
    """[N, 1] tensors are contiguous with any stride in their last dimension: column-major scales, say."""
    plan = TokenPlan(tuple(3 + d for d in range(grid.dp)), PaddingMode.SUM_LEN)
    with an_exchange(rank, grid) as exchange:
        own = plan.counts[rank]
        scales = torch.arange(own * 3.0, device=exchange.device).view(own, 3).t().contiguous().t()[:, :1]
        scales = torch.empty_strided((own, 1), (1, own), device=exchange.device).copy_(scales)
        assert scales.is_contiguous()
        assert scales.stride(1) != 1
        [got] = exchange.gather_many([scales], plan)
        want = torch.cat([torch.arange(n, dtype=torch.float32)[:, None] * 3 for n in plan.counts])
        return torch.equal(got.cpu(), want)


def calls_counted(rank: int, grid: Grid) -> dict[str, int]:
    """A refused call isn't counted, and leaves the last result as it was."""
    plan = TokenPlan((3,) * grid.dp, PaddingMode.SUM_LEN)
    with an_exchange(rank, grid, poison=True) as exchange:
        local = torch.ones(3, H, dtype=torch.bfloat16, device=exchange.device)
        pending = exchange.gather_async(local, plan)
        for _ in range(3):
            try:
                exchange.gather(local, plan)
            except SlotBusyError:
                continue
        assert bool((pending.wait() == 1).all())
        return dict(exchange.stats().calls)


def many_exchanges_on_the_same_groups(rank: int, grid: Grid) -> tuple[int, int, bool]:
    """Exchanges on the same groups share one comm stream, and the last one to close ends it."""
    layout = grid.layout(rank)
    plan = TokenPlan((2,) * grid.dp, PaddingMode.SUM_LEN)
    with Groups.create(layout) as groups:
        made = [
            TokenExchange(layout, groups, device=rank_device(), hidden=H, dtype=dtype)
            for dtype in (torch.bfloat16, torch.float16)
        ]
        pendings = [
            exchange.gather_async(
                torch.full((2, H), rank + 1.0, dtype=exchange.dtype, device=exchange.device), plan
            )
            for exchange in made
        ]
        right = all(pending.wait()[:, 0].tolist() == [1, 1, 2, 2] for pending in pendings)
        shared = len(groups.attached)
        made[0].close()
        again = made[1].gather(torch.ones(2, H, dtype=torch.float16, device=made[1].device), plan)
        right = right and bool((again == 1).all())
        made[1].close()
        return shared, len(groups.attached), right


def reserve_spares_results(rank: int, grid: Grid, options: Options) -> bool:
    """reserve() on an exchange in use leaves the results as they are; nonsense is refused."""
    plan = TokenPlan((2,) * grid.dp, PaddingMode.SUM_LEN)
    with reserved(rank, grid, options) as exchange:
        ones = torch.ones(2, H, dtype=torch.bfloat16, device=exchange.device)
        pending = exchange.gather_async(ones, plan)
        result = pending.wait()
        exchange.reserve(batches=3, many=MANY)
        try:
            exchange.reserve(batches=0)
        except ConfigError:
            return bool((pending.wait() == 1).all() and (result == 1).all())
    return False


def other_options_on_the_same_groups(rank: int, grid: Grid) -> str:
    with an_exchange(rank, grid) as first:
        try:
            TokenExchange(
                first.layout,
                first.groups,
                device=first.device,
                hidden=H,
                dtype=first.dtype,
                options=Options(timeout=9),
            )
        except ConfigError as error:
            return str(error)
    return ""


def capacity_errors(rank: int, grid: Grid, options: Options) -> list[str]:
    said = []
    with reserved(rank, grid, options) as exchange:
        bytes_before = exchange.stats().buffer_bytes
        for count in (MOST * grid.dp + 1, MOST + 1):
            plan = TokenPlan((count,) + (0,) * (grid.dp - 1), PaddingMode.SUM_LEN)
            rows = torch.zeros(plan.rows, H, dtype=torch.bfloat16, device=exchange.device)
            own = rows[: plan.counts[exchange.layout.dp_rank]]
            calls: list[Callable[[], object]] = [
                partial(exchange.combine, rows, plan),
                partial(exchange.gather, own, plan),
                partial(exchange.gather_many, [own], plan),
            ]
            for call in calls:
                try:
                    call()
                except CapacityError as error:
                    said.append(str(error))
        assert exchange.stats().buffer_bytes == bytes_before
    return said


def growth(rank: int, grid: Grid) -> tuple[int, int, int]:
    """Rising counts without max_rows: right results, and few growths, each buffer freed once outgrown."""
    with an_exchange(rank, grid, poison=True) as exchange:
        for rows in range(1, 200, 3):
            case = Case(tuple(rows + d for d in range(grid.dp)))
            check_gather(exchange, grid, case)
            check_combine(exchange, grid, case)
        stats = exchange.stats()
        return stats.growths, stats.buffer_bytes, stats.events_held


def input_outlives_the_call(rank: int, grid: Grid) -> bool:
    """Drop the input right after the async call: it lives until wait, and not longer."""
    plan = TokenPlan(tuple(range(1, grid.dp + 1)), PaddingMode.SUM_LEN)
    with an_exchange(rank, grid) as exchange:
        local = any_bits(plan.counts[rank], H, torch.bfloat16, seed=1000 + rank).to(exchange.device)
        locals_ = [any_bits(n, H, torch.bfloat16, seed=1000 + r) for r, n in enumerate(plan.counts)]
        alive = weakref.ref(local.untyped_storage())
        keep = weakref.ref(local)
        pending = exchange.gather_async(local, plan)
        del local
        gc.collect()
        held = keep() is not None or alive() is not None
        right = reference.same_bits(pending.wait().cpu(), reference.gather(locals_, plan))
        gc.collect()
        return held and right and keep() is None


def two_batches_equal_one_after_the_other(rank: int, grid: Grid, steps: int) -> int:
    """Interleaved halves give, bit for bit, what the same halves give one after the other."""
    compared = 0
    with an_exchange(rank, grid, poison=True) as exchange:
        for step, plan in enumerate(random_plans(grid, steps, seed=77)):
            halves = plan.halves()
            alone = [interleave(layers(exchange, half, batch, step))[0] for batch, half in enumerate(halves)]
            alone = [rows.clone() for rows in alone]
            together = interleave(*(layers(exchange, half, batch, step) for batch, half in enumerate(halves)))
            for a, b in zip(alone, together, strict=True):
                assert reference.same_bits(a, b), plan
                compared += 1
    return compared


def layers(exchange: TokenExchange, plan: TokenPlan, batch: int, step: int) -> Generator[None, None, torch.Tensor]:
    own = plan.counts[exchange.layout.dp_rank]
    generator = torch.Generator().manual_seed(step * 2 + batch)
    rows = torch.randn(own, H, generator=generator).to(torch.bfloat16).to(exchange.device)
    for _ in range(3):
        pending = exchange.gather_async(rows, plan, batch=batch)
        yield
        everyone = pending.wait() * 0.5
        pending = exchange.combine_async(everyone, plan, batch=batch)
        yield
        rows = pending.wait() + 1
    return rows


def inference_mode_does_not_stick(rank: int, grid: Grid) -> bool:
    """Buffers made inside inference mode are written outside it, and the other way round."""
    plan = TokenPlan((2,) * grid.dp, PaddingMode.SUM_LEN)
    with an_exchange(rank, grid) as exchange:
        local = torch.ones(2, H, dtype=torch.bfloat16, device=exchange.device)
        with torch.inference_mode():
            exchange.gather(local, plan)
        exchange.gather(local, plan)
        exchange.combine(torch.ones(plan.rows, H, dtype=torch.bfloat16, device=exchange.device), plan)
        with torch.inference_mode():
            summed = exchange.combine(torch.ones(plan.rows, H, dtype=torch.bfloat16, device=exchange.device), plan)
        learned = torch.ones(2, H, dtype=torch.bfloat16, device=exchange.device, requires_grad=True)
        return bool((summed == grid.world).all()) and not exchange.gather(learned, plan).requires_grad


def group_verbs(rank: int, world: int, dp: int, cp: int, moe_dp: int) -> list[str]:
    """The thin verbs over tp, cp and the MoE-cp group against sums made here; returns what was wrong."""
    layout = RankLayout(rank, world, dp, cp, moe_dp)
    members = {
        "tp": layout.tp_ranks(layout.dp_rank, layout.cp_rank),
        "cp": layout.cp_ranks(layout.dp_rank, layout.tp_rank),
        "moe_cp": layout.moe_dp_ranks(),
    }
    wrong = []
    with (
        Groups.create(layout) as groups,
        TokenExchange(layout, groups, device=rank_device(), hidden=H, dtype=torch.float32) as exchange,
    ):
        for name, ranks in members.items():
            rows = 2 * len(ranks)
            each = {r: torch.arange(rows * 3.0).view(rows, 3) + 100 * r for r in ranks}
            mine = each[rank].to(exchange.device)
            total = torch.stack(list(each.values())).sum(0)
            own = slice(2 * ranks.index(rank), 2 * ranks.index(rank) + 2)
            reduced = getattr(exchange, f"{name}_all_reduce")(mine).cpu()
            scattered = getattr(exchange, f"{name}_reduce_scatter")(mine).cpu()
            gathered = getattr(exchange, f"{name}_all_gather")(mine).cpu()
            for verb, got, want in (
                ("all_reduce", reduced, total),
                ("reduce_scatter", scattered, total[own]),
                ("all_gather", gathered, torch.cat(list(each.values()))),
            ):
                if not torch.equal(got, want):
                    wrong.append(f"{name}_{verb}")
            if not torch.equal(mine.cpu(), each[rank]):
                wrong.append(f"{name} wrote its input")
    return wrong
