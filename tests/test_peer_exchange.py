"""Exchanges over peer memory: every claim of the others, and those about counts on the device and lost ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lifetime_cases
import peer_exchange_cases as cases
import pytest
import torch
from exchange_cases import Case, Grid, H, every_verb

from rocm_dp import Options, PaddingMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.testing import RankPool

    Ranks = Callable[[int], RankPool]

PAIR = Grid(2, 2)
MORE_GRIDS = (Grid(2, 1), Grid(3, 3), Grid(4, 2), Grid(4, 1, 2))
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def lose_rank_1(how: str, tmp_path: Path, *, bound: float, env: dict[str, str]) -> dict[int, Any]:
    """Start three ranks, lose rank 1 in a stream of calls; what the others were told. No process is left."""
    script = Path(__file__).with_name("lost_rank.py")
    nap = 0.0 if how in SIGNALS else 3600.0
    ranks: list[subprocess.Popen[str]] = []
    try:
        for number in range(3):
            arguments = [str(number), "3", str(tmp_path / "store"), str(bound), str(nap)]
            command = [sys.executable, str(script), *arguments]
            ranks.append(
                subprocess.Popen(
                    command,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONPATH": str(script.parent), **env},
                )
            )
        for one in ranks:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        if how in SIGNALS:
            time.sleep(0.2)
            os.kill(ranks[1].pid, SIGNALS[how])
        return {rank: json.loads(ranks[rank].communicate(timeout=90)[0]) for rank in (0, 2)}
    finally:
        for left in ranks:
            left.kill()
            left.communicate()


def cases_for(grid: Grid, dtype: torch.dtype, transport: str | None) -> list[Case]:
    uneven = tuple((7 * d + 2) % 5 for d in range(grid.dp))
    one_sided = (0,) * (grid.dp - 1) + (5,)
    replicas = grid.world // grid.dp
    return [
        Case(uneven, PaddingMode.SUM_LEN, 1, dtype, transport),
        Case(uneven, PaddingMode.MAX_LEN, replicas, dtype, transport),
        Case(one_sided, PaddingMode.SUM_LEN, replicas, dtype, transport),
        Case((0,) * grid.dp, PaddingMode.SUM_LEN, 1, dtype, transport),
    ]


@pytest.mark.parametrize("transport", [None, "copy_engine"])
@pytest.mark.parametrize(
    "grid",
    [Grid(2, 2), *(pytest.param(g, marks=pytest.mark.soak) for g in MORE_GRIDS)],
    ids=str,
)
def test_every_verb_equals_the_oracle(interpreted: Ranks, grid: Grid, transport: str | None) -> None:
    # Left to itself the library takes peer memory, once that passed its self-test.
    chosen = cases_for(grid, torch.float32, transport)
    assert interpreted(grid.world).run(every_verb, grid, chosen) == [len(chosen)] * grid.world


@pytest.mark.parametrize("grid", [Grid(2, 2), pytest.param(Grid(4, 2), marks=pytest.mark.soak)], ids=str)
def test_copies_and_kernels_take_turns_on_one_channel_and_give_the_same_bits(
    interpreted: Ranks, grid: Grid
) -> None:
    for wrong, calls in interpreted(grid.world).run(cases.copies_and_kernels, grid, 4):
        assert wrong == 0
        assert calls == {f"{name}.{verb}": 4 for name in ("peer", "copy_engine") for verb in ("gather", "combine")}


@pytest.mark.parametrize("grid", [Grid(2, 2), pytest.param(Grid(4, 2), marks=pytest.mark.soak)], ids=str)
def test_async_calls_take_fewer_blocks_and_take_turns_with_others_on_one_channel(
    interpreted: Ranks, grid: Grid
) -> None:
    for wrong, most, beside in interpreted(grid.world).run(cases.many_and_few_blocks, grid, 8, 4):
        assert wrong == 0
        assert beside < most


@pytest.mark.parametrize("verb", ["gather", "combine"])
@pytest.mark.parametrize("transport", ["peer", None])
def test_the_async_verb_on_one_rank_alone_is_told_to_all_and_no_row_is_wrong_in_silence(
    interpreted: Ranks, transport: str | None, verb: str
) -> None:
    told = interpreted(2).run(cases.one_rank_by_the_async_verb, PAIR, transport, verb)
    for rank, (said, seconds, wrong) in enumerate(told):
        assert f"rank {1 - rank} gave up, made another call" in said
        assert seconds < 15  # of the 20 that a wait may take
        assert wrong == 0


def test_a_slot_is_opened_ahead_of_copies_once_graphs_may_be_replayed_between_calls(interpreted: Ranks) -> None:
    for before, after in interpreted(2).run(cases.kernels_of_a_copied_gather, PAIR):
        assert before == ["meet"]
        assert after == ["open_slot", "meet"]


def test_without_the_wait_behind_the_copies_results_are_wrong(interpreted: Ranks) -> None:
    assert interpreted(2).run(cases.copies_of_a_late_rank, PAIR, 2, "waits") == [0, 0]
    assert sum(interpreted(2).run(cases.copies_of_a_late_rank, PAIR, 2, "goes on")) > 0


@pytest.mark.parametrize("transport", ["peer", pytest.param("copy_engine", marks=pytest.mark.soak)])
def test_a_rank_that_gives_up_lets_nobody_wait(interpreted: Ranks, transport: str) -> None:
    first, other = interpreted(2).run(cases.one_rank_gives_up, PAIR, transport)
    assert first.spoilt
    assert first.seconds < 30  # of the 60 that a wait may take
    assert "PeerTimeoutError: gather of batch 0" in first.said
    assert "rank 1 gave up, made another call, or did not come in 60 s" in first.said
    assert "rank 1: ValueError: half a batch was lost" in first.said
    assert other.said == "ClosedError: these groups can't be used after: ValueError: half a batch was lost"


@pytest.mark.soak
def test_rows_that_have_no_sum_are_moved_as_bytes(interpreted: Ranks) -> None:
    chosen = cases_for(PAIR, torch.float8_e4m3fn, "peer")
    assert interpreted(2).run(every_verb, PAIR, chosen) == [len(chosen)] * 2


def test_no_event_stream_slot_or_byte_is_added_after_reserve(interpreted: Ranks) -> None:
    for seen in interpreted(2).run(lifetime_cases.resources_over_steps, PAIR, Options(transport="peer"), 3):
        assert len(seen) == 4
        assert set(seen) == {seen[0]}


@pytest.mark.soak
def test_misuse_has_the_same_errors_as_over_process_groups(interpreted: Ranks) -> None:
    for said in interpreted(2).run(lifetime_cases.errors_of, PAIR):
        assert len(said) == 22
        assert said["busy"] == "gather of batch 0 is still in flight: wait() for its Pending before the next call"
        assert said["rank"] == f"local must be a contiguous [3, {H}] tensor, got ({H},)"
        assert "is a view of the buffer that the call writes (batch 0): clone it first" in said["alias gather"]


@pytest.mark.soak
def test_interleaved_halves_equal_the_same_halves_in_turn_bit_for_bit(interpreted: Ranks) -> None:
    assert interpreted(2).run(lifetime_cases.two_batches_equal_one_after_the_other, PAIR, 2) == [4, 4]


@pytest.mark.parametrize("grid", [Grid(2, 2), pytest.param(Grid(4, 2), marks=pytest.mark.soak)], ids=str)
def test_the_same_calls_serve_all_counts_within_a_capacity(interpreted: Ranks, grid: Grid) -> None:
    assert interpreted(grid.world).run(cases.eager_graph_steps, grid, 4) == [0] * grid.world


def test_a_graph_plan_says_what_does_not_fit_and_stays_as_it_was(interpreted: Ranks) -> None:
    for said in interpreted(2).run(cases.bounds_of_a_graph_plan, PAIR):
        assert said == [
            "a rank has 9 rows, per_rank_capacity is 8",
            "counts (8, 5) are 13 rows, capacity is 12",
            "the plan is for 2 dp ranks, got counts (1,)",
            "counts[0] must lie in [0, 2147483647], got -1",
            "capacity must be an int in [1, 2147483647], got 0",
            "per_rank_capacity 5 exceeds capacity 4",
            f"the plan needs {cases.CAPACITY + 1} rows, max_rows is {cases.CAPACITY}",
            "scatter needs counts on the host, got a GraphPlan",
            f"local must be a contiguous [8, {H}] tensor, got (7, {H})",
        ]


def test_without_peer_memory_a_graph_plan_is_refused_with_every_reason(ranks: Ranks) -> None:
    for said in ranks(2).run(cases.refused_graph_plan, PAIR):
        assert "peer needs GPUs, or TRITON_INTERPRET=1 on CPU ranks" in said
        assert "all_gather_v needs counts on the host" in said


@pytest.mark.parametrize(
    "how", ["killed", *(pytest.param(how, marks=pytest.mark.soak) for how in ("stopped", "late"))]
)
def test_a_lost_rank_is_named_to_the_others_within_the_bound_and_nothing_hangs(how: str, tmp_path: Path) -> None:
    told = lose_rank_1(how, tmp_path, bound=1.0, env={"TRITON_INTERPRET": "1"})
    assert set(told) == {0, 2}
    for one in told.values():
        assert one["error"] == "PeerTimeoutError"
        assert one["missing"] == [1]
        assert one["call"] in (["gather", 0], ["combine", 0])
        assert "rank 1 gave up, made another call, or did not come in 1 s" in one["said"]
        assert "can't be used after" in one["after"]
        # By the looks of an interpreter that shares two cores, and the moments in which ranks tell what they did.
        assert one["seconds"] < 30


@pytest.mark.soak
def test_a_rank_that_is_late_but_within_the_bound_is_waited_for(interpreted: Ranks) -> None:
    assert interpreted(2).run(cases.a_late_rank_within_the_bound, 2) == [True] * 2


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("", None),
        ("another host", "rank 1 is on another host"),
        ("no triton", "rank 1: triton is not installed"),
        ("wrong kernels", "its self-test found a wrong gather for counts"),
        ("no compiler", "rank 1: RuntimeError: no C compiler"),
        ("no memory", "rank 1: RuntimeError: out of it"),
        ("an error", "rank 1: RuntimeError: no such thing"),
    ],
)
def test_what_one_rank_cannot_do_no_rank_does_and_explain_says_why(
    interpreted: Ranks, broken: str, reason: str | None
) -> None:
    for said in interpreted(2).run(cases.verdicts, PAIR, broken):
        peer, *others = said
        assert peer[0] == "peer"
        if reason is None:
            assert peer[1:] == (True, "first in the table that can")
        else:
            assert not peer[1]
            assert reason in peer[2]
            assert sum(chosen for _, chosen, _ in others) == 1


def test_the_self_test_runs_once_for_all_exchanges_on_the_same_groups(interpreted: Ranks) -> None:
    # Once for the self-test, and once for each exchange.
    assert interpreted(2).run(cases.two_exchanges_one_self_test, PAIR) == [(4, True)] * 2


def test_a_result_can_be_read_after_its_exchange_was_closed(interpreted: Ranks) -> None:
    assert interpreted(2).run(cases.results_outlive_the_exchange, PAIR) == [True, True]


@pytest.mark.soak
def test_channels_grow_a_few_times_and_results_stay_right(interpreted: Ranks) -> None:
    for growths, right in interpreted(2).run(cases.growing, PAIR):
        assert right
        # Of two channels and the slot of the sums.
        assert 9 <= growths <= 24


def test_ranks_that_differ_in_their_turns_are_told_and_no_wrong_row_is_taken_for_right(interpreted: Ranks) -> None:
    found = interpreted(2).run(cases.other_slots, PAIR)
    assert any(told for told, _ in found)
    assert all(honest for _, honest in found)


@pytest.mark.soak
def test_reserve_leaves_nothing_to_be_made_on_any_rank(interpreted: Ranks) -> None:
    assert interpreted(4).run(cases.reserved_partial_gather, Grid(4, 2)) == [True] * 4


def test_a_refused_growth_leaves_the_exchange_as_it_was(interpreted: Ranks) -> None:
    assert interpreted(2).run(cases.a_growth_is_refused, PAIR) == [("no memory", True)] * 2


def test_results_belong_to_the_caller_and_odd_tensors_are_refused(interpreted: Ranks) -> None:
    for seen in interpreted(2).run(cases.results_belong_to_the_caller, PAIR):
        assert seen[:5] == [2, 2, 2, 2, True]
        assert seen[5:] == [
            "local must begin at a multiple of its 4 bytes,",
            "local must be on cpu,",
            f"local must be a contiguous [2, {H}] tensor,",
        ]


@pytest.mark.parametrize("grid", [Grid(2, 2), pytest.param(Grid(4, 2), marks=pytest.mark.soak)], ids=str)
def test_addends_that_all_can_read_are_pulled_and_may_be_overwritten_at_once(
    interpreted: Ranks, grid: Grid
) -> None:
    steps = 3
    for wrong, epoch, calls in interpreted(grid.world).run(cases.pulled_combines, grid, steps):
        assert wrong == 0
        assert calls["peer.combine"] == 2 * steps
        # Two waits for each that had rows: all have written, all have read.
        assert epoch % 2 == 0
        assert 0 < epoch <= 2 * steps


@pytest.mark.soak
def test_a_rank_that_gives_up_is_the_one_named_and_lets_all_exchanges_of_the_groups_go(
    interpreted: Ranks,
) -> None:
    first, gone, last = interpreted(3).run(cases.one_of_three_gives_up, Grid(3, 3))
    assert gone.said == "ClosedError: these groups can't be used after: ValueError: a third was lost"
    for one in (first, last):
        assert one.spoilt
        assert "PeerTimeoutError: gather of batch 0 (epoch 2): rank 1 gave up" in one.said
        assert one.seconds < 30


def test_without_the_wait_until_all_have_read_addends_are_overwritten(interpreted: Ranks) -> None:
    assert interpreted(2).run(cases.overwritten_at_once, PAIR, 3, "twice") == [0, 0]
    assert sum(interpreted(2).run(cases.overwritten_at_once, PAIR, 3, "once")) > 0


def test_without_peer_memory_there_is_nothing_to_pull_from(ranks: Ranks) -> None:
    said = ranks(2).run(cases.no_combine_input, PAIR)
    assert set(said) == {"combine_input needs peer memory, all_gather carries this plan"}
