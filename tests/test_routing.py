"""routing: a pure choice of one transport, with a reason for each that was not taken."""

from __future__ import annotations

import re
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_dp.errors import ConfigError, TransportRefusedError
from rocm_dp.plan import PaddingMode, TokenPlan
from rocm_dp.routing import NAMES, Facts, Table, TransportVerdict, choose, chosen_name

ANY = settings(max_examples=100, deadline=None)
ORDERS = [order for size in (1, 2, 3) for order in permutations(NAMES, size)]
PLANS = st.builds(
    TokenPlan,
    st.lists(st.integers(0, 9), min_size=1, max_size=8).map(tuple),
    st.sampled_from(PaddingMode),
    align=st.integers(1, 6),
)
FACTS = st.builds(Facts, replicas=st.integers(1, 8))
TABLES = st.sampled_from(ORDERS).map(Table)


def can_carry(name: str, plan: TokenPlan, facts: Facts) -> bool:
    """Only the equal-size collective is particular: equal sizes, each cut into equal parts by its ranks."""
    equal = all(size == plan.sizes[0] for size in plan.sizes)
    return name != "all_gather" or (equal and plan.sizes[0] % facts.replicas == 0)


@ANY
@given(plan=PLANS, facts=FACTS, table=TABLES)
def test_the_first_transport_of_the_table_that_can_is_chosen_and_no_other(
    plan: TokenPlan, facts: Facts, table: Table
) -> None:
    able = [name for name in table.order if can_carry(name, plan, facts)]
    assert [verdict.name for verdict in choose(plan, facts, table) if verdict.chosen] == able[:1]


@ANY
@given(plan=PLANS, facts=FACTS, table=TABLES)
def test_every_transport_of_the_table_is_judged_in_order_with_a_reason(
    plan: TokenPlan, facts: Facts, table: Table
) -> None:
    verdicts = choose(plan, facts, table)
    assert tuple(verdict.name for verdict in verdicts) == table.order
    assert all(verdict.reason for verdict in verdicts)


@ANY
@given(plan=PLANS, facts=FACTS, table=TABLES)
def test_equal_inputs_get_equal_answers(plan: TokenPlan, facts: Facts, table: Table) -> None:
    again = TokenPlan(plan.counts, plan.padding, plan.phase, plan.align)
    verdicts = choose(plan, facts, table)
    assert choose(again, Facts(facts.replicas), Table(tuple(table.order))) == verdicts


def test_equal_sizes_take_the_equal_size_collective() -> None:
    plan = TokenPlan((3, 5), PaddingMode.MAX_LEN)
    assert choose(plan, Facts(), Table()) == (
        TransportVerdict("all_gather", chosen=True, reason="first in the table that can"),
        TransportVerdict("all_gather_v", chosen=False, reason="could, but all_gather comes first"),
        TransportVerdict("all_reduce", chosen=False, reason="could, but all_gather comes first"),
    )


def test_unequal_sizes_are_refused_by_all_gather_with_the_sizes() -> None:
    plan = TokenPlan((3, 5), PaddingMode.SUM_LEN)
    verdicts = choose(plan, Facts(), Table())
    assert verdicts[0] == TransportVerdict(
        "all_gather", chosen=False, reason="needs equal sizes, the dp ranks have (3, 5)"
    )
    assert chosen_name(verdicts) == "all_gather_v"


def test_sizes_that_the_ranks_of_a_dp_rank_cannot_share_equally_are_refused_with_both_numbers() -> None:
    plan = TokenPlan((3, 5), PaddingMode.MAX_LEN)
    assert choose(plan, Facts(replicas=4), Table())[0] == TransportVerdict(
        "all_gather", chosen=False, reason="needs sizes divisible by the 4 ranks of a dp rank, got 5"
    )
    assert choose(TokenPlan((3, 5), PaddingMode.MAX_LEN, align=4), Facts(replicas=4), Table())[0].chosen


def test_a_step_without_rows_is_carried() -> None:
    for padding in PaddingMode:
        assert choose(TokenPlan((0, 0), padding), Facts(replicas=4), Table())[0].chosen


@pytest.mark.parametrize("order", ORDERS, ids=",".join)
def test_the_table_decides_among_those_that_can(order: tuple[str, ...]) -> None:
    assert chosen_name(choose(TokenPlan((4, 4), PaddingMode.MAX_LEN), Facts(), Table(order))) == order[0]


def test_a_forced_transport_that_refuses_is_an_error_with_its_reason() -> None:
    verdicts = choose(TokenPlan((3, 5), PaddingMode.SUM_LEN), Facts(), Table(("all_gather",)))
    message = "^" + re.escape("all_gather needs equal sizes, the dp ranks have (3, 5)") + "$"
    with pytest.raises(TransportRefusedError, match=message):
        chosen_name(verdicts)


def test_when_all_refuse_every_reason_is_told() -> None:
    refused = tuple(
        TransportVerdict(name, chosen=False, reason=f"lacks {place}") for place, name in enumerate(NAMES)
    )
    message = "^all_gather lacks 0; all_gather_v lacks 1; all_reduce lacks 2$"
    with pytest.raises(TransportRefusedError, match=message):
        chosen_name(refused)


@pytest.mark.parametrize("order", [("pigeon",), ("all_reduce", "pigeon"), ("ALL_REDUCE",), ()], ids=str)
def test_a_table_with_an_unknown_transport_or_none_is_refused_with_both_sides(order: tuple[str, ...]) -> None:
    known = "transports must be among ('all_gather', 'all_gather_v', 'all_reduce')"
    with pytest.raises(ConfigError, match="^" + re.escape(f"{known}, got {order}") + "$"):
        Table(order)
