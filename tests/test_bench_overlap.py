"""``rocm-dp bench overlap``: real layers, honest figures, a trace that can be read, clear about wrong usage."""

from __future__ import annotations

import csv
import json
import os
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import bench_overlap_cases as cases
import pytest
import torch

from rocm_dp import reference
from rocm_dp.bench import overlap_figures as figures
from rocm_dp.bench import overlap_rank
from rocm_dp.bench.about import About
from rocm_dp.bench.contenders import AUTO
from rocm_dp.bench.overlap_config import (
    OverlapConfig,
    default_pairs,
    pair_name,
    parse_pairs,
    parse_queues,
    sweep_pairs,
)
from rocm_dp.bench.overlap_measure import OverlapTimes, _wrong, slowest
from rocm_dp.bench.overlap_rank import Finding, RankFindings
from rocm_dp.bench.overlap_report import OverlapReport, make_section
from rocm_dp.bench.overlap_table import render
from rocm_dp.bench.table import print_wide
from rocm_dp.bench.timeline import LANES, HostClock, Marks, Span, trace_events
from rocm_dp.cli import main
from rocm_dp.errors import ConfigError
from rocm_dp.plan import PaddingMode, TokenPlan
from rocm_dp.platform import HW_QUEUES, hardware_queues
from rocm_dp.routing import NAMES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rocm_dp.testing import RankPool

    Ranks = Callable[[int], RankPool]

QUICK = ["--hidden", "8", "--intermediate", "4", "--iters", "2", "--warmup", "1"]
ALWAYS = ("all_gather", "all_gather_v", "all_reduce")
LIBRARY = ["torch: grouped", "torch: padded"]


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
    assert main(["bench", "overlap", *args, "--json", str(out)]) == code
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.usefixtures("on_pool")
def test_a_run_measures_every_contender_on_every_case_and_a_refused_one_is_shown_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, trace = tmp_path / "out.csv", tmp_path / "trace.json"
    args = ["--ranks", "2", "--counts", "3+0/1+2,4/4", "--layers", "3", *QUICK]
    found = measured(tmp_path, *args, "--csv", str(table), "--trace-out", str(trace))
    (run,) = found["runs"]
    names = [*NAMES, AUTO, *LIBRARY]
    results = run["results"]
    assert [(one["counts"], one["contender"]) for one in results] == [
        (counts, name) for counts in ("3+0/1+2", "4+4/4+4") for name in names
    ]
    timed = [one for one in results if one["reason"] is None]
    assert {one["contender"] for one in timed} >= {*ALWAYS, "torch: padded"}
    check_figures(results)
    refused = {one["contender"]: one["reason"] for one in results if one["reason"] is not None}
    assert refused.keys() == {"peer", "copy_engine", "aiter", "torch: grouped"}
    shown = capsys.readouterr().out
    assert f"peer: n/a: {refused['peer']} (3+0/1+2, eager; 4+4/4+4, eager)" in shown
    assert "every overlapped result equals the serial one bit for bit" in shown
    assert f"torch {torch.__version__}" in shown
    assert "GPU_MAX_HW_QUEUES is" not in shown
    with table.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["contender"], float(line["overlap"] or 0)) for line in lines] == [
        (one["contender"], one["overlap"] or 0) for one in results
    ]
    check_trace(json.loads(trace.read_text()), [f"{one['counts']}: {one['contender']}" for one in timed], 3)


def chosen(line: dict[str, Any]) -> float | None:
    """The time of what the library chose; of others, the better of whole and overlap."""
    if line["pays"] is not None:
        return line["overlap"] if line["pays"] else line["whole"]  # type: ignore[no-any-return]
    return min((us for us in (line["whole"], line["overlap"]) if us is not None), default=None)


def check_figures(results: list[dict[str, Any]]) -> None:
    """Everything derived follows from the times in the same file."""
    for one in results:
        same = [other for other in results if (other["counts"], other["mode"]) == (one["counts"], one["mode"])]
        times = [one[name] for name in ("compute", "comm", "serial", "overlap")]
        if one["reason"] is not None:
            assert times == [None] * 4
            continue
        assert one["wrong"] == 0
        assert all(us > 0 for us in times)
        assert (one["host"] is None) == (one["mode"] == "graph")
        assert one["slowdown"] is None or one["slowdown"] > 0
        compute, comm, serial, overlap = times
        assert one["hidden"] == pytest.approx(1 - (overlap - compute) / comm)
        assert one["x_bound"] == pytest.approx(overlap / max(compute, comm))
        if one["of_ideal"] is not None:
            assert one["of_ideal"] == pytest.approx((serial - overlap) / (serial - max(compute, comm)))
        best = min(us for other in same if (us := chosen(other)) is not None)
        assert one["x_best"] == pytest.approx((chosen(one) or 0.0) / best)
        grouped = next(other["overlap"] for other in same if other["contender"] == "torch: grouped")
        if one["ours"] and grouped is not None:
            assert one["x_grouped"] == pytest.approx(overlap / grouped)
        else:
            assert one["x_grouped"] is None


def check_trace(trace: dict[str, Any], names: list[str], layers: int) -> None:
    """A process for each contender, a named thread for each lane, stages in turns, none in two places at once."""
    events = trace["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(processes.values()) == sorted(names)
    turns = [f"{what} {layer}" for layer in range(layers) for what in ("attention", "experts")]
    moves = [f"{what} {layer}" for layer in range(layers) for what in ("gather", "combine")]
    for pid in processes:
        mine = [event for event in events if event["pid"] == pid]
        lanes = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name"}
        assert tuple(lanes[tid] for tid in sorted(lanes)) == LANES
        spans = sorted((e for e in mine if e["ph"] == "X"), key=lambda e: float(e["ts"]))
        assert spans[0]["ts"] == 0
        in_lane = {lane: [e for e in spans if lanes[e["tid"]] == lane] for lane in LANES}
        for lane, of_lane in in_lane.items():
            assert [e["name"] for e in of_lane] == (moves if "comm" in lane else [*turns, "last add"])
            assert not overlapping(of_lane)
        in_order = [(e["name"], lanes[e["tid"]]) for e in spans if e["cat"] == "compute"]
        wanted = [(turn, lane) for turn in turns for lane in LANES[:2]]
        assert in_order[: len(wanted)] == wanted
        first_move = in_lane["comm A"][0]
        assert first_move["ts"] >= in_lane["compute A"][0]["dur"]


def overlapping(spans: list[dict[str, Any]]) -> list[str]:
    """The spans that begin before the one ahead of them has ended (a nanosecond is rounding)."""
    return [after["name"] for before, after in pairwise(spans) if after["ts"] < before["ts"] + before["dur"] - 1e-3]


def test_the_check_of_traces_sees_a_stage_that_begins_too_early() -> None:
    spans = [Span("comm A", "gather 0", 0.0, 5.0), Span("comm A", "combine 0", 4.0, 1.0)]
    events: Any = trace_events([("a", spans)])["traceEvents"]
    assert overlapping([event for event in events if event["ph"] == "X"]) == ["combine 0"]


def test_a_call_begins_when_its_rows_are_ready_and_the_call_before_it_is_done() -> None:
    marks = Marks(HostClock())
    marks.compute += [("compute A", "attention 0", 1.0, 3.0), ("compute B", "attention 0", 3.0, 4.0)]
    # Ready at 3, done at 6; ready at 4 and so begun at 6, done at 7; ready at 9, done at 9.5.
    marks.comm += [("comm A", "gather 0", 3.0, 6.0), ("comm B", "gather 0", 4.0, 7.0), ("comm A", "x", 9.0, 9.5)]
    assert marks.busy_us() == 3e6
    assert [(span.start / 1e6, span.us / 1e6) for span in marks.spans()] == [
        *((0.0, 2.0), (2.0, 1.0)),
        *((2.0, 3.0), (5.0, 1.0), (8.0, 0.5)),
    ]


@pytest.mark.usefixtures("on_pool")
def test_an_overlapped_result_that_differs_is_counted_and_the_exit_code_is_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overlap_rank, "run_rank", cases.combine_with_a_lie)
    args = ["--counts", "2+3/3+1", "--transports", "all_gather_v", "--layers", "1", *QUICK]
    results = measured(tmp_path, *args, code=1)["runs"][0]["results"]
    # An element of each half, on two ranks.
    wrong = {one["contender"]: one["wrong"] for one in results if one["reason"] is None}
    assert wrong == {"all_gather_v": 4, AUTO: 4, "torch: padded": 0}
    assert "FAILED: 8 wrong elements" in capsys.readouterr().out
    unchecked = measured(tmp_path, *args, "--no-check")["runs"][0]["results"]
    assert all(one["wrong"] is None for one in unchecked)
    assert "nothing was checked" in capsys.readouterr().out


@pytest.mark.parametrize("args", [["--cp", "2", "--counts", "3/2"], ["--dp", "1", "--counts", "4/5"]])
@pytest.mark.usefixtures("on_pool")
def test_ranks_that_share_their_rows_are_measured_too(tmp_path: Path, args: list[str]) -> None:
    told = ["--ranks", "2", "--transports", "all_gather_v,all_gather", *args, *QUICK]
    results = measured(tmp_path, *told)["runs"][0]["results"]
    check_figures(results)
    timed = {one["contender"] for one in results if one["reason"] is None}
    assert timed >= {"all_gather_v", "all_gather", "torch: padded"}


def config(counts: str, transport: str, **options: Any) -> OverlapConfig:
    (pair,) = parse_pairs(counts, 2)
    sizes = {"hidden": 16, "intermediate": 8, "dtype": "fp32", **options}
    return OverlapConfig("overlap", 2, 2, pair, (transport,), **sizes)


@pytest.mark.parametrize("transport", ["all_gather_v", "all_gather"])
def test_the_layers_gather_and_combine_real_rows_in_turn_and_in_turns(ranks: Ranks, transport: str) -> None:
    told = config("3+2/1+4", transport, layers=3)
    seen = ranks(2).run(cases.one_case, told)
    for half, counts in enumerate(told.cases):
        want = by_hand([one.start[half] for one in seen], [one.weights for one in seen], counts, depth=3)
        for one, rows in zip(seen, want, strict=True):
            torch.testing.assert_close(one.outcomes["serial"][half], rows)
            assert torch.equal(one.outcomes["overlap"][half], one.outcomes["serial"][half])
            assert not torch.equal(one.outcomes["compute"][half], one.outcomes["serial"][half])
            assert (rows != one.start[half]).all()
            assert rows.abs().max() < 10
    assert all(one.times.wrong == 0 for one in seen)
    assert not any(one.has_stream for one in seen)


def by_hand(
    start: list[torch.Tensor], weights: list[Any], counts: tuple[int, ...], depth: int
) -> list[torch.Tensor]:
    """The layers of all ranks in one process, with the oracle's gather and combine."""
    plan = TokenPlan(counts, PaddingMode.SUM_LEN)
    hidden = [rows.clone() for rows in start]
    for _ in range(depth):
        local = [h @ w.attention[0] @ w.attention[1] for h, w in zip(hidden, weights, strict=True)]
        everyone = reference.gather(local, plan)
        back = reference.combine([everyone @ w.experts[0] @ w.experts[1] for w in weights], plan)
        hidden = [h + own / depth for h, own in zip(hidden, back, strict=True)]
    return hidden


def test_rows_stay_in_range_in_the_narrowest_dtype_at_any_depth(ranks: Ranks) -> None:
    told = config("5+2/3+3", "all_gather_v", layers=20, hidden=32, intermediate=16, dtype="fp16")
    for one in ranks(2).run(cases.one_case, told):
        assert one.times.wrong == 0
        assert all(0.01 < rows.abs().max() < 1000 for rows in one.outcomes["overlap"])


def test_contenders_are_measured_in_an_order_that_only_the_seed_decides(ranks: Ranks) -> None:
    told = config("1+2/2+1", "all_reduce", layers=1, iters=1, warmup=1, check=False)
    orders = []
    for seed in (1, 1, 2):
        run = replace(told, transports=ALWAYS, seed=seed)
        first, second = ranks(2).run(overlap_rank.run_rank, run)
        assert [one.name for one in first.findings] == [one.name for one in second.findings]
        orders.append([one.name for one in first.findings])
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == sorted([*ALWAYS, AUTO, *LIBRARY])


def test_figures_are_what_their_formulas_say() -> None:
    # Half of 400 hidden under 800 of compute: 1000 where 800 is the least and 1200 both in turn.
    assert figures.hidden(800.0, 400.0, 1200.0, 1000.0) == 0.5
    assert figures.of_ideal(800.0, 400.0, 1200.0, 1000.0) == 0.5
    assert figures.times_bound(800.0, 400.0, 1000.0) == 1.25
    # More communication than compute: of 900 only 300 can be hidden, and are.
    assert figures.hidden(300.0, 900.0, 1200.0, 900.0) == pytest.approx(1 / 3)
    assert figures.of_ideal(300.0, 900.0, 1200.0, 900.0) == 1.0
    # Overlap that costs more than it hides.
    assert figures.hidden(100.0, 50.0, 150.0, 200.0) == -1.0
    assert figures.of_ideal(100.0, 50.0, 150.0, 200.0) == -1.0


def test_a_figure_over_next_to_nothing_is_none() -> None:
    assert figures.hidden(800.0, 0.0, 800.0, 801.0) is None
    assert figures.of_ideal(800.0, 0.1, 800.1, 801.0) is None
    assert figures.of_ideal(800.0, 400.0, 799.0, 801.0) is None
    assert figures.times_bound(0.0, 0.0, 1.0) is None


def test_the_slowest_rank_counts_and_wrong_elements_add_up() -> None:
    one = OverlapTimes(1.0, 7.0, 8.0, 7.0, 6.0, host=3.0, slowdown=None, wrong=1)
    two = OverlapTimes(2.0, 6.0, 9.0, 6.0, 5.0, host=2.0, slowdown=1.5, wrong=2)
    assert slowest([one, two]) == OverlapTimes(2.0, 7.0, 9.0, 7.0, 6.0, 3.0, 1.5, 3)
    assert slowest([replace(one, wrong=None)]).wrong is None


def test_elements_that_are_no_number_are_wrong_even_where_both_agree() -> None:
    half = torch.ones(2, 3)
    broken = half.clone()
    broken[0, 1] = float("nan")
    assert _wrong({"serial": [half, half], "overlap": [half, half]}) == 0
    assert _wrong({"serial": [half], "overlap": [broken]}) == 2
    assert _wrong({"serial": [broken], "overlap": [broken]}) == 2
    assert _wrong({}) is None


def two_sections(*, hip: bool) -> OverlapReport:
    """What two ranks may find of two contenders, with two and with eight hardware queues."""
    told = config("3+2/1+4", "peer")
    where = About({"torch": "2.11", **({"HIP": "7.2"} if hip else {})}, "nccl", "a GPU", "one host", {})

    def rank(queues: int, slower: float) -> RankFindings:
        def finding(name: str, overlap: float, *, ours: bool = False) -> Finding:
            return Finding(
                0, name, ours, "graph", OverlapTimes(80.0, 40.0, 120.0, overlap + slower, 125.0, None, 1.1, 0)
            )

        found = (finding("torch: grouped", 118.0 - queues), finding("peer", 102.0 - queues, ours=True))
        return RankFindings(where, queues, found)

    sections = [make_section([rank(n, 0.0), rank(n, 2.0)], told, n) for n in (2, 8)]
    return OverlapReport(told, tuple(sections))


def test_overlap_is_shown_side_by_side_for_each_number_of_hardware_queues(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = two_sections(hip=True)
    peer = report.lines[0]
    assert (peer.contender, peer.hw_queues, peer.overlap, peer.x_bound) == ("peer", 2, 102.0, 1.275)
    assert (peer.x_best, peer.x_grouped) == (1.0, 102.0 / 118.0)
    assert report.lines[1].x_grouped is None
    print_wide(render(report))
    shown = capsys.readouterr().out
    side = shown[shown.index("by hardware queues") :].splitlines()
    assert [line.split("│")[3:6] for line in side if "│" in line] == [
        [" peer           ", " 102.0 ", "  96.0 "],
        [" torch: grouped ", " 118.0 ", " 112.0 "],
    ]
    assert "GPU_MAX_HW_QUEUES=8" in shown


def test_on_hip_few_hardware_queues_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    two, eight = two_sections(hip=True).sections
    assert two.warning is not None
    assert two.warning.startswith("GPU_MAX_HW_QUEUES is 2 (4 if unset)")
    assert replace(eight, seen=4).warning is not None
    assert eight.warning is None
    assert all(section.warning is None for section in two_sections(hip=False).sections)
    print_wide(render(two_sections(hip=True)))
    assert capsys.readouterr().out.count("may share a hardware queue") == 1


@pytest.mark.parametrize(("told", "queues"), [(None, 4), ("8", 8), (" 2 ", 2), ("0", 4), ("many", 4)])
def test_unset_means_four_hardware_queues(monkeypatch: pytest.MonkeyPatch, told: str | None, queues: int) -> None:
    monkeypatch.delenv(HW_QUEUES, raising=False)
    if told is not None:
        monkeypatch.setenv(HW_QUEUES, told)
    assert hardware_queues() == queues


@pytest.mark.usefixtures("on_cpu")
def test_every_number_of_hardware_queues_is_seen_by_ranks_of_its_own(tmp_path: Path) -> None:
    args = ["--ranks", "1", "--counts", "2/1", "--layers", "1", "--transports", "all_gather_v"]
    before = dict(os.environ)
    runs = measured(tmp_path, *args, *QUICK, "--hw-queues", "2,8")["runs"]
    assert dict(os.environ) == before
    assert [run["hw_queues"] for run in runs] == [{"asked": 2, "seen": 2}, {"asked": 8, "seen": 8}]
    assert [run["about"]["environment"][HW_QUEUES] for run in runs] == ["2", "8"]
    assert all(run["results"][0]["overlap"] > 0 for run in runs)


def test_cases_are_read_and_short_halves_repeated() -> None:
    assert parse_pairs("32+17/24+20,8/4", 4) == (
        ((32, 17, 32, 17), (24, 20, 24, 20)),
        ((8, 8, 8, 8), (4, 4, 4, 4)),
    )
    assert default_pairs(3, gpu=True)[0] == ((32, 17, 32), (24, 20, 24))
    assert default_pairs(1, gpu=False) == (((3,), (2,)), ((16,), (12,)))
    assert pair_name(((8, 8, 8), (4, 5, 4))) == "3x8/4+5+4"
    assert sweep_pairs("2:9:2", 2) == (((1, 1), (1, 1)), ((2, 2), (2, 2)), ((4, 4), (4, 4)))
    assert sweep_pairs("5:5:2", 3) == (((3, 3, 3), (2, 2, 2)),)
    assert parse_queues(" 2, 8,2") == (2, 8)
    assert config("1+2/3+4", "peer").pairs == (((1, 2), (3, 4)),)


def test_half_a_case_is_no_case() -> None:
    with pytest.raises(ConfigError, match="pairs of halves, got 1 halves"):
        OverlapConfig("overlap", 2, 2, ((1, 2),), ALWAYS)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--counts", "3+4"], "must be two halves, like 32+17/24+20, got '3+4'"),
        (["--counts", "3+4/1/2"], "must be two halves, like 32+17/24+20, got '3+4/1/2'"),
        (["--counts", "3+x/1"], "--counts must be like 32+17,128+64, got '3+x'"),
        (["--counts", "1+2+3/1"], "--counts 1+2+3 has 3 counts, but there are 2 dp ranks"),
        (["--counts", "1+2/0+0"], "must have a row, got 0+0"),
        (["--sweep", "1:10:2"], "at least 2 tokens a rank, one for each half, got '1:10:2'"),
        (["--sweep", "8:4:2"], "1 <= min <= max and a factor above 1, got '8:4:2'"),
        (["--layers", "0"], "layers must be at least 1, got 0"),
        (["--intermediate", "-1"], "intermediate must be at least 1, got -1"),
        (["--iters", "0"], "iters must be at least 1, got 0"),
        (["--dtype", "fp8"], "--dtype must be among bf16, fp16, fp32, got 'fp8'"),
        (["--transports", "pigeon"], f"--transports must be among {', '.join(NAMES)}, got pigeon"),
        (["--hw-queues", "2,0"], "--hw-queues must be whole numbers above 0, like 2,8, got '2,0'"),
        (["--hw-queues", "two"], "--hw-queues must be whole numbers above 0, like 2,8, got 'two'"),
        (["--trace-out", "no/such/trace.json"], "--trace-out needs an existing folder, got no/such/trace.json"),
        (["--csv", "no/such/table.csv"], "--csv needs an existing folder, got no/such/table.csv"),
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
    assert main(["bench", "overlap", "--ranks", "2", *args]) == 2
    assert said in capsys.readouterr().err.replace("\n", "")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_on_gpus_every_figure_is_found_eager_and_in_a_graph(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    args = ["--ranks", "2", "--counts", "33+17/24+20,512+300/256+300", "--layers", "4", "--iters", "3"]
    results = measured(tmp_path, *args, "--trace-out", str(trace))["runs"][0]["results"]
    check_figures(results)
    timed = [one for one in results if one["reason"] is None]
    for mode in ("eager", "graph"):
        of_mode = [one for one in timed if one["mode"] == mode]
        assert {one["contender"] for one in of_mode} >= {*ALWAYS, *LIBRARY}
        assert all(one["hidden"] is not None and one["x_bound"] > 0.5 for one in of_mode)
        # Not every runtime times events in a graph.
        assert mode == "graph" or all(one["slowdown"] is not None for one in of_mode)
    names = [f"{one['counts']}: {one['contender']}" for one in timed if one["mode"] == "eager"]
    check_trace(json.loads(trace.read_text()), names, 4)
