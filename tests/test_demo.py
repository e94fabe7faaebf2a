"""``rocm-dp demo`` as a newcomer runs it: verified, honest when broken, clear about wrong usage, stoppable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest
import torch
from exchange_cases import Grid, H, an_exchange

from rocm_dp.cli import main
from rocm_dp.demo.checked import CheckedExchange
from rocm_dp.plan import PaddingMode, TokenPlan
from rocm_dp.workload.model import ModelConfig, MoEModel, split_work
from rocm_dp.workload.scheduler import Work

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rocm_dp.testing import RankPool

    Ranks = Callable[[int], RankPool]

SMALL = ["--ranks", "2", "--hidden", "32", "--tokens", "48", "--steps", "12"]


def demo(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rocm_dp", "demo", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    "extra",
    [
        ["--ranks", "4", "--dp", "2", "--dtype", "float32", "--routing", "least_loaded"],
        ["--dp", "1", "--cp", "2", "--no-overlap", "--transport", "all_reduce"],
        pytest.param(["--dp", "2"], marks=pytest.mark.soak),
        pytest.param(["--dp", "2", "--transport", "all_reduce"], marks=pytest.mark.soak),
        pytest.param(["--dp", "2", "--transport", "all_gather"], marks=pytest.mark.soak),
    ],
    ids=["dp2-tp2", "cp2-serial-all_reduce", "dp2", "all_reduce", "all_gather"],
)
def test_the_demo_verifies_every_step_and_stays_flat(tmp_path: Path, extra: list[str]) -> None:
    out = tmp_path / "out.json"
    done = demo(*SMALL, *extra, "--json", str(out), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout
    found = json.loads(out.read_text())
    ranks = found["ranks"]
    batches = sum(found["steps"].values()) + found["overlapped"]
    # A gather and a combine a layer, for each batch, on every rank; a summed gather also checks its padding.
    assert found["checks"] >= batches * 2 * 2 * ranks
    assert found["passed"]
    assert found["failures"] == found["grown"] == []
    assert sum(found["steps"].values()) == 12
    assert (found["overlapped"] > 0) == ("--no-overlap" not in extra)
    rows = {name: row["rows"] for name, row in found["padding"].items()}
    assert rows["exact gatherv"] == sum(found["tokens"].values())
    assert rows["exact gatherv"] <= rows["SUM_LEN"] <= rows["MAX_LEN"]


def test_a_trace_file_is_replayed_and_its_bad_lines_counted_only_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.9799600,40,3", "oops"]
    lines += [f"2023-11-16 18:17:0{second}.0000000,{9 * second},2" for second in range(4, 9)]
    trace.write_text("\r\n".join(lines))
    assert main(["demo", *SMALL, "--trace", str(trace)]) == 2
    assert "line 3" in capsys.readouterr().err
    done = demo(*SMALL, "--trace", str(trace), "--skip-bad", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout
    assert "skipped 1 malformed lines" in done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--ranks", "3", "--dp", "2"], "must divide world_size 3"),
        (["--ranks", "2", "--hidden", "30"], "heads 8 must divide hidden 30"),
        (["--ranks", "2", "--transport", "pigeon"], "pigeon"),
        (["--ranks", "2", "--trace", "nowhere.csv"], "nowhere.csv"),
        (["--ranks", "0"], "world_size must be at least 1"),
        (["--ranks", "4", "--cp", "0"], "cp_size must be at least 1"),
        (["--speed", "0"], "above 0"),
        (["--ranks", "2", "--json", "no/such/folder.json"], "no/such"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--steps", "1", *args]) == 2
    assert said in capsys.readouterr().err.replace("\n", "")


def test_ctrl_c_stops_the_demo_and_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rocm_dp", "demo", *SMALL[:-1], "100000"]
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


def test_a_result_that_is_wrong_is_a_failure_of_the_demo(ranks: Ranks) -> None:
    for failures in ranks(2).run(checked_with_a_lie):
        assert len(failures) == 2
        assert "gather differs" in failures[0]
        assert "x the rounding bound" in failures[1]


def checked_with_a_lie(rank: int) -> list[str]:
    """Spoil one element of a gather and of a combine before they are checked."""
    plan = TokenPlan((3, 2), PaddingMode.SUM_LEN)
    with an_exchange(rank, Grid(2, 2)) as exchange:
        checked = CheckedExchange(exchange)
        honest = checked.gather_async(torch.ones(plan.counts[rank], H, dtype=torch.bfloat16), plan)
        honest.wait()
        assert checked.checks == 1
        assert not checked.failures
        pending = checked.gather_async(torch.ones(plan.counts[rank], H, dtype=torch.bfloat16), plan)
        _spoil(exchange, "gather")
        pending.wait()
        pending = checked.combine_async(torch.ones(plan.rows, H, dtype=torch.bfloat16), plan)
        _spoil(exchange, "combine")
        pending.wait()
        return checked.failures


def _spoil(exchange: object, verb: str) -> None:
    slot = exchange._dispatch.slots._slots[verb, 0]  # type: ignore[attr-defined]
    slot.buffer[5] ^= 0x40


def test_the_model_does_not_depend_on_how_ranks_and_heads_are_sharded(ranks: Ranks) -> None:
    """The same requests through dp, tp, cp and expert shards of any kind give the same hidden states."""
    alone = ranks(1).run(hidden_states, Grid(1, 1))[0]
    for grid in (Grid(2, 2), Grid(2, 1), Grid(4, 2), Grid(4, 1, 2)):
        for rank, states in enumerate(ranks(grid.world).run(hidden_states, grid)):
            own = grid.layout(rank).dp_rank
            want = alone if grid.dp == 1 else alone[slice(*((0, 7), (7, 12))[own])]
            torch.testing.assert_close(states, want, rtol=1e-4, atol=1e-4)


def hidden_states(rank: int, grid: Grid) -> torch.Tensor:
    """Two requests, prefill in two chunks and a decode; request 1 lives on the last dp rank."""
    steps = [[Work(0, 0, 4), Work(1, 0, 3)], [Work(0, 4, 2), Work(1, 3, 1)], [Work(0, 6, 1), Work(1, 4, 1)]]
    with an_exchange(rank, grid, torch.float32) as exchange, torch.inference_mode():
        model = MoEModel(exchange, ModelConfig(layers=3, heads=4, experts=5))
        mine = [r for r in (0, 1) if grid.dp == 1 or exchange.layout.dp_rank == r]
        for request in mine:
            model.admit(request, 8)
        out: dict[int, list[torch.Tensor]] = {0: [], 1: []}
        for step in steps:
            work = [item for item in step if item.request in mine]
            counts = tuple(sum(w.tokens for w in step if grid.dp == 1 or w.request == d) for d in range(grid.dp))
            plan = TokenPlan(counts, PaddingMode.SUM_LEN)
            run = model.forward(model.embed(work), work, plan)
            rows = _finish(run)
            for item in work:
                out[item.request].append(rows[: item.tokens])
                rows = rows[item.tokens :]
        return torch.cat([*out[0], *out[1]]).cpu()


def _finish(run: object) -> torch.Tensor:
    from rocm_dp import interleave

    return interleave(run)[0]  # type: ignore[arg-type]


def test_work_is_cut_at_a_token_and_nothing_is_lost() -> None:
    work = (Work(4, 10, 5), Work(7, 0, 1), Work(9, 3, 4))
    for cut in range(11):
        first, second = split_work(work, cut)
        assert sum(item.tokens for item in first) == cut
        tokens = [(w.request, w.start + i) for w in (*first, *second) for i in range(w.tokens)]
        assert tokens == [(w.request, w.start + i) for w in work for i in range(w.tokens)]
        assert all(item.tokens for item in (*first, *second))
