"""Ranks that disagree get a named error, on every rank, with every rank's value, in bounded time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mismatch_cases as cases
import pytest
import torch
from exchange_cases import H

from rocm_dp import PaddingMode, Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.testing import RankPool

    Ranks = Callable[[int], RankPool]

# A rank that is lost is known after the groups' timeout, and its name after the grace for the others' lines.
BOUND = cases.TIMEOUT + 4.0


@pytest.mark.parametrize(
    ("name", "odd_one", "shown"),
    [
        ("a negative count", {"count": -1}, "rank 1 is -1"),
        ("a count over the bound", {"count": 2**40}, "rank 1 is"),
        ("a count that is no int", {"count": "many"}, "rank 1 is not an int"),
        ("an idle rank with rows", {"count": 3, "phase": Phase.IDLE}, "rank 1 is 3 in phase IDLE"),
        ("a phase that is none", {"phase": "decode"}, "not a Phase"),
        ("another alignment", {"rules": cases.rules_with(align=4)}, "rank 0: 1, rank 1: 4, rank 2: 1"),
        ("another padding", {"rules": cases.rules_with(padding=PaddingMode.SUM_LEN)}, "rank 1: 2"),
        ("another hybrid_ssm", {"rules": cases.rules_with(hybrid_ssm=True)}, "rank 1: 1"),
        ("one collective more", {"collectives": ("gather", "combine", "gather")}, "collectives"),
        ("the collectives in another order", {"collectives": ("combine", "gather")}, "collectives"),
    ],
)
def test_a_vote_that_differs_is_named_on_every_rank(
    ranks: Ranks, name: str, odd_one: dict[str, object], shown: str
) -> None:
    common: dict[str, object] = {"count": 2, "collectives": ("gather", "combine")}
    votes = [common, {**common, **odd_one}, common]
    for kind, text, values, _ in ranks(3).run(cases.vote, votes, 3):
        assert kind == "RankMismatchError", name
        assert shown in text
        assert set(values) == {0, 1, 2}


def test_ranks_of_one_dp_rank_must_bring_the_same_count(ranks: Ranks) -> None:
    votes: list[dict[str, object]] = [{"count": 5}, {"count": 5}, {"count": 2}, {"count": 3}]
    for kind, text, values, _ in ranks(4).run(cases.vote, votes, 2):
        assert (kind, values) == ("RankMismatchError", {2: 2, 3: 3})
        assert "dp rank 1" in text


def test_a_rank_that_calls_something_else_is_named_at_once(ranks: Ranks) -> None:
    for kind, text, values, seconds in ranks(3).run(cases.call_something_else):
        assert kind == "RankMismatchError"
        assert values == {0: "agree", 1: "confirm", 2: "agree"}
        assert "rank 1: confirm" in text
        assert seconds < 5


def test_a_rank_already_in_the_data_plane_is_named_in_bounded_time(ranks: Ranks) -> None:
    for kind, text, values, seconds in ranks(3).run(cases.gather_while_others_agree):
        assert kind == "RankMismatchError"
        assert "agree(count=0" in text
        assert values[1] == "all_gather_v.gather"
        assert seconds < BOUND


def test_a_rank_that_does_not_come_is_named_in_bounded_time(ranks: Ranks) -> None:
    answers = ranks(3).run(cases.one_rank_stays_away)
    for kind, text, values, seconds in answers[:2]:
        assert kind == "RankMismatchError"
        assert "rank 2: no answer" in text
        assert "agree(count=1" in str(values[1])
        assert seconds < BOUND


@pytest.mark.parametrize("confirmed", [True, False])
def test_counts_equal_in_sum_but_not_in_order_are_refused(ranks: Ranks, confirmed: bool) -> None:
    for kind, text, values, _ in ranks(2).run(plans_case, confirmed):
        assert kind == "RankMismatchError"
        assert "counts=(1, 2)" in str(values[0])
        assert "counts=(2, 1)" in str(values[1])
        assert "digest" in text


def plans_case(rank: int, confirmed: bool) -> tuple[str, str, dict[int, object], float]:
    return cases.plans_in_another_order(rank, confirmed=confirmed)


def test_another_message_of_gather_many_on_one_rank_is_named(ranks: Ranks) -> None:
    for kind, text, values, _ in ranks(2).run(cases.messages_in_another_order):
        assert kind == "RankMismatchError"
        assert "verb" in text
        assert values == {0: "gather_many(2xfloat32)", 1: "gather_many(3xfloat32)"}


def test_plans_that_differ_beyond_what_a_message_shows_are_refused_all_the_same(ranks: Ranks) -> None:
    for kind, _, values, _ in ranks(2).run(cases.long_plans):
        assert kind == "RankMismatchError"
        assert len(set(values.values())) == 2


def test_a_lost_rank_is_known_to_every_exchange_on_the_groups(ranks: Ranks) -> None:
    lost, after, _ = ranks(2).run(cases.two_exchanges_lose_a_rank)[0]
    assert lost[0] == "RankMismatchError"
    assert after[0] == "ClosedError"
    assert after[3] < 0.5


def test_one_call_more_on_one_rank_is_named(ranks: Ranks) -> None:
    for kind, _, values, _ in ranks(2).run(cases.one_call_more):
        assert kind == "RankMismatchError"
        assert values == {0: "combine", 1: "gather"}


@pytest.mark.parametrize("verb", ["gather", "combine", "gather_many"])
def test_the_async_verb_on_one_rank_alone_is_named(ranks: Ranks, verb: str) -> None:
    for kind, text, values, _ in ranks(2).run(cases.one_rank_by_the_async_verb, verb):
        assert kind == "RankMismatchError"
        assert "verb" in text
        assert values[1] == f"{values[0]}, async"


@pytest.mark.parametrize(
    "odd_one",
    [
        {"hidden": 8},
        {"dtype": torch.float16},
        {"max_rows": 64},
        {"options": cases.options_with(transport="all_reduce")},
    ],
)
def test_exchanges_made_differently_are_refused_at_once(ranks: Ranks, odd_one: dict[str, object]) -> None:
    for kind, text, values, seconds in ranks(2).run(cases.make_exchange, [{}, odd_one]):
        assert kind == "RankMismatchError"
        [(name, value)] = odd_one.items()
        assert name in text
        assert str(values[1]) == str(value)
        assert values[0] != values[1]
        assert seconds < 5


def test_layouts_that_differ_are_refused_when_groups_are_made(ranks: Ranks) -> None:
    for kind, text, values, _ in ranks(2).run(cases.make_groups):
        assert kind == "RankMismatchError"
        assert "dp_size" in text
        assert values == {0: 2, 1: 1}


def test_a_rank_that_takes_another_place_is_refused_when_groups_are_made(ranks: Ranks) -> None:
    for kind, text, values, _ in ranks(3).run(cases.take_another_place):
        assert kind == "RankMismatchError"
        assert "its own in torch.distributed" in text
        assert values == {0: 0, 1: 1, 2: 0}


def test_borrowed_groups_must_hold_the_right_ranks_in_order(ranks: Ranks) -> None:
    said = ranks(4).run(cases.borrow_crossed_groups)
    assert all(kind == "ConfigError" and "the cp group must hold ranks" in text for kind, text, _, _ in said)


def test_borrowed_groups_carry_an_exchange_and_are_not_destroyed(ranks: Ranks) -> None:
    assert ranks(4).run(cases.borrow_and_return) == [True] * 4


def test_an_error_in_one_half_batch_reaches_every_rank_by_name(ranks: Ranks) -> None:
    raised, lost = ranks(2).run(cases.one_half_raises)
    assert raised[:2] == ("RocmDpError", "the experts of rank 0 failed")
    assert lost[0] == "RankMismatchError"
    assert lost[3] < BOUND


def test_a_wrong_tensor_raises_before_any_communication_and_loses_nothing(ranks: Ranks) -> None:
    said, nothing = ranks(2).run(cases.same_error_type)
    assert said == f"local must be a contiguous [1, {H}] tensor, got (2, {H})"
    assert nothing == ""
