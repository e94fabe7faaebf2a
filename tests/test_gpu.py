"""The same claims on GPUs, over NCCL or RCCL, and those that only a device can show. Run with ``-m gpu``."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING

import gpu_cases as cases
import lifetime_cases
import overlap_cases
import peer_cases
import peer_exchange_cases
import peer_kernel_cases
import pytest
import row_cases
import torch
from exchange_cases import Grid, every_verb
from rocm_dp.kernels import rows
from test_exchange import cases_for
from test_peer_exchange import lose_rank_1

from rocm_dp import Options
from rocm_dp.comm_stream import CommStream
from rocm_dp.measured import Measured, MeasuredTable
from rocm_dp.memory.slots import SlotPool
from rocm_dp.testing import RankPool, run_ranks
from rocm_dp.tuned import save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
PAIR = Grid(2, 2)


@pytest.mark.parametrize("grid", [Grid(2, 2), Grid(2, 1), Grid(2, 1, 2)], ids=str)
@pytest.mark.parametrize("transport", [None, "peer", "copy_engine", "all_gather", "all_gather_v", "all_reduce"])
def test_every_verb_equals_the_oracle(pair: RankPool, grid: Grid, transport: str | None) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8):
        cases = cases_for(grid, dtype, transport)
        assert pair.run(every_verb, grid, cases) == [len(cases)] * 2


@pytest.mark.parametrize(
    ("transport", "counts"),
    [
        ("all_gather", (8, 8)),
        ("all_gather", (8,)),
        ("all_gather_v", (8, 5)),
        ("all_gather_v", (8, 0)),
        ("all_gather_v", (8, 8)),
        ("all_gather_v", (8,)),
        ("all_gather_v", (7,)),
        ("all_reduce", (8, 5)),
        ("peer", (8, 5)),
        ("peer", (7,)),
        ("copy_engine", (8, 5)),
        ("copy_engine", (7,)),
    ],
)
def test_no_verb_allocates_device_memory_after_warm_up(
    pair: RankPool, transport: str, counts: tuple[int, ...]
) -> None:
    for made in pair.run(cases.allocations_per_call, Grid(2, len(counts)), transport, counts):
        assert set(made.values()) == {0}, made


def test_thirty_overlapped_forwards_reserve_nothing_and_all_that_is_reserved_is_live() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    # Of their own: what other tests leave in the allocator's segments counts as well.
    with RankPool(2, backend="nccl", timeout=60.0) as ranks:
        for transport in ("peer", "copy_engine", "all_gather_v"):
            for grown, share in ranks.run(cases.memory_of_forwards, transport, 30):
                assert grown == 0, transport
                assert 1 <= share < 1.01, transport


def test_no_event_stream_slot_or_byte_is_added_after_reserve(pair: RankPool) -> None:
    for seen in pair.run(lifetime_cases.resources_over_steps, PAIR, Options(), 200):
        assert set(seen) == {seen[0]}


def test_inputs_written_late_and_dropped_at_once_arrive_whole(pair: RankPool) -> None:
    assert pair.run(cases.order_of_streams, PAIR, 40, "") == [0, 0]


@pytest.mark.parametrize("broken", ["join", "ready"])
def test_without_either_order_of_the_streams_results_are_wrong(pair: RankPool, broken: str) -> None:
    assert sum(pair.run(cases.order_of_streams, PAIR, 20, broken)) > 0


def test_an_input_dropped_right_after_the_call_lives_until_the_wait(pair: RankPool) -> None:
    assert pair.run(lifetime_cases.input_outlives_the_call, PAIR) == [True, True]


def test_interleaved_halves_equal_the_same_halves_in_turn_bit_for_bit(pair: RankPool) -> None:
    assert pair.run(lifetime_cases.two_batches_equal_one_after_the_other, PAIR, 100) == [200, 200]


@pytest.mark.parametrize("transport", [None, "peer", "copy_engine", "all_gather_v"])
def test_a_thousand_steps_in_halves_equal_the_same_halves_in_turn(pair: RankPool, transport: str | None) -> None:
    assert pair.run(overlap_cases.halves_and_whole, PAIR, transport, 1000, 3) == [0, 0]


def test_halves_captured_whole_are_right_for_all_counts(pair: RankPool) -> None:
    assert pair.run(overlap_cases.captured_halves, PAIR, 300) == [0, 0]


def test_copies_and_kernels_take_turns_on_one_channel_and_give_the_same_bits(pair: RankPool) -> None:
    for wrong, calls in pair.run(peer_exchange_cases.copies_and_kernels, PAIR, 100):
        assert wrong == 0
        assert set(calls.values()) == {100}


def test_async_calls_take_fewer_blocks_and_take_turns_with_others_on_one_channel(pair: RankPool) -> None:
    for wrong, most, beside in pair.run(peer_exchange_cases.many_and_few_blocks, PAIR, 100, 200):
        assert wrong == 0
        assert beside < most


@pytest.mark.parametrize("where", ["same", "another"])
def test_a_capture_goes_by_what_was_measured_in_graphs(pair: RankPool, tmp_path: Path, where: str) -> None:
    eager = (("peer", False, 1.0), ("copy_engine", False, 2.0), ("peer", True, 1.0), ("copy_engine", True, 2.0))
    graph = tuple((name, overlapped, 3.0 - us) for name, overlapped, us in eager)
    save(MeasuredTable((Measured(False, 8, 1.0, eager), Measured(True, 8, 1.0, graph))), tmp_path / "table.json")
    for before, captured in pair.run(cases.transports_in_a_graph, PAIR, str(tmp_path / "table.json"), where):
        assert before == {"peer.gather": 6}
        assert captured == {"peer.gather": 0, "copy_engine.gather": 2}


def test_copies_spread_over_streams_are_as_right(crowd: Callable[[int], RankPool]) -> None:
    assert crowd(3).run(cases.spread_copies, Grid(3, 3), 20) == [0, 0, 0]


def test_an_error_in_one_half_is_told_to_every_rank_and_nobody_waits(crowd: Callable[[int], RankPool]) -> None:
    (said, later, seconds), (failed, _, _) = crowd(2).run(overlap_cases.one_half_fails, PAIR)
    assert failed == "ValueError: out of experts"
    assert "rank 1: ValueError: out of experts" in said + later
    assert seconds < 30


@pytest.mark.parametrize("limit", [63, 200, 1024])
def test_the_host_never_runs_ahead_of_more_records_than_the_limit(pair: RankPool, limit: int) -> None:
    for most, resources in pair.run(cases.run_ahead, PAIR, limit, 3000):
        assert limit // 3 < most <= limit
        assert len(resources) == 1


@pytest.mark.parametrize("transport", ["peer", "copy_engine", "all_gather", "all_gather_v"])
def test_a_captured_step_replays_with_other_values(pair: RankPool, transport: str) -> None:
    assert pair.run(cases.captured, PAIR, transport, 50) == [50, 50]


def test_a_capture_takes_only_buffers_that_can_never_move(pair: RankPool) -> None:
    for said in pair.run(cases.growing_buffers_in_a_capture, PAIR):
        assert "needs max_rows and reserve() before the capture" in said


def test_captures_and_eager_calls_follow_each_other_in_any_order(pair: RankPool) -> None:
    assert pair.run(cases.capture_that_ends_with_a_wait, PAIR) == [0, 0]


def test_calls_go_to_the_exchanges_device_whatever_the_current_one_is(pair: RankPool) -> None:
    assert pair.run(cases.while_another_device_is_current, PAIR) == [0, 0]


def test_every_rank_of_a_pair_takes_peer_memory_and_says_why(pair: RankPool) -> None:
    for verdicts in pair.run(peer_exchange_cases.verdicts, PAIR, ""):
        assert verdicts[0] == ("peer", True, "first in the table that can")


def test_symmetric_memory_of_torch_serves_as_well(pair: RankPool) -> None:
    for said in pair.run(peer_exchange_cases.over_symmetric_memory, PAIR):
        assert said == [("first in the table that can", True)]


@pytest.fixture(scope="module")
def crowd() -> Iterator[Callable[[int], RankPool]]:
    """Ranks that share the GPUs at hand, by world size: slow, since processes take turns, but right."""
    with ExitStack() as stack:
        pools: dict[int, RankPool] = {}

        def pool(world: int) -> RankPool:
            if world not in pools:
                pools[world] = stack.enter_context(RankPool(world, backend="gloo", timeout=280.0))
            return pools[world]

        yield pool


CROWDS = [
    *(Grid(2, 2), Grid(2, 1), Grid(3, 3), Grid(4, 4), Grid(4, 2), Grid(4, 1, 2), Grid(5, 5), Grid(6, 3)),
    *(Grid(6, 1, 3), Grid(7, 7), Grid(8, 8), Grid(8, 4), Grid(8, 2, 2)),
]


@pytest.mark.parametrize("grid", CROWDS, ids=str)
def test_peer_memory_serves_any_world_of_up_to_8_ranks(crowd: Callable[[int], RankPool], grid: Grid) -> None:
    pool, steps = crowd(grid.world), 12 if grid.world < 5 else 6
    assert {wrong for wrong, _ in pool.run(peer_kernel_cases.gathers, grid, steps)} == {0}
    for dtype, width in ((torch.float32, 12), (torch.bfloat16, 520), (torch.float16, 7)):
        assert pool.run(peer_kernel_cases.combines, grid, width, dtype, steps) == [0] * grid.world
    assert pool.run(peer_kernel_cases.partial_gathers, grid, steps) == [0] * grid.world
    assert pool.run(peer_kernel_cases.counts_on_the_device, grid, steps) == [0] * grid.world
    assert pool.run(peer_exchange_cases.captured_steps, grid, steps) == [0] * grid.world
    assert {wrong for wrong, _, _ in pool.run(peer_exchange_cases.pulled_combines, grid, steps)} == {0}


def test_one_graph_replayed_10000_times_with_other_counts_is_right_every_time(pair: RankPool) -> None:
    assert pair.run(peer_exchange_cases.captured_steps, PAIR, 10_000) == [0, 0]


def test_without_the_wait_or_the_second_slot_results_are_wrong(crowd: Callable[[int], RankPool]) -> None:
    pool, long, steps = crowd(3), peer_kernel_cases.LONG, 20
    assert pool.run(peer_kernel_cases.with_a_slow_rank, 3, long, 2, steps) == [0, 0, 0]
    assert sum(pool.run(peer_kernel_cases.with_a_slow_rank, 3, 1e-6, 2, steps)) > 0
    assert sum(pool.run(peer_kernel_cases.with_a_slow_rank, 3, long, 1, steps)) > 0
    assert pool.run(peer_kernel_cases.same_slot_again, 3, steps) == [(0, 2 * steps - 1)] * 3
    assert pool.run(peer_kernel_cases.epochs_far_on, 3, 4) == [0, 0, 0]


def test_a_rank_that_never_calls_is_named_and_nobody_waits_for_ever(crowd: Callable[[int], RankPool]) -> None:
    first, absent, last = crowd(3).run(peer_kernel_cases.one_rank_never_calls, 3)
    for late, what, spoilt, seconds in (first, last):
        assert (late, what, spoilt) == (True, (("gather", 0), 2, (1,)), True)
        assert seconds < 10
    assert absent[:2] == (False, None)


@pytest.mark.parametrize("how", ["killed", "stopped", "late"])
def test_a_lost_rank_is_named_to_the_others_within_the_bound(how: str, tmp_path: Path) -> None:
    told = lose_rank_1(how, tmp_path, bound=2.0, env={})
    assert set(told) == {0, 2}
    for one in told.values():
        assert (one["error"], one["missing"]) == ("PeerTimeoutError", [1])
        assert one["call"] in (["gather", 0], ["combine", 0])
        assert "can't be used after" in one["after"]
        # Three processes share the GPUs, and a look takes longer in turns; then they tell what they did.
        assert one["seconds"] < 20


def test_callers_on_two_streams_and_two_exchanges_are_one_order(pair: RankPool) -> None:
    assert pair.run(cases.two_callers_two_exchanges, PAIR, 200) == [0, 0]


def test_a_caller_is_ordered_after_the_last_one_on_another_stream(pair: RankPool) -> None:
    assert pair.run(cases.callers_that_never_wait, PAIR, 20, "") == [0, 0]


def test_without_the_order_of_callers_calls_cross(pair: RankPool) -> None:
    assert sum(pair.run(cases.callers_that_never_wait, PAIR, 20, "callers")) > 0


def test_a_buffer_outgrown_on_another_stream_is_kept_until_the_earlier_caller_is_done() -> None:
    device = torch.device("cuda", 0)
    side = CommStream(device, Options())
    pool = SlotPool(device, side.events, side.ordered)
    streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(streams[0]):
        old = weakref.ref(pool.take("gather", 0, 100).buffer)
        side.inline(lambda _: cases.sleep(cases.SLEEP * 100), raw=True)
    with torch.cuda.stream(streams[1]):
        for nbytes in (1000, 1):
            pool.take("gather", 0, nbytes)
        assert old() is not None
        streams[0].synchronize()
        streams[1].synchronize()
        pool.take("gather", 0, 1)
        assert old() is None


def test_an_error_with_a_call_in_flight_comes_through_though_the_other_rank_never_comes() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    said, seconds = run_ranks(cases.raise_with_a_call_in_flight, 2, backend="nccl", timeout=120.0)[0]
    assert said == "the attention of rank 0 failed"
    assert seconds < 10


def test_every_rank_reads_and_writes_the_memory_of_all_over_ipc(pair: RankPool) -> None:
    for counted in pair.run(peer_cases.everyone_writes_to_everyone, 2, 20):
        assert len(set(counted[4:])) == 1


def test_misuse_and_growth_and_the_thin_verbs_are_as_on_the_cpu(pair: RankPool) -> None:
    assert pair.run(lifetime_cases.inference_mode_does_not_stick, PAIR) == [True, True]
    assert pair.run(lifetime_cases.group_verbs, 2, 1, 1, 1) == [[], []]
    assert len(pair.run(lifetime_cases.errors_of, PAIR)[0]) == 22
    for growths, _, events_held in pair.run(lifetime_cases.growth, PAIR):
        assert 4 <= growths <= 40
        # Two slots, what was outgrown, the run-ahead fences, the hand-over.
        assert events_held == 2 * 2 + 1 + 8 + 1


def test_the_demo_passes_on_the_gpus_at_hand(tmp_path: Path) -> None:
    out = tmp_path / "demo.json"
    command = [sys.executable, "-m", "rocm_dp", "demo", "--steps", "30", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["passed"]
    assert found["ranks"] == torch.cuda.device_count()
    assert found["device"] != "CPU"


def test_rows_of_any_dtype_width_and_alignment_are_moved_and_no_guard_is_touched() -> None:
    assert row_cases.matrix("cuda") > 500
    row_cases.any_move("cuda", 200)


@pytest.mark.parametrize(("number", "width"), [(299_600, 7168), (17_000, 129_281)])
def test_rows_beyond_two_to_the_31_elements_land_in_their_place(number: int, width: int) -> None:
    dst = torch.zeros(number, width, dtype=torch.uint8, device="cuda")
    assert dst.numel() > 2**31
    src = torch.randint(1, 255, (8, width), dtype=torch.uint8, device="cuda")
    start, count = torch.tensor(number - 6, device="cuda"), torch.tensor(6, device="cuda")
    rows.write_rows(dst, src, start=start, count=count)
    assert torch.equal(dst[-6:], src[:6])
    assert int(dst[:-6].count_nonzero()) == 0
    back = torch.empty_like(src)
    rows.read_rows(back, dst, start=start, count=count)
    assert torch.equal(back[:6], src[:6])
    assert int(back[6:].count_nonzero()) == 0
    rows.place_rows(dst, src, start=start - 1, count=count - 2)
    assert torch.equal(dst[-7:-3], src[:4])
    assert int(dst.count_nonzero()) == 4 * width
    del dst


def test_numbers_of_the_host_give_the_same_rows_eager_and_in_a_graph() -> None:
    src = torch.randn(5, 24, device="cuda")
    for verb, (number, start, count) in (
        ("write_rows", (9, 2, 3)),
        ("place_rows", (9, 2, 3)),
        ("read_rows", (4, 1, 3)),
    ):
        eager, on_device, replayed = (torch.full((number, 24), 7.0, device="cuda") for _ in range(3))
        at, n = torch.tensor(start, device="cuda"), torch.tensor(count, device="cuda")
        call = getattr(rows, verb)
        call(eager, src, start=start, count=count)
        call(on_device, src, start=at, count=n)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(replayed, src, start=start, count=count)
        graph.replay()
        assert torch.equal(eager, on_device)
        assert torch.equal(replayed, on_device)
        del graph


def test_counts_stay_on_the_device() -> None:
    """No call asks the host: under a sync that raises, all of them run."""
    dst, src = torch.zeros(64, 8, device="cuda"), torch.ones(64, 8, device="cuda")
    number, counts = torch.tensor(3, device="cuda"), torch.tensor([3, 5], device="cuda")
    status = rows.new_status("cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for verb in (rows.write_rows, rows.place_rows, rows.read_rows):
            verb(dst, src, start=number, count=number, status=status)
        for repack in (rows.compact_rows, rows.expand_rows):
            repack(dst, src, counts=counts, status=status)
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("default")
    rows.check_status(status)
