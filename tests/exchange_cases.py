"""What the ranks run for the exchange's tests: every rank can build the tensors of all ranks, so it can check."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from rocm_dp import Groups, Options, PaddingMode, Phase, RankLayout, TokenExchange, TokenPlan, reference, rocm
from rocm_dp.testing import rank_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

H = 24
MANY = ((H, torch.bfloat16), (6, torch.int32), (1, torch.int64), (3, torch.float8_e4m3fn), (5, torch.bool))


@dataclass(frozen=True)
class Grid:
    """A factorisation of the world."""

    world: int
    dp: int
    cp: int = 1

    def layout(self, rank: int) -> RankLayout:
        return RankLayout(rank, self.world, self.dp, self.cp)


@dataclass(frozen=True)
class Case:
    """One plan, dtype and transport (None: the library's choice)."""

    counts: tuple[int, ...]
    padding: PaddingMode = PaddingMode.SUM_LEN
    align: int = 1
    dtype: torch.dtype = torch.bfloat16
    transport: str | None = None

    @property
    def plan(self) -> TokenPlan:
        return TokenPlan(self.counts, self.padding, Phase.PREFILL if any(self.counts) else Phase.IDLE, self.align)


@contextmanager
def an_exchange(
    rank: int, grid: Grid, dtype: torch.dtype = torch.bfloat16, *, timeout: float = 30.0, **options: object
) -> Iterator[TokenExchange]:
    layout = grid.layout(rank)
    chosen = Options(**options)  # type: ignore[arg-type]
    with (
        Groups.create(layout, timeout=timedelta(seconds=timeout)) as groups,
        TokenExchange(layout, groups, device=rank_device(), hidden=H, dtype=dtype, options=chosen) as exchange,
    ):
        yield exchange


def any_bits(rows: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of random bits: every NaN payload, -0.0 and denormal has its chance."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (rows, width), generator=generator).bool()
    nbytes = width * dtype.itemsize
    return torch.randint(0, 256, (rows, nbytes), dtype=torch.uint8, generator=generator).view(dtype)


def numbers(rows: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def per_rank(grid: Grid, plan: TokenPlan, make: object, *args: object, copies: bool) -> list[torch.Tensor]:
    """The local tensor of every rank; ``copies``: ranks of one dp rank hold the same rows."""
    layouts = [grid.layout(rank) for rank in range(grid.world)]
    return [
        make(plan.counts[at.dp_rank], *args, seed=1000 + (at.dp_rank if copies else at.rank))  # type: ignore[operator]
        for at in layouts
    ]


def check_case(exchange: TokenExchange, grid: Grid, case: Case) -> None:
    """Check every verb for one case against the oracle, bit for bit where nothing is added."""
    check_gather(exchange, grid, case)
    check_gather_many(exchange, grid, case)
    check_scatter(exchange, case)
    if case.dtype.itemsize > 1:
        check_partial_gather(exchange, grid, case)
        check_combine(exchange, grid, case)


def check_gather(exchange: TokenExchange, grid: Grid, case: Case) -> None:
    plan, device = case.plan, exchange.device
    locals_ = per_rank(grid, plan, any_bits, H, case.dtype, copies=True)
    mine = locals_[exchange.layout.rank].to(device)
    before = mine.clone()
    got = exchange.gather(mine, plan).cpu()
    assert reference.same_bits(got, reference.gather(locals_, plan)), f"gather differs: {case}"
    assert reference.same_bits(mine, before), f"gather wrote its input: {case}"


def check_partial_gather(exchange: TokenExchange, grid: Grid, case: Case) -> None:
    plan, layout = case.plan, exchange.layout
    # The cp ranks of a dp rank hold copies of the addends, its tp ranks different ones.
    locals_ = [
        numbers(plan.counts[at.dp_rank], H, case.dtype, seed=at.dp_rank * 64 + at.tp_rank)
        for at in map(grid.layout, range(grid.world))
    ]
    mine = locals_[layout.rank].to(exchange.device)
    before = mine.clone()
    got = exchange.gather(mine, plan, partial=True).cpu()
    real = torch.zeros(plan.rows, dtype=torch.bool)
    for dp, (start, count) in enumerate(zip(plan.starts, plan.counts, strict=True)):
        real[start : start + count] = True
        addends = locals_[dp * layout.replicas : dp * layout.replicas + layout.tp_size]
        error = reference.sum_error(got[start : start + count], addends)
        assert error <= 1, f"partial gather is off by {error} x the rounding bound: {case}"
    assert not torch.any(got[~real].view(torch.uint8)), f"partial gather left padding rows unwritten: {case}"
    assert reference.same_bits(mine, before), f"partial gather wrote its input: {case}"


def check_combine(exchange: TokenExchange, grid: Grid, case: Case) -> None:
    plan, layout = case.plan, exchange.layout
    partials = [numbers(plan.rows, H, case.dtype, seed=rank) for rank in range(grid.world)]
    mine = partials[layout.rank].to(exchange.device)
    before = mine.clone()
    got = exchange.combine(mine, plan).cpu()
    own = reference.scatter_range(plan, layout.dp_rank)
    assert tuple(got.shape) == (plan.counts[layout.dp_rank], H), f"combine has the wrong shape: {case}"
    error = reference.sum_error(got, [partial[own] for partial in partials])
    assert error <= 1, f"combine is off by {error} x the rounding bound: {case}"
    assert reference.same_bits(mine, before), f"combine wrote its input: {case}"


def check_gather_many(exchange: TokenExchange, grid: Grid, case: Case) -> None:
    plan, rank = case.plan, exchange.layout.rank
    columns = [per_rank(grid, plan, any_bits, width, dtype, copies=True) for width, dtype in MANY]
    mine = [column[rank].to(exchange.device) for column in columns]
    before = [tensor.clone() for tensor in mine]
    got = [tensor.cpu() for tensor in exchange.gather_many(mine, plan)]
    want = reference.gather_many([list(tensors) for tensors in zip(*columns, strict=True)], plan)
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert reference.same_bits(a, b), f"gather_many differs in tensor {index}: {case}"
    assert all(map(reference.same_bits, mine, before)), f"gather_many wrote its input: {case}"


def check_scatter(exchange: TokenExchange, case: Case) -> None:
    full = any_bits(case.plan.rows, 7, case.dtype, seed=3)
    got = exchange.scatter(full.to(exchange.device), case.plan).cpu()
    want = reference.scatter(full, case.plan)[exchange.layout.dp_rank]
    assert reference.same_bits(got, want), f"scatter differs: {case}"


def every_verb(rank: int, grid: Grid, cases: Sequence[Case]) -> int:
    """Run all cases of one dtype and transport through one exchange; return how many were checked."""
    first = cases[0]
    # Confirming costs a round trip: once for the library's own choice is enough.
    confirm = first.transport is None
    with an_exchange(
        rank, grid, first.dtype, transport=first.transport, poison=True, confirm_calls=confirm
    ) as exchange:
        for case in cases:
            check_case(exchange, grid, case)
    return len(cases)


def explained_in_graphs(rank: int) -> None:
    """On ROCm 7.0 torch's collectives say what a capture of them needs; the others and eager calls don't."""
    bad = rocm.RocmVersions(runtime=70051831, torch_hip="7.0.51831")
    plan = TokenPlan((2, 2), PaddingMode.MAX_LEN)
    with an_exchange(rank, Grid(2, 2)) as exchange:
        calm = [verdict.reason for verdict in exchange.explain(plan)]
        assert [verdict.reason for verdict in exchange.explain(plan, graph=True)] == calm, "this is not ROCm"
        with patch.object(rocm, "probe", lambda: bad):
            assert [verdict.reason for verdict in exchange.explain(plan)] == calm
            told = {verdict.name for verdict in exchange.explain(plan, graph=True) if rocm.COST in verdict.reason}
            assert told == {"all_gather", "all_gather_v", "all_reduce"}
            [chosen] = [verdict for verdict in exchange.explain(plan, graph=True) if verdict.chosen]
            assert "; SUM_LEN in graphs is on, the HIP runtime says 7.0.51831, in [7.0.0," in chosen.reason
