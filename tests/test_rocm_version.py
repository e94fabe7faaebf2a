"""Which ROCm needs SUM_LEN in graphs. The versions are those that public reports of such machines give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import exchange_cases
import pytest
import torch

from rocm_dp import PaddingMode, Phase, choose_padding, rocm
from rocm_dp.errors import ConfigError
from rocm_dp.rocm import RocmVersions, Workaround, override_from, sum_len_in_graphs

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.testing import RankPool

RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "fixtures" / "rocm_versions.json").read_text("utf-8")
)
WITNESSES = ("runtime", "torch_hip", "release")


def versions(name: str, *witnesses: str) -> RocmVersions:
    return RocmVersions(**{witness: RECORDED[name][witness] for witness in witnesses})


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("witnesses", [WITNESSES, *[(one,) for one in WITNESSES]], ids="+".join)
def test_every_witness_alone_tells_the_recorded_versions_apart(name: str, witnesses: tuple[str, ...]) -> None:
    assert sum_len_in_graphs(versions(name, *witnesses)).on is RECORDED[name]["on"]


def test_the_loaded_runtime_decides_against_what_torch_was_built_with_and_what_is_installed() -> None:
    new, old = RECORDED["7.2.4"], RECORDED["7.1"]
    fixed = RocmVersions(new["runtime"], old["torch_hip"], old["release"])
    broken = RocmVersions(old["runtime"], new["torch_hip"], new["release"])
    assert not sum_len_in_graphs(fixed).on
    assert sum_len_in_graphs(broken).on
    assert sum_len_in_graphs(broken).reason == "the HIP runtime says 7.1.25424, in [7.0.0, 7.2.53211)"


@pytest.mark.parametrize(
    ("release", "on"), [("7.2.1-1", False), ("7.2.0", True), ("7.1.0", True), (None, True)], ids=str
)
def test_a_build_that_nobody_judged_is_bad_unless_the_info_file_knows_better(release: str | None, on: bool) -> None:
    assert sum_len_in_graphs(RocmVersions(70253150, None, release)).on is on


@pytest.mark.parametrize("hip", ["8.0.1", "7.10.0", "7.13.99004", "7.2.1"])
def test_later_versions_are_fixed(hip: str) -> None:
    assert not sum_len_in_graphs(RocmVersions(torch_hip=hip)).on


@pytest.mark.parametrize("said", [RocmVersions(), RocmVersions(torch_hip="unknown", release="")])
def test_without_a_version_it_is_off(said: RocmVersions) -> None:
    assert sum_len_in_graphs(said) == Workaround(on=False, reason="this is not ROCm")


def test_an_override_decides_and_the_reason_still_tells_what_the_version_says() -> None:
    off = sum_len_in_graphs(versions("7.0.0", *WITNESSES), override=False)
    assert not off.on
    assert off.reason.startswith("ROCM_DP_SUM_LEN_IN_GRAPHS=0; without it on: the HIP runtime says 7.0.51831")
    assert sum_len_in_graphs(RocmVersions(), override=True, override_name="X").reason == (
        "X=1; without it off: this is not ROCm"
    )


def test_the_override_is_0_or_1_and_nothing_else() -> None:
    said = [override_from({rocm.OVERRIDE: value}) for value in ("1", "true", "0", "False", " ", "")]
    assert said == [True, True, False, False, None, None]
    assert override_from({}) is None
    with pytest.raises(ConfigError, match="must be 0 or 1, got 'yes'"):
        override_from({rocm.OVERRIDE: "yes"})


def test_a_person_reads_that_it_is_on_why_and_what_it_costs() -> None:
    found = sum_len_in_graphs(versions("7.2.0", *WITNESSES))
    assert found.text == f"on, the HIP runtime says 7.2.26015, in [7.0.0, 7.2.53211): {rocm.COST}"
    fixed = sum_len_in_graphs(versions("7.2.4", *WITNESSES))
    assert fixed.text == "off, the HIP runtime says 7.2.53211, not before 7.2.53211"


def test_explain_says_it_of_a_graph_and_of_torchs_collectives_alone(
    ranks: Callable[[int], RankPool],
) -> None:
    ranks(2).run(exchange_cases.explained_in_graphs)


def test_the_decision_reaches_the_padding_of_a_captured_step() -> None:
    for name, recorded in RECORDED.items():
        on = sum_len_in_graphs(versions(name, *WITNESSES)).on
        chosen = choose_padding([4, 4], phase=Phase.DECODE, capturing=True, sum_len_in_graphs=on)
        assert chosen is (PaddingMode.SUM_LEN if recorded["on"] else PaddingMode.MAX_LEN), name


def test_the_probe_reads_the_info_file_on_hip_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "version"
    info.write_text("7.2.1-81\n")
    monkeypatch.setattr(torch.version, "hip", "7.2.53211")
    assert rocm.probe(info) == RocmVersions(None, "7.2.53211", "7.2.1-81")
    assert rocm.probe(tmp_path / "none") == RocmVersions(None, "7.2.53211", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert rocm.probe(info) == RocmVersions()


def test_the_probe_asks_the_runtime_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        failed = 0

        def hipRuntimeGetVersion(self, number: Any) -> int:  # noqa: N802 - the runtime's name
            number._obj.value = 70226015
            return self.failed

    monkeypatch.setattr(torch.version, "hip", "7.2.53211")
    library = Library()
    monkeypatch.setattr(rocm, "loaded_library", lambda name: {"libamdhip64": library}[name])
    assert rocm.probe(Path("/none")).runtime == 70226015
    library.failed = 1
    assert rocm.probe(Path("/none")).runtime is None
