"""routing: a pure choice of one transport, with a reason for each that was not taken."""

from __future__ import annotations

import re
from itertools import permutations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rocm_dp.errors import ConfigError, TransportRefusedError
from rocm_dp.graphs import GraphPlan
from rocm_dp.measured import Measured, MeasuredTable
from rocm_dp.plan import PaddingMode, Phase, TokenPlan
from rocm_dp.routing import (
    NAMES,
    NEED_PROOF,
    Facts,
    Table,
    TransportVerdict,
    Use,
    choose,
    chosen_name,
    overlap_verdict,
    refusal,
)

ANY = settings(max_examples=100, deadline=None)
ORDERS = [order for size in (1, 2, len(NAMES)) for order in permutations(NAMES, size)]
OTHERS = tuple(name for name in NAMES if name != "peer")
QUALIFIED = Facts(qualified=NEED_PROOF)
NO_LINK = Facts(unqualified=tuple((name, "has no link to rank 1") for name in NEED_PROOF))
NO_PROOF = "has not passed its self-test here"


def graph_plan(dp_size: int, rows: int, spare: int) -> GraphPlan:
    return GraphPlan(dp_size, capacity=rows + spare, per_rank_capacity=rows, device=torch.device("cpu"))


TOKEN_PLANS = st.builds(
    TokenPlan,
    st.lists(st.integers(0, 9), min_size=1, max_size=8).map(tuple),
    st.sampled_from(PaddingMode),
    align=st.integers(1, 6),
)
GRAPH_PLANS = st.builds(graph_plan, st.integers(1, 8), st.integers(1, 9), st.integers(0, 9))
PLANS = TOKEN_PLANS | GRAPH_PLANS
REFUSED = st.tuples(
    st.sampled_from(NEED_PROOF), st.sampled_from(["has no link to rank 1", "read back other bytes"])
)
FACTS = st.builds(
    Facts,
    replicas=st.integers(1, 8),
    qualified=st.sampled_from([(), ("peer",), ("copy_engine",), ("aiter",), NEED_PROOF]),
) | st.builds(Facts, replicas=st.integers(1, 8), unqualified=st.lists(REFUSED, max_size=1).map(tuple))
TABLES = st.sampled_from(ORDERS).map(Table)


def can_carry(name: str, plan: TokenPlan | GraphPlan, facts: Facts) -> bool:
    """Kernels over peer memory carry all when they were proven; for all others the counts must lie on the host.

    The equal-size collective is particular besides: equal sizes, each cut into equal parts by its ranks.
    """
    if name in NEED_PROOF and name not in facts.qualified:
        return False
    if isinstance(plan, GraphPlan):
        return name == "peer"
    equal = all(size == plan.sizes[0] for size in plan.sizes)
    return name not in ("aiter", "all_gather") or (equal and plan.sizes[0] % facts.replicas == 0)


def verdict(name: str, plan: TokenPlan | GraphPlan, facts: Facts) -> TransportVerdict:
    """What the built-in table says of transport ``name``."""
    [found] = [one for one in choose(plan, facts, Table()) if one.name == name]
    return found


def test_peer_memory_comes_first_and_all_reduce_last() -> None:
    assert Table().order == NAMES == ("peer", "copy_engine", "aiter", "all_gather", "all_gather_v", "all_reduce")


@ANY
@given(plan=PLANS, facts=FACTS, table=TABLES)
def test_the_first_transport_of_the_table_that_can_is_chosen_and_no_other(
    plan: TokenPlan | GraphPlan, facts: Facts, table: Table
) -> None:
    able = [name for name in table.order if can_carry(name, plan, facts)]
    assert [verdict.name for verdict in choose(plan, facts, table) if verdict.chosen] == able[:1]


@ANY
@given(plan=PLANS, facts=FACTS, table=TABLES)
def test_every_transport_of_the_table_is_judged_in_order_with_a_reason(
    plan: TokenPlan | GraphPlan, facts: Facts, table: Table
) -> None:
    verdicts = choose(plan, facts, table)
    assert tuple(verdict.name for verdict in verdicts) == table.order
    assert all(verdict.reason for verdict in verdicts)


@ANY
@given(plan=PLANS, facts=FACTS, table=TABLES)
def test_equal_inputs_get_equal_answers(plan: TokenPlan | GraphPlan, facts: Facts, table: Table) -> None:
    if isinstance(plan, GraphPlan):
        rows = plan.per_rank_capacity
        again: TokenPlan | GraphPlan = graph_plan(plan.counts.numel(), rows, plan.capacity - rows)
    else:
        again = TokenPlan(plan.counts, plan.padding, plan.phase, plan.align)
    verdicts = choose(plan, facts, table)
    same = Facts(facts.replicas, tuple(facts.qualified), tuple(facts.unqualified))
    assert choose(again, same, Table(tuple(table.order))) == verdicts


@ANY
@given(plan=GRAPH_PLANS, counts=st.lists(st.integers(0, 1), min_size=8, max_size=8), facts=FACTS, table=TABLES)
def test_the_counts_of_a_graph_plan_change_no_answer(
    plan: GraphPlan, counts: list[int], facts: Facts, table: Table
) -> None:
    before = choose(plan, facts, table)
    assume(sum(counts[: plan.counts.numel()]) <= plan.capacity)
    plan.update(counts[: plan.counts.numel()])
    assert choose(plan, facts, table) == before


@ANY
@given(plan=PLANS, replicas=st.integers(1, 8))
def test_proven_peer_memory_carries_every_plan(plan: TokenPlan | GraphPlan, replicas: int) -> None:
    facts = Facts(replicas, qualified=("peer",))
    assert verdict("peer", plan, facts) == TransportVerdict(
        "peer", chosen=True, reason="first in the table that can"
    )
    assert chosen_name(choose(plan, facts, Table())) == "peer"


@ANY
@given(plan=PLANS, replicas=st.integers(1, 8))
def test_peer_memory_that_was_not_proven_is_refused_with_what_the_self_test_said(
    plan: TokenPlan | GraphPlan, replicas: int
) -> None:
    assert refusal("peer", plan, Facts(replicas)) == NO_PROOF
    assert refusal("peer", plan, Facts(replicas, unqualified=(("pigeon", "is asleep"),))) == NO_PROOF
    assert refusal("peer", plan, Facts(replicas, qualified=("pigeon",))) == NO_PROOF
    assert refusal("peer", plan, Facts(replicas, unqualified=NO_LINK.unqualified)) == "has no link to rank 1"


@ANY
@given(plan=GRAPH_PLANS, facts=FACTS)
def test_a_graph_plan_is_refused_by_every_transport_that_needs_counts_on_the_host(
    plan: GraphPlan, facts: Facts
) -> None:
    for name in OTHERS:
        if name in NEED_PROOF and name not in facts.qualified:
            continue
        assert verdict(name, plan, facts) == TransportVerdict(name, chosen=False, reason="needs counts on the host")


@pytest.mark.parametrize(("facts", "reason"), [(Facts(), NO_PROOF), (NO_LINK, "has no link to rank 1")])
def test_without_proven_peer_memory_a_graph_plan_is_an_error_with_every_reason(facts: Facts, reason: str) -> None:
    others = "; ".join(f"{name} needs counts on the host" for name in NAMES if name not in NEED_PROOF)
    first = "; ".join(f"{name} {reason}" for name in NEED_PROOF)
    with pytest.raises(TransportRefusedError, match="^" + re.escape(f"{first}; {others}") + "$"):
        chosen_name(choose(graph_plan(2, 4, 4), facts, Table()))


@pytest.mark.parametrize(("facts", "reason"), [(Facts(), NO_PROOF), (NO_LINK, "has no link to rank 1")])
def test_without_proven_peer_memory_equal_sizes_take_the_equal_size_collective(facts: Facts, reason: str) -> None:
    plan = TokenPlan((3, 5), PaddingMode.MAX_LEN)
    assert choose(plan, facts, Table()) == (
        TransportVerdict("peer", chosen=False, reason=reason),
        TransportVerdict("copy_engine", chosen=False, reason=reason),
        TransportVerdict("aiter", chosen=False, reason=reason),
        TransportVerdict("all_gather", chosen=True, reason="first in the table that can"),
        TransportVerdict("all_gather_v", chosen=False, reason="could, but all_gather comes first"),
        TransportVerdict("all_reduce", chosen=False, reason="could, but all_gather comes first"),
    )


def test_with_proven_peer_memory_the_others_could_or_say_why_not() -> None:
    assert choose(TokenPlan((3, 5), PaddingMode.SUM_LEN), QUALIFIED, Table()) == (
        TransportVerdict("peer", chosen=True, reason="first in the table that can"),
        TransportVerdict("copy_engine", chosen=False, reason="could, but peer comes first"),
        TransportVerdict("aiter", chosen=False, reason="needs equal sizes, the dp ranks have (3, 5)"),
        TransportVerdict("all_gather", chosen=False, reason="needs equal sizes, the dp ranks have (3, 5)"),
        TransportVerdict("all_gather_v", chosen=False, reason="could, but peer comes first"),
        TransportVerdict("all_reduce", chosen=False, reason="could, but peer comes first"),
    )


def test_unequal_sizes_are_refused_by_all_gather_with_the_sizes() -> None:
    plan = TokenPlan((3, 5), PaddingMode.SUM_LEN)
    assert verdict("all_gather", plan, Facts()) == TransportVerdict(
        "all_gather", chosen=False, reason="needs equal sizes, the dp ranks have (3, 5)"
    )
    assert chosen_name(choose(plan, Facts(), Table())) == "all_gather_v"


def test_sizes_that_the_ranks_of_a_dp_rank_cannot_share_equally_are_refused_with_both_numbers() -> None:
    plan = TokenPlan((3, 5), PaddingMode.MAX_LEN)
    assert verdict("all_gather", plan, Facts(replicas=4)) == TransportVerdict(
        "all_gather", chosen=False, reason="needs sizes divisible by the 4 ranks of a dp rank, got 5"
    )
    assert verdict("all_gather", TokenPlan((3, 5), PaddingMode.MAX_LEN, align=4), Facts(replicas=4)).chosen


@pytest.mark.parametrize(
    ("facts", "name"), [(Facts(replicas=4), "all_gather"), (Facts(4, qualified=("peer",)), "peer")]
)
def test_a_step_without_rows_is_carried(facts: Facts, name: str) -> None:
    for padding in PaddingMode:
        assert chosen_name(choose(TokenPlan((0, 0), padding), facts, Table())) == name


@pytest.mark.parametrize("order", ORDERS, ids=",".join)
def test_the_table_decides_among_those_that_can(order: tuple[str, ...]) -> None:
    plan = TokenPlan((4, 4), PaddingMode.MAX_LEN)
    assert chosen_name(choose(plan, QUALIFIED, Table(order))) == order[0]


@pytest.mark.parametrize("order", [order for order in ORDERS if not set(order) <= set(NEED_PROOF)], ids=",".join)
def test_the_table_decides_among_the_others_where_peer_memory_was_not_proven(order: tuple[str, ...]) -> None:
    plan = TokenPlan((4, 4), PaddingMode.MAX_LEN)
    first, *_ = (name for name in order if name not in NEED_PROOF)
    assert chosen_name(choose(plan, Facts(), Table(order))) == first


@pytest.mark.parametrize(
    ("name", "facts", "reason"),
    [
        ("all_gather", QUALIFIED, "needs equal sizes, the dp ranks have (3, 5)"),
        ("peer", Facts(), NO_PROOF),
        ("peer", NO_LINK, "has no link to rank 1"),
    ],
)
def test_a_forced_transport_that_refuses_is_an_error_with_its_reason(name: str, facts: Facts, reason: str) -> None:
    verdicts = choose(TokenPlan((3, 5), PaddingMode.SUM_LEN), facts, Table((name,)))
    with pytest.raises(TransportRefusedError, match="^" + re.escape(f"{name} {reason}") + "$"):
        chosen_name(verdicts)


def test_when_all_refuse_every_reason_is_told() -> None:
    refused = tuple(
        TransportVerdict(name, chosen=False, reason=f"lacks {place}") for place, name in enumerate(NAMES)
    )
    message = "^" + "; ".join(f"{name} lacks {place}" for place, name in enumerate(NAMES)) + "$"
    with pytest.raises(TransportRefusedError, match=message):
        chosen_name(refused)


@pytest.mark.parametrize("order", [("pigeon",), ("all_reduce", "pigeon"), ("ALL_REDUCE",), ()], ids=str)
def test_a_table_with_an_unknown_transport_or_none_is_refused_with_both_sides(order: tuple[str, ...]) -> None:
    known = "transports must be among ('peer', 'copy_engine', 'aiter', 'all_gather', 'all_gather_v', 'all_reduce')"
    with pytest.raises(ConfigError, match="^" + re.escape(f"{known}, got {order}") + "$"):
        Table(order)


MEASURED = MeasuredTable(
    (
        Measured(False, 16, 1.0, (("peer", False, 100.0), ("peer", True, 300.0), ("all_gather_v", True, 250.0))),
        Measured(False, 4096, 1.0, (("peer", False, 1000.0), ("peer", True, 900.0), ("copy_engine", True, 800.0))),
        Measured(True, 16, 1.0, (("peer", False, 60.0), ("peer", True, 50.0))),
    )
)
TUNED = Table(measured=MEASURED)


@pytest.mark.parametrize(
    ("counts", "use", "name", "us"),
    [
        ((8, 8), Use(), "peer", 100.0),
        ((4, 4), Use(overlap=True), "all_gather_v", 250.0),  # one half of a step of 16
        ((1024, 1024), Use(overlap=True), "copy_engine", 800.0),
        ((4, 4), Use(overlap=True, graph=True), "peer", 50.0),
    ],
)
def test_what_was_measured_decides_for_steps_of_its_size_and_use(
    counts: tuple[int, ...], use: Use, name: str, us: float
) -> None:
    verdicts = choose(TokenPlan(counts, PaddingMode.SUM_LEN, Phase.DECODE), QUALIFIED, TUNED, use)
    assert verdicts[0] == TransportVerdict(name, chosen=True, reason=f"measured: {us:.1f} us a layer")


def test_what_was_measured_but_can_not_carry_the_plan_is_passed_over() -> None:
    plan = TokenPlan((1024, 1024), PaddingMode.SUM_LEN)
    verdicts = choose(plan, Facts(qualified=("peer",)), TUNED, Use(overlap=True))
    assert [(one.name, one.chosen) for one in verdicts[:2]] == [("copy_engine", False), ("peer", True)]


def test_an_overlapped_prefill_that_was_not_measured_is_copied() -> None:
    for phase, name in ((Phase.PREFILL, "copy_engine"), (Phase.DECODE, "peer")):
        plan = TokenPlan((8, 8), PaddingMode.SUM_LEN, phase)
        assert chosen_name(choose(plan, QUALIFIED, Table(), Use(overlap=True))) == name
        assert chosen_name(choose(plan, QUALIFIED, Table())) == "peer"


@pytest.mark.parametrize(
    ("counts", "graph", "table", "pays"),
    [
        ((8, 8), False, TUNED, False),
        ((2048, 2048), False, TUNED, True),
        ((8, 8), True, TUNED, True),
        ((8, 8), False, Table(), False),
        ((8, 8), True, Table(), False),
        ((8192, 8192), False, Table(), False),
        ((8192, 8192), True, Table(), False),
    ],
)
def test_overlap_pays_where_it_was_measured_to(
    counts: tuple[int, ...], graph: bool, table: Table, pays: bool
) -> None:
    plan = TokenPlan(counts, PaddingMode.SUM_LEN, Phase.DECODE)
    verdict = overlap_verdict(plan, QUALIFIED, table, graph=graph)
    assert verdict.pays is pays
    assert verdict.reason.startswith("measured" if table is TUNED else "not measured")


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    ("counts", "facts", "pays"),
    [
        ((4096, 0), QUALIFIED, True),
        ((2048, 2047), QUALIFIED, False),
        ((256,) * 16, QUALIFIED, False),
        ((1, 0), QUALIFIED, False),
        ((0, 0), QUALIFIED, False),
        ((4096, 4096), Facts(qualified=("peer",)), False),
        ((4096, 4096), Facts(), False),
    ],
)
def test_unmeasured_only_a_large_prefill_that_can_be_copied_pays(
    counts: tuple[int, ...], facts: Facts, pays: bool, graph: bool
) -> None:
    plan = TokenPlan(counts, PaddingMode.SUM_LEN, Phase.PREFILL)
    verdict = overlap_verdict(plan, facts, Table(), graph=graph)
    assert verdict.pays is pays
    assert not overlap_verdict(plan, facts, Table(("peer", "all_gather_v")), graph=graph).pays


@pytest.mark.parametrize("counts", [(1, 0), (0, 0)])
def test_one_row_is_not_split_whatever_was_measured(counts: tuple[int, ...]) -> None:
    plan = TokenPlan(counts, PaddingMode.SUM_LEN, Phase.DECODE)
    verdict = overlap_verdict(plan, QUALIFIED, TUNED, graph=True)
    assert (verdict.pays, verdict.reason) == (False, "there is nothing to split")


def test_counts_on_the_device_are_not_split_unmeasured() -> None:
    plan = GraphPlan(2, capacity=16384, per_rank_capacity=8192, device=torch.device("cpu"))
    assert not overlap_verdict(plan, QUALIFIED, Table(), graph=True).pays


def test_an_all_reduce_comes_last_whatever_was_measured() -> None:
    entry = Measured(False, 8, 1.0, (("all_reduce", False, 1.0), ("all_reduce", True, 1.0), ("peer", False, 9.0)))
    table = Table(measured=MeasuredTable((entry,)))
    plan = TokenPlan((4, 4), PaddingMode.SUM_LEN, Phase.DECODE)
    assert [one.name for one in choose(plan, QUALIFIED, table)][-1] == "all_reduce"
    assert not overlap_verdict(plan, QUALIFIED, table, graph=False).pays


def test_proven_aiter_comes_before_the_equal_size_collective() -> None:
    plan = TokenPlan((3, 5), PaddingMode.MAX_LEN)
    assert chosen_name(choose(plan, Facts(qualified=("aiter",)), Table())) == "aiter"
    assert chosen_name(choose(plan, Facts(), Table())) == "all_gather"
