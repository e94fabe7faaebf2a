"""rocm-dp tune: what it measures is what exchanges then go by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import tuned_cases as cases
from exchange_cases import Grid

from rocm_dp.bench.overlap_measure import OverlapTimes
from rocm_dp.bench.tune import RankTimes, Timed, table_of
from rocm_dp.cli import main
from rocm_dp.measured import Measured, MeasuredTable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rocm_dp.testing import RankPool

    Ranks = Callable[[int], RankPool]

RUN = ["tune", "--ranks", "2", "--tokens", "2,4", "--hidden", "16", "--intermediate", "8", "--iters", "1"]


def test_a_run_leaves_a_table_where_exchanges_of_this_machine_find_it(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main([*RUN, "--dtype", "fp32"]) == 0
    said = capsys.readouterr()
    [path] = (tmp_path / "rocm_dp" / "tuned").iterdir()
    assert f"written to {path}".replace("\n", "") in said.err.replace("\n", "")
    table = MeasuredTable.from_json(path.read_text())
    assert [(one.graph, one.rows, one.skew) for one in table.entries] == [
        *((False, 4, 1.0), (False, 8, 1.0), (False, 4, 2.0), (False, 8, 2.0))
    ]
    for entry in table.entries:
        assert {(name, overlapped) for name, overlapped, _ in entry.times} == {
            (name, overlapped) for name in ("all_gather", "all_gather_v") for overlapped in (False, True)
        }
    assert "peer, eager: needs GPUs" in said.err
    for name, reason in ranks(2).run(cases.chosen_here, Grid(2, 2), 16, str(tmp_path)):
        fastest = min(us for _, overlapped, us in table.entries[0].times if not overlapped)
        assert (name, False, fastest) in table.entries[0].times
        assert reason == f"measured: {fastest:.1f} us a layer"


def test_the_slowest_rank_counts() -> None:
    def rank(overlap: float, whole: float) -> RankTimes:
        times = OverlapTimes(1.0, 1.0, 2.0, overlap, whole)
        return RankTimes("", (Timed(8, 1.0, True, "peer", times),), ())

    kinds = (("peer", False, 9.0), ("peer", True, 7.0))
    assert table_of([rank(7.0, 5.0), rank(6.0, 9.0)]) == MeasuredTable((Measured(True, 8, 1.0, kinds),))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "1"], "--tokens must be at least 2, got '1'"),
        (["--tokens", "few"], "--tokens must be numbers like 2,64, got 'few'"),
        (["--skews", "0.5"], "--skews must be at least 1, got '0.5'"),
        (["--out", "/nowhere/table.json"], "--out needs an existing folder, got /nowhere/table.json"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_both_sides(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *arguments]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")
