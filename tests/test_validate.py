"""``rocm-dp validate`` passes the library, and fails it when any part of it is broken on purpose."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
import torch
import validate_cases

from rocm_dp.cli import main
from rocm_dp.plan import PaddingMode
from rocm_dp.testing import RankPool
from rocm_dp.validate.cases import field_cases
from rocm_dp.validate.rank import OWN_CHOICE, RankResult, ValidateConfig, run_rank
from rocm_dp.validate.report import make_report

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Ranks = Callable[[int], RankPool]

ONE_WAY = ValidateConfig(2, 2, hidden=8, transports=("all_gather_v",))


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
def test_each_rank_is_idle_once_and_busy_alone_once(dp: int) -> None:
    counts = {case.counts for case in field_cases(dp)}
    for rank in range(dp):
        assert any(one[rank] == 0 and all(one[:rank] + one[rank + 1 :]) for one in counts)
        assert any(one[rank] > 0 and not any(one[:rank] + one[rank + 1 :]) for one in counts)
    assert (0,) * dp in counts
    assert all(len(one) == dp for one in counts)


def test_cases_come_packed_and_padded_aligned_and_not() -> None:
    plans = field_cases(2)[1].plans(4)
    assert {(plan.padding, plan.align) for plan in plans} == {
        (PaddingMode.SUM_LEN, 1),
        (PaddingMode.SUM_LEN, 4),
        (PaddingMode.MAX_LEN, 4),
    }


TWO_WAYS = ValidateConfig(2, 1, hidden=8, transports=("peer", "all_gather"))


@pytest.fixture(scope="module")
def results(ranks: Ranks) -> list[RankResult]:
    """What two ranks of one dp rank found."""
    return ranks(2).run(run_rank, TWO_WAYS)


def test_the_library_passes_and_a_transport_that_is_not_for_here_is_named(results: list[RankResult]) -> None:
    report = make_report(results, TWO_WAYS)
    assert report.passed, report.failures
    assert report.checks["all_gather"] > 500
    assert report.checks[OWN_CHOICE] > report.checks["all_gather"], "it refuses sizes that two ranks can't share"
    assert report.checks["peer"] == 0
    assert report.refused == {"peer": "needs GPUs, or TRITON_INTERPRET=1 on CPU ranks"}


def test_a_transport_that_is_required_and_refused_fails(results: list[RankResult]) -> None:
    report = make_report(results, TWO_WAYS, required=("peer",))
    assert (report.passed, report.missing) == (False, ("peer",))
    assert make_report(results, TWO_WAYS, required=("all_gather",)).passed


def test_a_run_without_a_check_never_passes() -> None:
    assert not make_report([], ONE_WAY).passed
    assert not make_report([RankResult(0, {})], ONE_WAY).passed


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("padding", "MAX_LEN"),
        ("sum", "combine is off by"),
        ("input", "combine wrote its input"),
    ],
)
def test_a_library_that_is_broken_on_purpose_fails(ranks: Ranks, how: str, says: str) -> None:
    report = make_report(ranks(2).run(validate_cases.broken, how, ONE_WAY), ONE_WAY)
    assert not report.passed
    assert any(says in failure for failure in report.failures), report.failures


@pytest.fixture
def running(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are running already, in place of those that a command would start."""
    monkeypatch.setattr("rocm_dp.testing.RankPool", lambda world: nullcontext(ranks(world)))


QUICK = ["validate", "--ranks", "2", "--hidden", "8", "--transport", "all_reduce"]


@pytest.mark.usefixtures("running")
def test_the_report_can_be_sent_and_says_whether_all_held(tmp_path: Path) -> None:
    assert main([*QUICK, "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] is True
    assert report["config"]["transports"] == ["all_reduce"]
    assert report["checks"]["all_reduce"] > 1000
    assert report["about"][0]["rocm_dp"]
    assert stat.S_IMODE((tmp_path / "report.json").stat().st_mode) == 0o600


@pytest.mark.usefixtures("running")
def test_a_failed_check_is_exit_code_1_on_the_screen_and_in_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rocm_dp.validate.rank.run_rank", validate_cases.broken_starts)
    arguments = ["validate", "--ranks", "2", "--hidden", "8", "--transport", "all_gather_v"]
    assert main([*arguments, "--json", str(tmp_path / "report.json")]) == 1
    assert "FAILED" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"] is False
    assert any("all_gather_v: gather differs" in failure for failure in report["failures"])


@pytest.mark.usefixtures("running")
def test_an_error_on_a_rank_is_a_finding_that_the_report_holds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rocm_dp.validate.rank.run_rank", validate_cases.dies)
    assert main([*QUICK, "--json", str(tmp_path / "report.json")]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["passed"], report["error"]) == (False, "RuntimeError: RCCL: unhandled system error")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--transport", "carrier_pigeon"],
        ["--require", "carrier_pigeon"],
        ["--transport", "all_reduce", "--require", "peer"],
        ["--ranks", "0"],
        ["--ranks", "3", "--cp", "2"],
        ["--hidden", "0"],
        ["--json", "/nowhere/report.json"],
    ],
)
def test_wrong_usage_is_exit_code_2_before_any_rank_starts(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocm_dp.testing.RankPool", lambda world: pytest.fail("ranks were started"))
    assert main(["validate", *arguments]) == 2


def test_ranks_of_torchrun_tell_each_other_what_they_found(ranks: Ranks) -> None:
    result = RankResult(0, {"host": "here"}, {"peer": 3}, {"aiter": "why"}, ["one"])
    for found in ranks(2).run(validate_cases.found_by_all, result):
        assert [one.rank for one in found] == [0, 1]
        assert [len(one.failures[1]) for one in found] == [0, 1000]
        assert (found[1].checks, found[1].refused, found[1].about) == (
            {"peer": 3},
            {"aiter": "why"},
            {"host": "here"},
        )


def test_under_torchrun_each_process_is_a_rank_and_one_reports(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "-m", "rocm_dp", *QUICK[:1], *QUICK[3:], "--json", "report.json"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("PASSED") == 1
    assert json.loads((tmp_path / "report.json").read_text())["config"]["ranks"] == 2


@pytest.mark.gpu
def test_on_gpus_every_transport_passes_in_graphs_too() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    config = ValidateConfig(2, 2)
    with RankPool(2, backend="nccl", timeout=200.0) as pool:
        report = make_report(pool.run(run_rank, config), config, required=("peer", "copy_engine"))
    assert report.passed, report.failures


@pytest.mark.soak
def test_counts_that_do_not_reach_the_device_are_noticed(interpreted: Ranks) -> None:
    config = ValidateConfig(2, 2, hidden=8, transports=("peer",))
    report = make_report(interpreted(2).run(validate_cases.stale_counts, config, timeout=600), config)
    assert any("on the device differs" in failure for failure in report.failures)
