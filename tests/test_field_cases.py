"""Failures that other projects met in the field, each as a claim about the kind of fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from exchange_cases import Case, Grid, H, an_exchange, check_case, every_verb
from lifetime_cases import layers

from rocm_dp import PaddingMode, Phase, RankLayout, TokenPlan, agree, interleave, reference
from rocm_dp.errors import TransportRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.agreement import Agreement
    from rocm_dp.testing import RankPool

    Ranks = Callable[[int], RankPool]

TRANSPORTS = (None, "all_gather_v", "all_reduce")
BOTH = (PaddingMode.SUM_LEN, PaddingMode.MAX_LEN)


# Ranks with no rows


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_rank_in_turn_may_be_idle_or_alone_busy(ranks: Ranks, transport: str | None) -> None:
    idle = [tuple(0 if d == odd else 3 + d for d in range(4)) for odd in range(4)]
    alone = [tuple(3 if d == odd else 0 for d in range(4)) for odd in range(4)]
    for padding in BOTH:
        cases = [Case(counts, padding, transport=transport) for counts in (*idle, *alone, (0, 0, 0, 0))]
        assert ranks(4).run(every_verb, Grid(4, 4), cases) == [9] * 4


def test_a_one_token_prefill_in_two_halves_leaves_one_half_empty_everywhere_but_works(ranks: Ranks) -> None:
    for first, second in ranks(3).run(one_token_in_two_halves):
        assert first + second in (0, 1)
        assert second == 0


def one_token_in_two_halves(rank: int) -> list[int]:
    halves = TokenPlan((0, 1, 0), PaddingMode.SUM_LEN).halves()
    with an_exchange(rank, Grid(3, 3)) as exchange:
        return [
            rows.shape[0]
            for rows in interleave(*(layers(exchange, half, batch, 1) for batch, half in enumerate(halves)))
        ]


def test_padding_rows_of_an_idle_rank_count_as_nothing(ranks: Ranks) -> None:
    assert ranks(2).run(garbage_in_padding_rows) == [True, True]


def garbage_in_padding_rows(rank: int) -> bool:
    """The MoE may leave anything, NaN too, in padding rows: the real rows' sums don't see it."""
    plan = TokenPlan((4, 0), PaddingMode.MAX_LEN)
    with an_exchange(rank, Grid(2, 2), poison=True) as exchange:
        partial = torch.full((plan.rows, H), float("nan"), dtype=torch.bfloat16)
        partial[reference.scatter_range(plan, 0)] = 1.0
        got = exchange.combine(partial, plan)
        return plan.total == 4 and got.shape[0] == plan.counts[rank] and bool((got == 2).all())


# Ranks that disagree


def test_an_idle_rank_takes_the_padding_and_the_graph_of_the_busy_ones(ranks: Ranks) -> None:
    """Neither from its own count nor from its own phase: all ranks hold one plan."""
    for can_graph in ([True] * 4, [True, False, True, True]):
        made = ranks(4).run(agree_on_own_facts, [7, 7, 0, 0], ["DECODE"] * 2 + ["IDLE"] * 2, 2, can_graph)
        assert len(set(made)) == 1
        assert made[0].graph == all(can_graph)
        assert made[0].plan.padding is PaddingMode.MAX_LEN
        assert made[0].plan.phase is Phase.DECODE


@pytest.mark.parametrize(
    ("phases", "overlap"),
    [
        (["PREFILL", "DECODE", "DECODE"], False),
        (["PREFILL", "IDLE", "PREFILL"], True),
        (["IDLE", "IDLE", "IDLE"], False),
    ],
)
def test_ranks_overlap_only_together(ranks: Ranks, phases: list[str], overlap: bool) -> None:
    counts = [0 if phase == "IDLE" else 3 for phase in phases]
    made = ranks(3).run(agree_on_own_facts, counts, phases, 3, [False] * 3)
    assert {one.overlap for one in made} == {overlap}


def test_ranks_drain_one_after_the_other_without_a_hang(ranks: Ranks) -> None:
    """The last requests finish on one rank: the others go on as idle ranks, call for call."""
    for left in ranks(3).run(drain):
        assert left == [6, 4, 3, 2, 1, 0]


def agree_on_own_facts(
    rank: int, counts: list[int], phases: list[str], dp: int, can_graph: list[bool]
) -> Agreement:
    layout = RankLayout(rank, len(counts), dp)
    with an_exchange(rank, Grid(len(counts), dp)) as exchange:
        return agree(
            counts[rank],
            phase=Phase[phases[rank]],
            can_overlap=True,
            can_graph=can_graph[rank],
            groups=exchange.groups,
            layout=layout,
        )


def drain(rank: int) -> list[int]:
    totals = []
    with an_exchange(rank, Grid(3, 3), poison=True) as exchange:
        for step in range(6):
            count = [[1, 0, 0, 0, 0, 0], [2, 2, 1, 0, 0, 0], [3, 2, 2, 2, 1, 0]][rank][step]
            plan = agree(
                count,
                phase=Phase.DECODE if count else Phase.IDLE,
                can_overlap=False,
                can_graph=False,
                groups=exchange.groups,
                layout=exchange.layout,
            ).plan
            totals.append(plan.total)
            check_case(exchange, Grid(3, 3), Case(plan.counts, plan.padding, plan.align))
    return totals


# Wrong sizes and meanings


@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_rows_are_gathered_once_and_summed_once_at_any_attention_tp(ranks: Ranks, dp: int) -> None:
    """Copies are not added, addends are added once: the values would be off by a factor of attention tp."""
    for gathered, summed, combined in ranks(8).run(ones_through_every_verb, dp):
        assert gathered == {1.0}
        assert summed == {8.0 / dp}
        assert combined == {8.0}


def ones_through_every_verb(rank: int, dp: int) -> tuple[set[float], set[float], set[float]]:
    plan = TokenPlan(tuple(2 + d for d in range(dp)), PaddingMode.SUM_LEN)
    with an_exchange(rank, Grid(8, dp), torch.float32) as exchange:
        ones = torch.ones(plan.counts[exchange.layout.dp_rank], H)
        copies = set(exchange.gather(ones, plan).flatten().tolist())
        addends = set(exchange.gather(ones, plan, partial=True).flatten().tolist())
        return copies, addends, set(exchange.combine(torch.ones(plan.rows, H), plan).flatten().tolist())


def test_a_large_buffer_with_few_real_rows_is_written_to_its_end(ranks: Ranks) -> None:
    cases = [Case((16384, 1), PaddingMode.MAX_LEN, transport=name) for name in ("all_gather", "all_gather_v")]
    for case in cases:
        ranks(2).run(every_verb, Grid(2, 2), [case])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_need_not_be_divisible_by_attention_tp(ranks: Ranks, transport: str | None) -> None:
    cases = [Case((rows,), PaddingMode.MAX_LEN, transport=transport) for rows in (1, 4, 12, 20, 28)]
    assert ranks(8).run(every_verb, Grid(8, 1), cases) == [5] * 8


@pytest.mark.parametrize("grid", [Grid(4, 4), Grid(8, 4), Grid(8, 2), Grid(8, 2, 2)], ids=str)
def test_odd_and_uneven_counts_are_per_dp_rank_never_per_rank(ranks: Ranks, grid: Grid) -> None:
    cases = [
        Case(counts, padding)
        for padding in BOTH
        for counts in (tuple(range(1, 2 * grid.dp, 2)), tuple(range(2 * grid.dp - 1, 0, -2)))
    ]
    assert ranks(grid.world).run(every_verb, grid, cases) == [4] * grid.world


def test_the_transport_that_carried_a_call_is_seen_and_never_a_silent_fallback(ranks: Ranks) -> None:
    for explained, calls in ranks(2).run(what_was_chosen):
        assert explained == {
            "peer": "needs GPUs, or TRITON_INTERPRET=1 on CPU ranks",
            "copy_engine": "needs GPUs, or TRITON_INTERPRET=1 on CPU ranks",
            "aiter": f"aiter is for AMD GPUs, this is cpu on torch {torch.__version__}",
            "all_gather": "needs equal sizes, the dp ranks have (3, 1)",
            "all_gather_v": "first in the table that can",
            "all_reduce": "could, but all_gather_v comes first",
        }
        assert calls == {"all_gather_v.gather": 1, "all_gather.gather": 1}


def what_was_chosen(rank: int) -> tuple[dict[str, str], dict[str, int]]:
    uneven, even = TokenPlan((3, 1), PaddingMode.SUM_LEN), TokenPlan((3, 3), PaddingMode.SUM_LEN)
    with an_exchange(rank, Grid(2, 2)) as exchange:
        for plan in (uneven, even):
            exchange.gather(torch.zeros(plan.counts[rank], H, dtype=torch.bfloat16), plan)
        return {v.name: v.reason for v in exchange.explain(uneven)}, dict(exchange.stats().calls)


def test_a_forced_transport_that_cannot_is_an_error_on_every_rank(ranks: Ranks) -> None:
    said = ranks(2).run(forced_all_gather)
    assert said == ["all_gather needs equal sizes, the dp ranks have (3, 1)"] * 2


def forced_all_gather(rank: int) -> str:
    plan = TokenPlan((3, 1), PaddingMode.SUM_LEN)
    with an_exchange(rank, Grid(2, 2), transport="all_gather") as exchange:
        try:
            exchange.gather(torch.zeros(plan.counts[rank], H, dtype=torch.bfloat16), plan)
        except TransportRefusedError as error:
            return str(error)
    return "nothing"
