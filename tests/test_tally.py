"""tally: from the votes of all ranks to one agreement, or a named error with every rank's value."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rocm_dp.agreement import Agreement, tally
from rocm_dp.errors import RankMismatchError
from rocm_dp.plan import MAX_ROWS, PaddingMode, Phase, TokenPlan, choose_padding

PREFILL, DECODE, IDLE = Phase.PREFILL, Phase.DECODE, Phase.IDLE
ANY = settings(max_examples=150, deadline=None)
NOT_AN_INT = -(2**63)  # the word that stands for a count that was no int

Vote = dict[str, int]


@dataclass(frozen=True)
class Brought:
    """What one dp rank brings; each of its ranks votes for it."""

    count: int
    phase: Phase
    can_overlap: bool = True
    want_overlap: bool = True
    can_graph: bool = False

    def vote(self, dp_size: int, rules: dict[str, int]) -> Vote:
        return {
            "count": self.count,
            "phase": self.phase.value,
            "can_overlap": int(self.can_overlap),
            "want_overlap": int(self.want_overlap),
            "can_graph": int(self.can_graph),
            "dp_size": dp_size,
            "align": 1,
            "max_count": MAX_ROWS,
            "padding": 0,
            "hybrid_ssm": 0,
            "sum_len_in_graphs": 0,
            "collectives": 99,
            **rules,
        }


IDLE_RANK = Brought(0, IDLE)


@dataclass(frozen=True)
class Step:
    """A step of ``dp`` ranks, ``replicas`` ranks each."""

    dp: tuple[Brought, ...]
    replicas: int = 1
    rules: dict[str, int] = field(default_factory=dict)

    def votes(self) -> list[Vote]:
        return [brought.vote(len(self.dp), self.rules) for brought in self.dp for _ in range(self.replicas)]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(brought.count for brought in self.dp)


BROUGHT = st.builds(
    Brought,
    st.integers(0, 40) | st.sampled_from([MAX_ROWS - 1, MAX_ROWS]),
    st.sampled_from([PREFILL, DECODE]),
    *(st.booleans() for _ in range(3)),
) | st.builds(Brought, st.just(0), st.just(IDLE), *(st.booleans() for _ in range(3)))
RULES = st.fixed_dictionaries(
    {
        "align": st.integers(1, 8),
        "padding": st.sampled_from([0, 1, 2]),
        "hybrid_ssm": st.sampled_from([0, 1]),
        "sum_len_in_graphs": st.sampled_from([0, 1]),
        "collectives": st.integers(-(2**63), 2**63 - 1),
    }
)
STEPS = st.builds(
    Step, st.lists(BROUGHT, min_size=1, max_size=8).map(tuple), replicas=st.integers(1, 4), rules=RULES
)


def of(*brought: Brought, **rules: int) -> Agreement:
    return tally(Step(brought, rules=rules).votes())


@ANY
@given(step=STEPS)
def test_the_plan_carries_the_count_of_each_dp_rank_and_the_shared_align(step: Step) -> None:
    plan = tally(step.votes()).plan
    assert plan.counts == step.counts
    assert plan.align == step.rules["align"]


@ANY
@given(step=STEPS)
def test_a_step_overlaps_when_any_wants_all_can_and_the_busy_are_in_one_phase(step: Step) -> None:
    wanted = [brought for brought in step.dp if brought.want_overlap]
    unable = [brought for brought in step.dp if not brought.can_overlap]
    prefilling = [brought for brought in step.dp if brought.phase is PREFILL]
    decoding = [brought for brought in step.dp if brought.phase is DECODE]
    one_phase = bool(prefilling) != bool(decoding)
    assert tally(step.votes()).overlap == (bool(wanted) and not unable and one_phase)


@ANY
@given(step=STEPS)
def test_a_step_replays_a_graph_when_no_rank_says_it_cannot(step: Step) -> None:
    assert tally(step.votes()).graph == (False not in {brought.can_graph for brought in step.dp})


@ANY
@given(step=STEPS)
def test_the_phase_is_prefill_if_any_prefills_else_decode_if_any_decodes_else_idle(step: Step) -> None:
    phases = [brought.phase for brought in step.dp]
    expected = PREFILL if PREFILL in phases else DECODE if DECODE in phases else IDLE
    assert tally(step.votes()).plan.phase is expected


@ANY
@given(step=STEPS)
def test_a_forced_padding_wins_and_otherwise_the_rule_decides(step: Step) -> None:
    agreed = tally(step.votes())
    by_rule = choose_padding(
        step.counts,
        phase=agreed.plan.phase,
        capturing=agreed.graph,
        hybrid_ssm=step.rules["hybrid_ssm"] == 1,
        sum_len_in_graphs=step.rules["sum_len_in_graphs"] == 1,
    )
    expected = {0: by_rule, 1: PaddingMode.MAX_LEN, 2: PaddingMode.SUM_LEN}
    assert agreed.plan.padding is expected[step.rules["padding"]]


@ANY
@given(step=STEPS)
def test_tally_is_pure(step: Step) -> None:
    votes = step.votes()
    agreed = tally(votes)
    assert votes == step.votes()
    assert tally(votes) == agreed
    assert tally(tuple(dict(reversed(vote.items())) for vote in votes)) == agreed


@ANY
@given(step=STEPS, order=st.randoms(use_true_random=False))
def test_ranks_in_another_order_agree_on_the_same_but_for_the_order_of_counts(step: Step, order: Any) -> None:
    places = list(range(len(step.dp)))
    order.shuffle(places)
    moved = replace(step, dp=tuple(step.dp[place] for place in places))
    before, after = tally(step.votes()), tally(moved.votes())
    assert after.plan == replace(before.plan, counts=moved.counts)
    assert (after.overlap, after.graph) == (before.overlap, before.graph)


@ANY
@given(step=STEPS, replicas=st.integers(1, 4))
def test_the_number_of_ranks_that_share_rows_changes_nothing(step: Step, replicas: int) -> None:
    assert tally(replace(step, replicas=replicas).votes()) == tally(step.votes())


@pytest.mark.parametrize("phase", [PREFILL, DECODE])
@pytest.mark.parametrize(("dp", "place"), [(dp, place) for dp in (2, 3, 4) for place in range(dp)])
def test_an_idle_rank_in_any_place_goes_along_with_the_busy_ones(dp: int, place: int, phase: Phase) -> None:
    brought = [Brought(rank + 1, phase) for rank in range(dp)]
    brought[place] = IDLE_RANK
    agreed = of(*brought)
    assert agreed.plan.counts == tuple(0 if rank == place else rank + 1 for rank in range(dp))
    assert (agreed.plan.phase, agreed.overlap) == (phase, True)


@pytest.mark.parametrize(("dp", "place"), [(dp, place) for dp in (1, 2, 4) for place in range(dp)])
def test_one_busy_rank_among_idle_ones_sets_the_phase(dp: int, place: int) -> None:
    brought = [IDLE_RANK] * dp
    brought[place] = Brought(7, DECODE)
    agreed = of(*brought)
    assert (agreed.plan.phase, agreed.plan.total, agreed.overlap) == (DECODE, 7, True)


def test_a_step_where_all_are_idle_has_an_empty_idle_plan_and_no_overlap() -> None:
    agreed = of(IDLE_RANK, IDLE_RANK, IDLE_RANK)
    assert agreed == Agreement(TokenPlan((0, 0, 0), PaddingMode.MAX_LEN, IDLE), overlap=False, graph=False)


def test_an_idle_rank_that_cannot_overlap_or_replay_stops_all() -> None:
    able = Brought(4, DECODE, can_graph=True)
    assert (of(able, able).overlap, of(able, able).graph) == (True, True)
    unable = Brought(0, IDLE, can_overlap=False, can_graph=False)
    assert (of(able, unable).overlap, of(able, unable).graph) == (False, False)


def test_one_rank_that_prefills_makes_the_step_prefill_without_overlap() -> None:
    agreed = of(Brought(100, PREFILL), Brought(4, DECODE), Brought(4, DECODE))
    assert (agreed.plan.phase, agreed.plan.padding) == (PREFILL, PaddingMode.SUM_LEN)
    assert not agreed.overlap


@pytest.mark.parametrize(
    "shared", ["dp_size", "align", "max_count", "padding", "hybrid_ssm", "sum_len_in_graphs", "collectives"]
)
@pytest.mark.parametrize("odd", range(4))
def test_a_rank_that_differs_in_a_shared_field_is_told_with_every_value(shared: str, odd: int) -> None:
    votes = Step((Brought(3, DECODE),) * 4).votes()
    usual = votes[0][shared]
    votes[odd][shared] = usual + 1
    values = {rank: usual + (rank == odd) for rank in range(4)}
    listed = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
    with pytest.raises(RankMismatchError, match=f"^ranks disagree on {shared}: {listed}$") as caught:
        tally(votes)
    assert caught.value.values == values


@pytest.mark.parametrize(("odd", "dp_rank"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_ranks_of_one_dp_rank_with_other_counts_are_told_with_their_counts(odd: int, dp_rank: int) -> None:
    votes = Step((Brought(3, DECODE),) * 3, replicas=2).votes()
    votes[odd]["count"] = 5
    values = {rank: 5 if rank == odd else 3 for rank in (2 * dp_rank, 2 * dp_rank + 1)}
    listed = ", ".join(f"rank {rank}: {value}" for rank, value in values.items())
    with pytest.raises(RankMismatchError, match=f"the count of dp rank {dp_rank}: {listed}$") as caught:
        tally(votes)
    assert caught.value.values == values


@ANY
@given(step=STEPS, data=st.data())
def test_any_change_of_one_replica_count_is_seen(step: Step, data: st.DataObject) -> None:
    assume(step.replicas > 1)
    votes = step.votes()
    odd = data.draw(st.integers(0, len(votes) - 1))
    count = data.draw(st.integers(0, MAX_ROWS))
    assume(count != votes[odd]["count"])
    votes[odd]["count"] = count
    with pytest.raises(RankMismatchError):
        tally(votes)


BAD_VOTES = {
    "negative": ({"count": -1}, "-1", r"is -1, outside \[0, 2147483647\]"),
    "too large": ({"count": 2**31}, "2147483648", r"is 2147483648, outside \[0, 2147483647\]"),
    "not an int": ({"count": NOT_AN_INT}, "not an int", "is not an int"),
    "idle with rows": ({"count": 4, "phase": IDLE.value}, "4", "is 4 in phase IDLE"),
    "phase 0": ({"phase": 0}, "3", "came with something that is not a Phase"),
    "phase 4": ({"phase": 4}, "3", "came with something that is not a Phase"),
}


@pytest.mark.parametrize("odd", range(3))
@pytest.mark.parametrize(("change", "shown", "problem"), BAD_VOTES.values(), ids=BAD_VOTES)
def test_a_bad_vote_is_told_with_the_rank_and_all_counts(change: Vote, shown: str, problem: str, odd: int) -> None:
    votes = Step((Brought(3, DECODE),) * 3).votes()
    votes[odd].update(change)
    listed = ", ".join(f"rank {rank}: {shown if rank == odd else 3}" for rank in range(3))
    with pytest.raises(
        RankMismatchError, match=f"^the count of rank {odd} {problem}; counts by rank: {listed}$"
    ) as caught:
        tally(votes)
    assert [str(value) for value in caught.value.values.values()] == [shown if r == odd else "3" for r in range(3)]


def test_a_count_over_the_agreed_most_is_refused_and_one_at_it_is_not() -> None:
    assert of(Brought(64, DECODE), Brought(1, DECODE), max_count=64).plan.counts == (64, 1)
    with pytest.raises(RankMismatchError, match=re.escape("the count of rank 1 is 65, outside [0, 64]")):
        of(Brought(64, DECODE), Brought(65, DECODE), max_count=64)


def test_overlap_needs_one_who_wants_it_among_all_who_can() -> None:
    for wants in product([False, True], repeat=3):
        assert of(*(Brought(2, PREFILL, want_overlap=want) for want in wants)).overlap == any(wants)
    for cans in product([False, True], repeat=3):
        assert of(*(Brought(2, PREFILL, can_overlap=can) for can in cans)).overlap == all(cans)
