"""Nothing is made per call, nothing is freed too early, and every misuse has its own error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lifetime_cases as cases
import pytest
from exchange_cases import Grid, H

from rocm_dp import Options

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.testing import RankPool

    Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("transport", [None, "all_gather_v", "all_reduce"])
def test_no_event_stream_slot_or_byte_is_added_after_reserve(ranks: Ranks, transport: str | None) -> None:
    steps = 60
    for seen in ranks(2).run(cases.resources_over_steps, Grid(2, 2), Options(transport=transport), steps):
        assert len(seen) == steps + 1
        assert set(seen) == {seen[0]}


def test_every_misuse_has_its_own_error_and_costs_nothing(ranks: Ranks) -> None:
    for said in ranks(2).run(cases.errors_of, Grid(2, 2)):
        assert said == {
            "busy": "gather of batch 0 is still in flight: wait() for its Pending before the next call",
            "busy sync": "gather of batch 0 is still in flight: wait() for its Pending before the next call",
            "stale": "the buffer of this gather (batch 0) was used again, drained or closed since",
            "dtype": "local must be torch.bfloat16, got torch.float32",
            "rank": f"local must be a contiguous [3, {H}] tensor, got ({H},)",
            "strides": f"local must be a contiguous [3, {H}] tensor, got strides ({2 * H}, 2)",
            "partial rows": f"partial must be a contiguous [6, {H}] tensor, got (1, {H})",
            "dp": "the plan has counts for 1 dp ranks, the layout has 2",
            "reserve": "reserve() needs max_rows at construction, got None",
            "nothing": "gather_many needs at least one tensor, got none",
            "alias gather": (
                "an input of gather is a view of the buffer that the call writes (batch 0): clone it first"
            ),
            "alias many": (
                f"an input of gather_many({H}xbfloat16) is a view of the buffer that the call writes (batch 0): "
                "clone it first"
            ),
            "conjugate": "tensors[0] must be in memory as it reads, got a lazy conjugate or negative",
            "list": "tp all-reduce input must be a tensor, got list",
            "0-d": "tp all-gather input must be a contiguous [*, *] tensor, got ()",
            "closed": "this TokenExchange is closed",
            "closed tp": "this TokenExchange is closed",
            "closed scatter": "this TokenExchange is closed",
            "closed groups": "these Groups are closed",
            "closed pending": "the buffer of this gather (batch 0) was used again, drained or closed since",
            "fp8 combine": "combine adds rows and takes float32, bfloat16, float16, got float8_e4m3fn",
            "fp8 partial": "gather(partial=True) adds rows and takes float32, bfloat16, float16, got float8_e4m3fn",
        }


def test_a_plan_over_what_was_reserved_is_refused_on_every_rank(ranks: Ranks) -> None:
    for said in ranks(2).run(cases.capacity_errors, Grid(2, 2), Options()):
        too_many = f"the plan needs {2 * cases.MOST + 1} rows, max_rows is {2 * cases.MOST}"
        too_many_here = f"a dp rank needs {cases.MOST + 1} rows, max_local_rows is {cases.MOST}"
        assert said == [too_many] * 3 + [too_many_here] * 3


def test_columns_of_any_stride_are_taken_for_what_they_are(ranks: Ranks) -> None:
    assert ranks(2).run(cases.columns_of_any_stride, Grid(2, 2)) == [True, True]


def test_a_refused_call_is_not_counted_and_spoils_nothing(ranks: Ranks) -> None:
    assert ranks(2).run(cases.calls_counted, Grid(2, 2)) == [{"all_gather.gather": 1}] * 2


def test_reserving_again_spares_the_results_of_calls(ranks: Ranks) -> None:
    assert ranks(2).run(cases.reserve_spares_results, Grid(2, 2), Options(poison=True)) == [True, True]


def test_exchanges_on_the_same_groups_agree_on_their_stream(ranks: Ranks) -> None:
    for said in ranks(2).run(cases.other_options_on_the_same_groups, Grid(2, 2)):
        assert "'timeout': 300.0}, got" in said
        assert "'timeout': 9}" in said


def test_exchanges_on_the_same_groups_share_one_stream_until_the_last_is_closed(ranks: Ranks) -> None:
    assert ranks(2).run(cases.many_exchanges_on_the_same_groups, Grid(2, 2)) == [(1, 0, True)] * 2


def test_buffers_grow_a_few_times_and_outgrown_ones_are_freed(ranks: Ranks) -> None:
    for growths, nbytes, events_held in ranks(2).run(cases.growth, Grid(2, 2)):
        assert 4 <= growths <= 40
        # One live buffer for each verb, at most 1.5 x what the largest plan needs, and the last outgrown ones.
        assert nbytes <= 4 * 1.5 * (2 * 200 * H * 2)
        assert events_held == 2 * 2 + 1  # of two slots, and of what was outgrown


def test_an_input_dropped_right_after_the_call_lives_until_the_wait_and_no_longer(ranks: Ranks) -> None:
    assert ranks(2).run(cases.input_outlives_the_call, Grid(2, 2)) == [True, True]


def test_interleaved_halves_equal_the_same_halves_in_turn_bit_for_bit(ranks: Ranks) -> None:
    assert ranks(3).run(cases.two_batches_equal_one_after_the_other, Grid(3, 3), 40) == [80, 80, 80]


def test_inference_mode_and_gradients_leave_no_trace(ranks: Ranks) -> None:
    assert ranks(2).run(cases.inference_mode_does_not_stick, Grid(2, 2)) == [True, True]


@pytest.mark.parametrize(
    ("world", "dp", "cp", "moe_dp"),
    [(1, 1, 1, 1), (4, 2, 1, 1), (4, 1, 2, 4), pytest.param(6, 3, 2, 1, marks=pytest.mark.soak), (8, 2, 2, 2)],
)
def test_the_thin_verbs_stay_in_their_group(ranks: Ranks, world: int, dp: int, cp: int, moe_dp: int) -> None:
    assert ranks(world).run(cases.group_verbs, world, dp, cp, moe_dp) == [[]] * world
