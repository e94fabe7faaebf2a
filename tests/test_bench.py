"""``rocm-dp bench gather``, ``combine`` and ``host``: fair, checked, honest when wrong, clear about wrong usage."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from rocm_dp import RankLayout, TokenExchange
from rocm_dp.bench import bandwidth, rank
from rocm_dp.bench.about import About
from rocm_dp.bench.cases import default_cases, parse_counts, parse_sweep, short, spread, trace_cases
from rocm_dp.bench.config import BenchConfig
from rocm_dp.bench.contenders import agreed
from rocm_dp.bench.inputs import Expected, Inputs, poison, wrong_elements
from rocm_dp.bench.rank import Finding, RankFindings, run_rank
from rocm_dp.bench.report import Summary, make_report
from rocm_dp.bench.table import render
from rocm_dp.bench.timing import Times, quantile
from rocm_dp.cli import main
from rocm_dp.errors import ConfigError, TransportRefusedError
from rocm_dp.platform import environment
from rocm_dp.routing import NAMES, TransportVerdict
from rocm_dp.workload import SchedulerConfig, read_trace, schedule

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rocm_dp.testing import RankPool

    Ranks = Callable[[int], RankPool]

QUICK = ["--hidden", "8", "--iters", "2", "--warmup", "1"]
# Those that every machine has; others may refuse here.
ALWAYS = ("all_gather", "all_gather_v", "all_reduce")
GATHERS = {"zero + copy + all_reduce", "padded all_gather", "all_gather of views", "send/recv"}
COMBINES = {"all_reduce + slice", "padded reduce_scatter", "reduce_scatter of views", "send/recv + sum"}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command see no GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture
def on_pool(on_cpu: None, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command use the CPU ranks that the tests have already."""
    monkeypatch.setattr("rocm_dp.testing.RankPool", lambda size, **_: nullcontext(ranks(size)))


def measured(tmp_path: Path, *args: str, code: int = 0) -> dict[str, Any]:
    out = tmp_path / "out.json"
    assert main(["bench", *args, "--json", str(out)]) == code
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.usefixtures("on_cpu")
def test_a_run_measures_every_contender_on_every_case_and_checks_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "out.csv"
    found = measured(tmp_path, "gather", "--ranks", "2", "--counts", "3+0,4+4", *QUICK, "--csv", str(table))
    results = found["results"]
    names = [*NAMES, *sorted(f"torch: {name}" for name in GATHERS)]
    assert [(one["counts"], one["contender"]) for one in results] == [
        (counts, name) for counts in ("3+0", "4+4") for name in names
    ]
    timed = [one for one in results if one["reason"] is None]
    assert {one["contender"] for one in timed} >= {*ALWAYS, "torch: padded all_gather", "torch: send/recv"}
    assert all(one["wrong"] == 0 and 0 < one["eager_p50"] <= one["eager_p99"] for one in timed)
    assert all(one["graph_p50"] is None and one["graph_reason"] == "no GPU" for one in timed)
    shown = capsys.readouterr().out
    assert "every result equals the reference" in shown
    assert "torch: all_gather of views: n/a: ProcessGroupGloo" in shown
    assert f"torch {torch.__version__}" in shown
    with table.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["counts"], line["contender"], float(line["eager_p50"] or 0)) for line in lines] == [
        (one["counts"], one["contender"], one["eager_p50"] or 0) for one in results
    ]
    check_figures(found, row_bytes=8 * 2)


def check_figures(found: dict[str, Any], row_bytes: int) -> None:
    """Everything derived follows from the times in the same file."""
    ratios: dict[str, list[float]] = {name: [] for name in NAMES}
    for one in found["results"]:
        same_case = [other for other in found["results"] if other["counts"] == one["counts"]]
        counts = [int(count) for count in one["counts"].split("+")]
        assert one["rows"] == sum(counts)
        assert one["bytes"] == sum(counts) * row_bytes
        assert one["skew"] == max(counts) * 2 / sum(counts)
        if one["reason"] is None:
            padded = one["contender"] in ("all_gather", "torch: padded all_gather")
            assert one["moved_rows"] == (2 * max(counts) if padded else sum(counts))
            assert one["algbw"] == pytest.approx(one["moved_rows"] * row_bytes / one["eager_p50"] / 1e3)
            assert one["busbw"] == pytest.approx(one["algbw"] / 2)
            assert one["real_busbw"] == pytest.approx(one["bytes"] / one["eager_p50"] / 1e3 / 2)
        if one["ours"] and one["reason"] is None:
            best = min(other["eager_p50"] for other in same_case if not other["ours"] and not other["reason"])
            assert one["ratio_eager"] == pytest.approx(one["eager_p50"] / best)
            ratios[one["contender"]].append(one["ratio_eager"])
        else:
            assert one["ratio_eager"] is None
    for line in found["summary"]:
        mean = ratios[line["transport"]] and math.prod(ratios[line["transport"]]) ** 0.5
        assert line["ratio_eager"] == (pytest.approx(mean) if mean else None)


@pytest.mark.parametrize(
    ("verb", "extra"),
    [
        ("combine", ["--dp", "2", "--counts", "0+3,2+2", "--dtype", "fp16"]),
        ("combine", ["--dp", "1", "--counts", "4,5", "--dtype", "fp32", "--unaligned"]),
        ("combine", ["--dp", "1", "--cp", "2", "--counts", "3", "--transports", "all_gather_v,all_gather"]),
        ("gather", ["--dp", "1", "--counts", "1,5", "--unaligned"]),
        ("gather", ["--dp", "2", "--sweep", "1:16:4", "--skew", "1.5", "--dtype", "fp32"]),
    ],
)
@pytest.mark.usefixtures("on_pool")
def test_every_layout_dtype_and_alignment_is_right(tmp_path: Path, verb: str, extra: list[str]) -> None:
    results = measured(tmp_path, verb, "--ranks", "2", *QUICK, *extra)["results"]
    library = {one["contender"].removeprefix("torch: ") for one in results if not one["ours"]}
    assert library == (GATHERS if verb == "gather" else COMBINES)
    timed = [one for one in results if one["reason"] is None]
    assert all(one["wrong"] == 0 for one in timed)
    wanted = {"all_gather", "all_gather_v"} if "--transports" in extra else set(ALWAYS)
    assert {one["contender"] for one in timed if one["ours"]} >= wanted


def gather_with_a_lie(rank: int, config: BenchConfig) -> RankFindings:
    """Add one to an element of every gather that comes out of our exchanges."""
    honest = TokenExchange.gather

    def lying(self: TokenExchange, *args: Any, **options: Any) -> torch.Tensor:
        got = honest(self, *args, **options)
        got[-1, -1] += 1
        return got

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenExchange, "gather", lying)
        return run_rank(rank, config)


@pytest.mark.usefixtures("on_pool")
def test_a_wrong_result_is_counted_and_the_exit_code_is_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank, "run_rank", gather_with_a_lie)
    args = ("gather", "--counts", "2+3", "--transports", "all_gather_v", *QUICK)
    results = measured(tmp_path, *args, code=1)["results"]
    # Two calls over NaN and the one after the timing, on two ranks.
    assert {one["contender"]: one["wrong"] for one in results if one["ours"]} == {"all_gather_v": 6}
    assert all(not one["wrong"] for one in results if not one["ours"])
    assert "FAILED: 6 wrong elements" in capsys.readouterr().out
    unchecked = measured(tmp_path, *args, "--no-check")["results"]
    assert all(one["wrong"] is None for one in unchecked)
    assert "nothing was checked" in capsys.readouterr().out


def with_refusals(rank: int, config: BenchConfig) -> RankFindings:
    """Rank 1 finds that all_gather can't be used at all; all_reduce takes no plan; all_gather_v refuses a call."""
    start, explain, gather = TokenExchange.__init__, TokenExchange.explain, TokenExchange.gather

    def starting(self: TokenExchange, *args: Any, options: Any, **others: Any) -> None:
        start(self, *args, options=options, **others)
        if options.transport == "all_gather" and rank == 1:
            self.close()
            raise TransportRefusedError("no link to rank 0")

    def explaining(self: TokenExchange, plan: Any) -> list[TransportVerdict]:
        if self.options.transport == "all_reduce":
            return [TransportVerdict("all_reduce", chosen=False, reason="too few rows")]
        return explain(self, plan)

    def gathering(self: TokenExchange, *args: Any, **others: Any) -> torch.Tensor:
        if self.options.transport == "all_gather_v":
            raise TransportRefusedError("not today")
        return gather(self, *args, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenExchange, "__init__", starting)
        patch.setattr(TokenExchange, "explain", explaining)
        patch.setattr(TokenExchange, "gather", gathering)
        return run_rank(rank, config)


@pytest.mark.usefixtures("on_pool")
def test_a_transport_that_refuses_is_shown_with_its_reason_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank, "run_rank", with_refusals)
    found = measured(tmp_path, "gather", "--counts", "2+3", "--transports", ",".join(ALWAYS), *QUICK)
    reasons = {one["contender"]: one["reason"] for one in found["results"] if one["ours"]}
    refused = {"all_gather": "no link to rank 0", "all_gather_v": "not today", "all_reduce": "too few rows"}
    assert reasons == refused
    assert {line["cases"] for line in found["summary"]} == {0}
    assert any(one["wrong"] == 0 for one in found["results"])
    shown = capsys.readouterr().out
    assert all(f"{name}: n/a: {reason} (2+3)" in shown for name, reason in refused.items())


@pytest.mark.usefixtures("on_pool")
def test_the_host_cost_of_every_verb_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "out.csv"
    found = measured(
        tmp_path,
        "host",
        "--counts",
        "2+0",
        "--calls",
        "4",
        "--transports",
        "all_gather_v",
        *QUICK,
        "--csv",
        str(table),
    )
    costs = {one["what"]: one for one in found["results"]}
    verbs = ("gather", "combine", "gather_async + wait", "combine_async + wait", "gather_many")
    assert {name for name, one in costs.items() if one["ours"]} == {f"all_gather_v: {verb}" for verb in verbs}
    library = {f"gather by torch: {name}" for name in GATHERS} | {f"combine by torch: {name}" for name in COMBINES}
    assert library <= costs.keys()
    assert costs["event recorded again"]["reason"] == costs["event made and recorded"]["reason"] == "no GPU"
    assert all(0 < one["least"] <= one["p50"] <= one["most"] for one in costs.values() if one["reason"] is None)
    assert costs["torch.empty"]["reason"] is None
    assert "its waits included" in capsys.readouterr().out
    assert len(table.read_text().splitlines()) == 1 + len(costs)


def test_contenders_are_measured_in_an_order_that_only_the_seed_decides(ranks: Ranks) -> None:
    orders = []
    for seed in (1, 1, 2):
        config = BenchConfig("gather", 2, 2, ((1, 2),), ALWAYS, hidden=4, iters=1, warmup=1, check=False, seed=seed)
        first, second = ranks(2).run(run_rank, config)
        assert [one.name for one in first.findings] == [one.name for one in second.findings]
        orders.append([one.name for one in first.findings])
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_the_first_different_steps_of_a_trace_become_the_cases(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:17:0{second}.0000000,{9 * second + 3},2" for second in range(9)]
    trace.write_text("\n".join(lines))
    cases = trace_cases(trace, 2, 4, speed=2.0, gpu=False)
    steps = schedule(read_trace(trace).at_speed(2.0).requests, SchedulerConfig(dp_size=2, token_budget=64))
    assert list(cases) == list(dict.fromkeys(step.counts for step in steps))[:4]
    assert len(cases) == 4


@pytest.mark.parametrize(
    ("text", "dp", "cases"),
    [
        ("32+17,8", 4, ((32, 17, 32, 17), (8, 8, 8, 8))),
        ("1+0", 2, ((1, 0),)),
        ("1+2", 3, ((1, 2, 1),)),
        (" 3 + 4 ", 2, ((3, 4),)),
    ],
)
def test_counts_are_read_and_short_cases_repeated(text: str, dp: int, cases: object) -> None:
    assert parse_counts(text, dp) == cases


def test_a_sweep_multiplies_the_total_and_spreads_it_by_its_skew() -> None:
    assert parse_sweep("2:32:4", 2, 1.5) == ((2, 0), (6, 2), (24, 8))
    assert parse_sweep("1:4:1.2", 1, 1.0) == ((1,), (2,), (3,), (4,))
    assert spread(12, 4, 1.0) == (3, 3, 3, 3)
    assert spread(12, 4, 4.0) == (12, 0, 0, 0)
    assert spread(12, 4, 2.0) == (6, 2, 2, 2)
    chance = random.Random(3)
    for _ in range(300):
        total, dp = chance.randint(1, 5000), chance.randint(1, 8)
        skew = chance.uniform(1, dp)
        counts = spread(total, dp, skew)
        assert len(counts) == dp
        assert sum(counts) == total
        assert max(counts) == counts[0]
        assert abs(counts[0] - skew * total / dp) <= 1


def test_counts_are_shown_short() -> None:
    assert short((32, 17)) == "32+17"
    assert short((8, 8)) == "8+8"
    assert short((32, 17, 32, 17)) == "2x(32+17)"
    assert short((8, 8, 8)) == "3x8"
    assert short((1, 2, 1)) == "1+2+1"


def reasons(rank: int) -> list[str | None]:
    """What is agreed when no rank has a reason, the last one has, one has no words for it, both have long ones."""
    last = rank == dist.get_world_size() - 1
    given = (None, "é" * 3000 if last else None, "" if last else None, f"rank {rank}")
    group = dist.group.WORLD
    assert group is not None
    return [agreed(reason, group) for reason in given]


def test_ranks_agree_on_the_first_reason_not_to_go_on(ranks: Ranks) -> None:
    for said in ranks(2).run(reasons):
        assert said == [None, "é" * 1024, "no reason given", "rank 0"]


def test_default_cases_fit_any_number_of_dp_ranks() -> None:
    assert default_cases("gather", 2, gpu=True)[1] == (32, 17)
    assert default_cases("gather", 1, gpu=True) == ((1,), (32,), (128,), (512,), (4096,), (8192,))
    assert default_cases("combine", 8, gpu=False)[0] == (1, 0) * 4


def test_bandwidths_floors_and_means_are_what_their_sources_say() -> None:
    # 1 GB in 1 ms is 1 TB/s; a ring of 4 moves 3/4 of it over each link.
    assert bandwidth.algbw(10**9, 1000.0) == 1000.0
    assert bandwidth.busbw(10**9, 1000.0, 4) == 750.0
    assert bandwidth.busbw(10**9, 1000.0, 1) == 0.0
    assert bandwidth.gather_receives((128, 64)) == 128
    assert bandwidth.gather_receives((5, 0, 7)) == 12
    assert bandwidth.combine_receives((128, 64), 1) == 128
    assert bandwidth.combine_receives((5, 0, 7), 1) == 14
    # 4 ranks, 2 of each dp rank: 3 others send a share of 64, and the fellow its own.
    assert bandwidth.combine_receives((128, 64), 2) == 3 * 64 + 64
    # 128 rows of 7168 bf16 at 384 GB/s.
    assert bandwidth.floor_us(128 * 7168 * 2, 384.0) == pytest.approx(4.78, abs=0.005)
    assert bandwidth.geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
    assert bandwidth.geometric_mean([]) is None
    assert quantile([5.0, 1.0, 4.0, 2.0, 3.0], 0.99) == 5.0
    assert quantile([5.0, 1.0, 4.0, 2.0, 3.0], 0.1) == 1.0


def gpu_findings(slower: float) -> RankFindings:
    """What a rank with a GPU may find for 128+64: ours, a, b, and c, which can't be captured."""
    where = About({"torch": "2.11"}, "nccl", "a GPU", "one host", {"NCCL_DEBUG": "WARN"})

    def finding(name: str, us: float | None, *, ours: bool = False) -> Finding:
        graph = None if us is None else Times(us - 1, us + slower, us + 2, us + 3)
        graph_reason = "capture failed" if us is None else None
        return Finding(0, name, ours, 192, 0, Times(39.0, 40.0 + slower, 41.0, 50.0), graph, None, graph_reason)

    found = (finding("a", 24.0), finding("b", 20.0), finding("c", None), finding("all_reduce", 10.0, ours=True))
    return RankFindings(where, found, 400.0)


def test_the_slowest_rank_counts_and_the_graph_is_held_against_library_and_floor() -> None:
    config = BenchConfig("combine", 2, 2, ((128, 64),), ("all_reduce",), hidden=7168)
    report = make_report([gpu_findings(0.0), gpu_findings(2.0)], config)
    ours, a, _, c = report.results
    assert [one.contender for one in report.results] == ["all_reduce", "a", "b", "c"]
    assert (ours.graph_p50, ours.eager_p50, ours.eager_p99) == (12.0, 42.0, 50.0)
    assert ours.ratio_graph == 12.0 / 22.0
    assert ours.ratio_eager == 1.0
    assert ours.algbw == pytest.approx(192 * 7168 * 2 / 12.0 / 1e3)
    assert ours.floor_us == pytest.approx(128 * 7168 * 2 / 400e3)
    assert ours.over_floor_us == pytest.approx(12.0 - 4.587, abs=1e-3)
    assert ours.times_floor == pytest.approx(12.0 / 4.587, abs=1e-3)
    assert a.ratio_graph is None
    assert c.graph_p50 is None
    assert c.algbw == pytest.approx(192 * 7168 * 2 / 42.0 / 1e3)
    assert report.summary == (Summary("all_reduce", 1, 1.0, 12.0 / 22.0),)
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(render(report))
    shown = console.export_text()
    assert "copies from all peers reach a GPU at 400.0 GB/s" in shown
    assert "c: no graph: capture failed (128+64)" in shown
    assert "NCCL_DEBUG=WARN" in shown


def inputs(rank: int, counts: tuple[int, ...], **options: Any) -> Inputs:
    config = BenchConfig("gather", len(counts), len(counts), (counts,), ALWAYS, hidden=16, **options)
    return Inputs(config, RankLayout(rank, len(counts), len(counts)), torch.device("cpu"), counts)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_inputs_add_up_exactly_and_an_error_of_one_element_is_one_wrong_element(dtype: str) -> None:
    ranks = [inputs(rank, (3, 0, 5), dtype=dtype, seed=2**40) for rank in range(3)]
    plan = ranks[0].max_len()
    in_order = sum(one.partial(plan) for one in ranks)
    assert isinstance(in_order, torch.Tensor)
    assert torch.equal(in_order[:3], ranks[0].combined())
    gathered = ranks[1].gathered(plan)
    assert torch.equal(gathered[10:15], ranks[2].local())
    assert not gathered[3:10].any()
    assert len(set(gathered.flatten().tolist())) > 60
    expected = Expected("gather", ranks[0])
    assert expected.wrong(gathered, plan) == 0
    spoiled = gathered.clone()
    spoiled[4, 7] = 1
    spoiled[11, 2] += 1
    assert expected.wrong(spoiled, plan) == 2
    poison(spoiled)
    assert expected.wrong(spoiled, plan) == spoiled.numel()
    assert expected.wrong(gathered[:-1], plan) == gathered.numel()
    assert wrong_elements(gathered[:0], gathered[:0].double()) == 1


def test_unaligned_inputs_are_contiguous_and_one_element_off() -> None:
    for dtype, nbytes in (("bf16", 2), ("fp32", 4)):
        one = inputs(0, (3, 2), dtype=dtype, unaligned=True)
        for rows in (one.local(), one.partial(one.sum_len())):
            assert rows.is_contiguous()
            assert rows.data_ptr() % 16 == nbytes
        assert torch.equal(one.local(), inputs(0, (3, 2), dtype=dtype).local())


def test_the_environment_shown_is_what_may_explain_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("HSA_NO_SCRATCH_RECLAIM", "1")
    monkeypatch.setenv("MY_API_TOKEN", "secret")
    shown = environment()
    assert shown["NCCL_NVLS_ENABLE"] == "0"
    assert shown["HSA_NO_SCRATCH_RECLAIM"] == "1"
    assert "MY_API_TOKEN" not in shown
    assert list(shown) == sorted(shown)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--counts", "3+x"], "--counts must be like 32+17,128+64, got '3+x'"),
        (["--counts", "3+4,"], "--counts must be like 32+17,128+64, got ''"),
        (["--counts", "1+2+3"], "--counts 1+2+3 has 3 counts, but there are 2 dp ranks"),
        (["--counts", "0+0"], "must have a row, got 0+0"),
        (["--counts", "9999999999"], "must lie in [0, 2147483647], got 9999999999"),
        (["--sweep", "1:10"], "--sweep must be min:max:factor, like 2:16384:2, got '1:10'"),
        (["--sweep", "8:4:2"], "1 <= min <= max and a factor above 1, got '8:4:2'"),
        (["--sweep", "1:100000:1.00001"], "1000 cases at most, got '1:100000:1.00001'"),
        (["--sweep", "2:8:2", "--skew", "3"], "--skew must lie in [1, dp 2], got 3"),
        (["--skew", "2"], "got --skew 2 without --sweep"),
        (["--trace", "nowhere.csv"], "nowhere.csv"),
        (["--dtype", "fp8"], "--dtype must be among bf16, fp16, fp32, got 'fp8'"),
        (["--transports", "all_reduce,pigeon"], f"--transports must be among {', '.join(NAMES)}, got pigeon"),
        (["--dp", "3"], "dp_size 3 * cp_size 1 must divide world_size 2"),
        (["--ranks", "0"], "world_size must be at least 1"),
        (["--iters", "0"], "iters must be at least 1, got 0"),
        (["--graph-calls", "-1"], "calls must be at least 0, got -1"),
        (["--timeout", "0"], "--timeout must be a number of seconds above 0, got 0"),
        (["--json", "no/such/folder.json"], "--json needs an existing folder, got no/such"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_both_sides_before_a_rank_starts(
    args: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def started(*_: object, **options: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rocm_dp.testing.RankPool", started)
    assert main(["bench", "gather", "--ranks", "2", *args]) == 2
    assert said in capsys.readouterr().err.replace("\n", "")


def test_bad_counts_are_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"got '-1\+3'"):
        parse_counts("-1+3", 2)


@pytest.mark.usefixtures("on_pool")
def test_a_run_that_takes_too_long_is_ended_with_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["gather", "--counts", "2+3", "--hidden", "8", "--iters", "1000000", "--timeout", "1.5"]
    assert main(["bench", *args]) == 1
    assert "the run was ended" in capsys.readouterr().err


def test_ctrl_c_stops_a_run_and_leaves_no_process(tmp_path: Path) -> None:
    args = ["gather", "--ranks", "2", "--counts", "2+3", "--iters", "10000000"]
    command = [sys.executable, "-m", "rocm_dp", "bench", *args]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        parent = psutil.Process(running.pid)
        deadline = time.monotonic() + 60
        while len(ranks := parent.children(recursive=True)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(2)
        os.kill(running.pid, signal.SIGINT)
        running.communicate(timeout=30)
    assert running.returncode == 130
    gone, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive, alive
    assert len(gone) >= 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("verb", ["gather", "combine"])
def test_on_gpus_every_contender_is_timed_in_a_graph_and_held_against_the_floor(tmp_path: Path, verb: str) -> None:
    found = measured(tmp_path, verb, "--ranks", "2", "--counts", "1+0,33+17,512+512", "--iters", "5")
    for one in found["results"]:
        if one["reason"] is None:
            assert one["wrong"] == 0
            assert one["floor_us"] > 0
            assert one["graph_reason"] or 0 < one["graph_p10"] <= one["graph_p50"] <= one["graph_p90"]
    assert 10 < found["receive_gb_s"] < 10_000
    assert all(line["ratio_graph"] for line in found["summary"] if line["transport"] in ALWAYS)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_on_gpus_the_host_cost_leaves_nothing_out(tmp_path: Path) -> None:
    costs = measured(tmp_path, "host", "--ranks", "2", "--iters", "3")["results"]
    assert all(
        one["p50"] > 0 for one in costs if one["what"].partition(":")[0] in (*ALWAYS, "event recorded again")
    )
