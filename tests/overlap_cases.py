"""What ranks run to see that halves that take turns give what one after the other gives, and what an error does."""

from __future__ import annotations

import time

import torch
from exchange_cases import Grid, H, numbers
from peer_exchange_cases import over_peers

from rocm_dp import (
    Groups,
    Half,
    Options,
    PaddingMode,
    TokenExchange,
    TokenPlan,
    overlapped_forward,
    serial_forward,
)
from rocm_dp.errors import RocmDpError
from rocm_dp.testing import rank_device

MOST = 64  # rows of a dp rank


class Scaled:
    """A layer of whole numbers: sums are exact. It overwrites what it may, as soon as it may."""

    def __init__(self, rank: int, index: int) -> None:
        self._factor = 1.0 + (rank + index) % 3

    def attention(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Count on from what came."""
        return state + 1.0, state

    def experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Scale by what differs from rank to rank."""
        return rows * self._factor % 251

    def finish(self, kept: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Fold into the old state, whose memory is reused."""
        return kept.add_(own).remainder_(61)


def halves_and_whole(rank: int, grid: Grid, transport: str | None, steps: int, layers: int) -> int:
    """Random steps in halves that take turns, the same halves one after the other: how many differ in a bit."""
    wrong, generator = 0, torch.Generator().manual_seed(5)
    stack = [Scaled(rank, index) for index in range(layers)]
    device = rank_device()
    with (
        Groups.create(grid.layout(rank)) as groups,
        TokenExchange(
            groups.layout,
            groups,
            device=device,
            hidden=H,
            dtype=torch.float32,
            max_rows=MOST * grid.dp,
            max_local_rows=MOST,
            options=Options(transport=transport),
        ) as exchange,
    ):
        exchange.reserve(batches=2)
        dp = exchange.layout.dp_rank
        for step in range(steps):
            counts = torch.randint(0, MOST + 1, (grid.dp,), generator=generator)
            counts[torch.rand(grid.dp, generator=generator) < 0.3] //= MOST // 2
            plans = TokenPlan(tuple(counts.tolist()), PaddingMode.SUM_LEN).halves()
            rows = [numbers(p.counts[dp], H, torch.float32, seed=9 * step + i) for i, p in enumerate(plans)]
            given = [one.round().to(device) for one in rows]
            alone = [
                serial_forward(stack, Half(state.clone(), plan), exchange)
                for state, plan in zip(given, plans, strict=True)
            ]
            together = overlapped_forward(
                stack, [Half(state.clone(), plan) for state, plan in zip(given, plans, strict=True)], exchange
            )
            wrong += sum(not torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    return wrong


def captured_halves(rank: int, grid: Grid, replays: int) -> int:
    """One graph of both halves, counts on the device, replayed with others: how many differ from eager halves."""
    layout, layers, wrong = grid.layout(rank), [Scaled(rank, index) for index in range(3)], 0
    generator = torch.Generator().manual_seed(6)
    device = rank_device()
    with (
        Groups.create(layout) as groups,
        TokenExchange(
            layout,
            groups,
            device=device,
            hidden=H,
            dtype=torch.float32,
            max_rows=MOST * grid.dp,
            max_local_rows=MOST,
        ) as exchange,
    ):
        plans = [exchange.graph_plan(capacity=MOST * grid.dp, per_rank_capacity=MOST) for _ in range(2)]
        exchange.reserve(batches=2, plans=plans)
        given = [torch.zeros(MOST, H, device=device) for _ in plans]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = overlapped_forward(
                layers, [Half(g.clone(), p) for g, p in zip(given, plans, strict=True)], exchange
            )
        for step in range(replays):
            wanted, all_counts = [], []
            for index, (plan, state) in enumerate(zip(plans, given, strict=True)):
                counts = tuple(torch.randint(0, MOST + 1, (grid.dp,), generator=generator).tolist())
                all_counts.append(counts)
                plan.update(counts)
                rows = numbers(counts[layout.dp_rank], H, torch.float32, seed=9 * step + index).round()
                state.zero_()
                state[: rows.shape[0]].copy_(rows)
                wanted.append(rows.to(device))
            graph.replay()
            got = [result[: rows.shape[0]].clone() for result, rows in zip(results, wanted, strict=True)]
            eager = [
                serial_forward(layers, Half(rows, TokenPlan(counts, PaddingMode.SUM_LEN)), exchange)
                for rows, counts in zip(wanted, all_counts, strict=True)
            ]
            wrong += sum(not torch.equal(a, b) for a, b in zip(got, eager, strict=True))
        torch.cuda.synchronize()
        graph.reset()
    return wrong


class Failing(Scaled):
    """Fails on one rank, in the middle of a step."""

    def experts(self, rows: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - as a layer has it
        """Fail."""
        raise ValueError("out of experts")


def one_half_fails(rank: int, grid: Grid) -> tuple[str, str, float]:
    """Rank 1's second layer fails: what each rank was told, in the step and behind it, after how long.

    On a GPU a rank that only waits learns of it behind the step, by ``close`` at the latest.
    """
    plans = TokenPlan((4, 4), PaddingMode.SUM_LEN).halves()
    layers = [Scaled(rank, 0), (Failing if rank == 1 else Scaled)(rank, 1), *[Scaled(rank, 2)] * 20]
    said, after, start = "", "", time.monotonic()
    try:
        with over_peers(rank, grid) as exchange:
            halves: list[Half[torch.Tensor]] = [Half(torch.ones(2, H, device=exchange.device), p) for p in plans]
            try:
                overlapped_forward(layers, halves, exchange)
            except (ValueError, RocmDpError) as error:
                said = f"{type(error).__name__}: {error}"
            try:
                exchange.gather(torch.ones(2, H, device=exchange.device), plans[0])
            except RocmDpError as error:
                after = f"{type(error).__name__}: {error}"
    except RocmDpError as error:
        after = after or f"{type(error).__name__}: {error}"
    return said, after, time.monotonic() - start
