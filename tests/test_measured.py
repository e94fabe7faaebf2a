"""measured, tuned: what was timed on a machine, between the sizes at which it was; and one table on all ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
import tuned_cases as cases
from exchange_cases import Grid

from rocm_dp.errors import ConfigError
from rocm_dp.layout import RankLayout
from rocm_dp.measured import Measured, MeasuredTable
from rocm_dp.tuned import path_for, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rocm_dp.testing import RankPool

    Ranks = Callable[[int], RankPool]

PEER, COPIED = ("peer", False), ("copy_engine", True)
TABLE = MeasuredTable(
    (
        Measured(False, 1, 1.0, (("peer", False, 10.0), ("copy_engine", True, 90.0))),
        Measured(False, 7, 1.0, (("peer", False, 40.0), ("copy_engine", True, 90.0))),
        Measured(False, 7, 2.0, (("peer", False, 80.0),)),
    )
)


def test_between_two_sizes_the_logarithm_of_the_time_is_interpolated() -> None:
    assert TABLE.times(3, 1.0, graph=False) == {PEER: 20.0, COPIED: 90.0}
    assert TABLE.times(1, 1.0, graph=False)[PEER] == 10.0
    assert TABLE.times(7, 1.0, graph=False)[PEER] == 40.0


def test_beyond_the_ends_the_nearest_size_counts_and_of_skews_the_nearest() -> None:
    assert TABLE.times(0, 1.4, graph=False)[PEER] == 10.0
    assert TABLE.times(1000, 0.0, graph=False)[PEER] == 40.0
    assert TABLE.times(1000, 1.6, graph=False) == {PEER: 80.0}


def test_what_was_not_measured_is_not_known() -> None:
    assert TABLE.times(3, 1.0, graph=True) == {}
    assert MeasuredTable().times(3, 1.0, graph=False) == {}


def test_a_table_is_the_same_after_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.json"
    save(TABLE, path)
    assert MeasuredTable.from_json(path.read_text()) == TABLE
    assert [one.name for one in path.parent.iterdir()] == ["table.json"]
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "not a measured table: TypeError"),
        ("{", "not a measured table: JSONDecodeError"),
        ('{"format": 9}', "must be of format 1, got 9"),
        (json.dumps({"format": 1, "entries": [[0, 1, 1.0, []]]}), "must begin with a bool"),
        (json.dumps({"format": 1, "entries": [[False, 1, -1.0, []]]}), "a skew above 0, got"),
        (json.dumps({"format": 1, "entries": [[False, 1, 1.0, [["peer", False, 0]]]]}), "got ('peer', False, 0)"),
        (json.dumps({"format": 1, "entries": [[False, 1, 1.0, [["peer", False]]]]}), "not a measured table"),
    ],
)
def test_anything_else_is_refused_with_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MeasuredTable.from_json(text)
    assert said in str(caught.value)


def test_every_machine_layout_and_kind_of_rows_has_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu, layout = torch.device("cpu"), RankLayout(0, 4, 2)
    paths = {
        path_for(layout, cpu, 7168, torch.bfloat16),
        path_for(RankLayout(1, 4, 2), cpu, 7168, torch.bfloat16),
        path_for(RankLayout(0, 4, 4), cpu, 7168, torch.bfloat16),
        path_for(layout, cpu, 7168, torch.float16),
        path_for(layout, cpu, 4096, torch.bfloat16),
    }
    assert len(paths) == 4
    assert all(path.parent == tmp_path / "rocm_dp" / "tuned" for path in paths)


def test_all_ranks_go_by_the_table_that_rank_0_found(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    save(cases.PREFERS_GROUPED, path)
    for found in ranks(2).run(cases.chosen_by_table, Grid(2, 2), str(path)):
        assert found == ("all_gather_v", "measured: 1.0 us a layer")


def test_a_table_of_this_machine_that_is_none_is_warned_of_and_stops_nobody(ranks: Ranks, tmp_path: Path) -> None:
    (told, first), (silent, second) = ranks(2).run(cases.table_of_this_machine_is_broken, Grid(2, 2), str(tmp_path))
    assert "the table of this machine: not a measured table: " in told
    assert silent == ""
    assert first == second == "all_gather"


@pytest.mark.parametrize(
    ("text", "said"),
    [("{}", "not a measured table"), (" " * (2**20 + 1), "at most 1048576 bytes"), ("", "No such")],
)
def test_a_file_that_is_none_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "table.json"
    if text:
        path.write_text(text)
    for found in ranks(2).run(cases.refused_table, Grid(2, 2), str(path)):
        assert found.startswith(str(path))
        assert said in found
