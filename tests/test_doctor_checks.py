"""The doctor finds what is wrong with recorded machines, good and bad, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from doctor_machines import FOLDER, NAMES, load

from rocm_dp.doctor import facts
from rocm_dp.doctor.checks import Severity
from rocm_dp.doctor.diagnosis import CHECKS, Row, diagnose
from rocm_dp.doctor.machine import Machine
from rocm_dp.doctor.places import KFD
from rocm_dp.errors import ConfigError

ORDER = list(Severity)


def remarks(rows: list[Row]) -> dict[str, str]:
    """The worst that each check said, those left out that found all as it should be."""
    worst: dict[str, Severity] = {}
    for row in rows:
        worst[row.check.name] = min(worst.get(row.check.name, Severity.FINE), row.severity, key=ORDER.index)
    return {name: severity.value for name, severity in worst.items() if severity is not Severity.FINE}


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_machine_has_exactly_the_findings_that_it_was_recorded_for(name: str) -> None:
    recorded = load(name)
    assert remarks(diagnose(recorded.machine)) == recorded.expect


def test_there_are_healthy_machines_of_every_kind_and_enough_others() -> None:
    assert len(NAMES) >= 12
    for healthy in ("mi300x_x8", "mi355x_pod", "h200_x8", "cpu"):
        assert set(load(healthy).expect.values()) <= {"note"}


def test_recordings_are_small() -> None:
    assert all(path.stat().st_size < 20_000 for path in FOLDER.iterdir())


# What holds on every machine that any recording could show.
NEVER_BAD = {"virtual gpus", "shared ipc", "fused gathers", "kernel arguments"}


def test_every_check_finds_something_on_some_machine_and_nothing_on_another() -> None:
    """None is dead, and none cries wolf; those that only ever inform are named."""
    found: dict[str, set[str]] = {check.name: set() for check in CHECKS}
    for name in NAMES:
        for row in diagnose(load(name).machine):
            found[row.check.name].add(row.severity.value)
    for name, severities in found.items():
        assert severities - {"fine"}, f"{name} never found anything"
        if name not in NEVER_BAD:
            assert severities & {"error", "warning"}, f"{name} never found a problem"
        assert "fine" in severities or name == "no gpu", f"{name} was never content"


def test_every_finding_says_what_was_seen_why_it_matters_and_what_to_do() -> None:
    for name in NAMES:
        for row in diagnose(load(name).machine):
            assert row.finding.seen
            assert row.check.why
            assert bool(row.finding.advice) == (row.severity is not Severity.FINE) or row.severity is Severity.NOTE


def test_names_of_checks_are_unique_and_an_unknown_one_is_an_error() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    machine = load("partial_mesh").machine
    assert [row.check.name for row in diagnose(machine, ["xgmi mesh"])] == ["xgmi mesh"]
    with pytest.raises(ConfigError, match="no check is named mesh"):
        diagnose(machine, ["mesh"])


def test_a_description_with_nothing_in_it_is_a_machine_without_gpus() -> None:
    found = remarks(diagnose(Machine()))
    assert found == {"no gpu": "note", "triton": "warning", "shared memory": "error"}


def damaged(machine: Machine) -> list[Machine]:
    """The same machine with every file, and every command's output, cut in the middle or full of something else."""
    cut = {path: text[: len(text) // 2] for path, text in machine.files.items()}
    noise = dict.fromkeys(machine.files, "\x00 -1 n/a: 99999999999999999999\n,,,[{")
    digits = dict.fromkeys(
        machine.files, "simd_count 1\ngfx_target_version 1\nue: " + "9" * 5000 + "\nCapEff:\t-f\n"
    )
    said = {line: text[: len(text) // 2] for line, text in machine.commands.items()}
    shouted = dict.fromkeys(machine.commands, '[{"rocm_version": [1]}]\n0, x\n,,,,,\nGPU0\n')
    return [
        replace(machine, files=digits),
        replace(machine, files=cut, commands=said),
        replace(machine, files=noise, commands=shouted),
    ]


@pytest.mark.parametrize("name", ["mi300x_x8", "h200_x8", "cpu"])
def test_checks_survive_files_that_are_cut_short_or_hold_something_else(name: str) -> None:
    for machine in damaged(load(name).machine):
        assert all(row.finding.seen for row in diagnose(machine))


def test_a_gpu_is_what_kfd_says() -> None:
    gpus = facts.amd_gpus(load("mi300x_x8").machine)
    assert [gpu.node for gpu in gpus] == [2, 3, 4, 5, 6, 7, 8, 9]
    assert {gpu.arch for gpu in gpus} == {"gfx942"}
    assert gpus[0].linked == frozenset(range(3, 10))
    assert {gpu.arch for gpu in facts.amd_gpus(load("mi355x_pod").machine)} == {"gfx950"}


def test_a_missing_link_is_named() -> None:
    [row] = diagnose(load("partial_mesh").machine, ["xgmi mesh"])
    assert row.finding.seen == "2 of 56 links are missing (KFD nodes 4->7, 7->4)"


def test_one_link_lost_in_one_direction_is_seen() -> None:
    machine = load("mi300x_x8").machine
    files = {
        path: text
        for path, text in machine.files.items()
        if path != f"{KFD}/topology/nodes/9/io_links/7/properties"
    }
    [row] = diagnose(replace(machine, files=files), ["xgmi mesh"])
    assert (row.severity, row.finding.seen) == (Severity.ERROR, "1 of 56 links are missing (KFD nodes 9->8)")


@pytest.mark.parametrize(
    ("rocm", "affected", "leaks"),
    [
        ("6.4.3-127", False, False),
        ("7.0.0-38", True, False),
        ("7.1.1-38", True, False),
        ("7.2.0-43", True, True),
        ("7.2.1-81", False, True),
        ("7.2.4-98", False, True),
        ("7.2.5-1", False, False),
    ],
)
def test_what_depends_on_the_version_of_rocm_changes_at_it(rocm: str, affected: bool, leaks: bool) -> None:
    machine = load("mi300x_x8").machine
    old = replace(machine, files={**machine.files, "/opt/rocm/.info/version": rocm}, env={})
    found = remarks(diagnose(old, ["graph capture", "ipc mode"]))
    assert ("graph capture" in found, "ipc mode" in found) == (affected, leaks)


@pytest.mark.parametrize(
    ("arch", "firmware", "needed"), [(90402, 176, True), (90402, 177, False), (90500, 23, True), (90500, 24, False)]
)
def test_scratch_must_be_kept_on_old_firmware_only(arch: int, firmware: int, needed: bool) -> None:
    properties = f"simd_count 1216\ngfx_target_version {arch}\nfw_version {firmware}\n"
    files = {f"{KFD}/topology/nodes/1/properties": properties, "/opt/rocm/.info/version": "7.2.4-98"}
    for env, problem in (({}, needed), ({"HSA_NO_SCRATCH_RECLAIM": "1"}, not needed)):
        [row] = diagnose(Machine(files=files, env=env), ["scratch"])
        assert row.severity.is_problem == problem


def test_a_recording_is_judged_as_json_alone() -> None:
    """Nothing of the machine that runs the test goes in: twice the same text, twice the same findings."""
    text = load("bare_container").text
    assert json.loads(text)["shm_bytes"] == 67108864
    assert [row.as_dict() for row in diagnose(load("bare_container").machine)] == [
        row.as_dict() for row in diagnose(load("bare_container").machine)
    ]
