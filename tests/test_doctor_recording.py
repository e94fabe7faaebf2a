"""What is read of a machine, what is kept of it, and what is refused when it comes back."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from doctor_machines import load

from rocm_dp.cli import main
from rocm_dp.doctor import recorded
from rocm_dp.doctor.diagnosis import diagnose
from rocm_dp.doctor.live import LiveMachine
from rocm_dp.doctor.machine import Machine, from_json, to_json
from rocm_dp.doctor.places import RCCL_HEADER
from rocm_dp.doctor.recorded import RecordedMachine, record
from rocm_dp.errors import ConfigError
from rocm_dp.files import open_private, read_bounded, write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rocm_dp.testing import RankPool


def planted(root: Path, machine: Machine) -> None:
    """The files of a description, as files."""
    for path, text in machine.files.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.startswith("/proc/self/ns/"):
            target.symlink_to(text)
        else:
            target.write_text(text)


def test_the_live_machine_reads_the_files_that_a_recording_holds(tmp_path: Path) -> None:
    machine = load("mi300x_x8").machine
    planted(tmp_path, machine)
    site = "/opt/venv/lib/python3.12/site-packages"
    (tmp_path / site.lstrip("/") / "torch/__init__.py").write_text("")
    found = LiveMachine(tmp_path, path=(str(tmp_path / site.lstrip("/")),)).describe()
    missing = {path for path in machine.files if path not in found.files and "site-packages" not in path}
    assert not missing
    assert all(found.files[path] == text for path, text in machine.files.items() if path in found.files)
    rows = {row.check.name: row.finding.seen for row in diagnose(found)}
    assert rows["gpus"] == "8 x gfx942"
    assert rows["xgmi mesh"] == "all 56 links between 8 GPUs"


def test_of_a_long_file_only_what_is_looked_at_is_kept(tmp_path: Path) -> None:
    header = tmp_path / RCCL_HEADER.lstrip("/")
    header.parent.mkdir(parents=True)
    header.write_text(
        "/* a licence */\n" * 100 + "#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 7\n"
    )
    kept = LiveMachine(tmp_path, path=()).describe().files[RCCL_HEADER]
    assert kept == "#define NCCL_MAJOR 2\n#define NCCL_MINOR 27\n#define NCCL_PATCH 7"


def test_a_file_without_an_end_is_read_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "sys/module/amdgpu/version"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(1 << 30)
    assert len(LiveMachine(tmp_path, path=()).describe().files["/sys/module/amdgpu/version"]) == 1 << 16


def test_secrets_in_the_environment_are_never_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("HIP_API_KEY", "do-not-tell")
    monkeypatch.setenv("PYTORCH_UPLOAD_TOKEN", "do-not-tell")
    monkeypatch.setenv("HF_TOKEN", "do-not-tell")
    text = to_json(LiveMachine().describe())
    assert "do-not-tell" not in text
    assert from_json(text).env["NCCL_SOCKET_IFNAME"] == "eth0"


def test_what_is_recorded_is_what_comes_back(tmp_path: Path) -> None:
    machine = LiveMachine().describe()
    path = record(machine, tmp_path / "here")
    assert RecordedMachine(tmp_path / "here").describe() == machine
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_recording_that_is_a_link_a_pipe_or_too_long_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text(to_json(Machine()))
    (tmp_path / "machine.json").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic links"):
        RecordedMachine(tmp_path).describe()
    (tmp_path / "machine.json").unlink()
    os.mkfifo(tmp_path / "machine.json")
    with pytest.raises(ConfigError, match="must be a regular file"):
        RecordedMachine(tmp_path).describe()
    (tmp_path / "machine.json").unlink()
    record(Machine(), tmp_path)
    monkeypatch.setattr(recorded, "MOST_BYTES", 10)
    with pytest.raises(ConfigError, match="at most 10 bytes"):
        RecordedMachine(tmp_path).describe()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "of format 1"),
        ({"secrets": {}}, "no part named secrets"),
        ({"files": {"/proc/1/comm": 1}}, "files .* must hold str"),
        ({"files": ["/proc/1/comm"]}, "not as it is recorded"),
        ({"shm_bytes": True}, "shm_bytes .* must hold int"),
        ({"shm_bytes": "1"}, "shm_bytes .* must hold int"),
        ({"devices": {"/dev/kfd": {"gid": 1}}}, "not as it is recorded"),
        ({"packages": [{"name": "torch"}]}, "not as it is recorded"),
        ({"packages": [{"name": "torch", "version": "1", "place": 1}]}, "packages .* must hold str"),
        ({"lock_ages": {"/x": 1.5}}, "lock_ages .* must hold int"),
    ],
)
def test_a_recording_of_another_form_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_json(json.dumps({"format": 1, **change}))


@pytest.mark.parametrize("text", ["", "[]", "nonsense", "[" * 100_000])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a machine description must be"):
        from_json(text)


def test_a_write_replaces_a_link_and_leaves_nothing_half_done(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "report").symlink_to(tmp_path / "precious")
    write_atomically(tmp_path / "report", "new")
    assert (tmp_path / "precious").read_text() == "kept"
    assert read_bounded(tmp_path / "report", 3) == "new"
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "report", "\udcff")
    assert (tmp_path / "report").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "report"]


def test_what_is_no_file_is_neither_replaced_nor_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path):
        with pytest.raises(ConfigError, match="must be a file, or not be there"):
            write_atomically(path, "new")
        with pytest.raises(ConfigError, match="must be a file, or not be there"):
            open_private(path)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_file_that_is_written_line_by_line_is_its_owners_and_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        open_private(tmp_path / "link")
    assert (tmp_path / "precious").read_text() == "kept"
    (tmp_path / "journal").write_text("old, and longer than what comes")
    (tmp_path / "journal").chmod(0o644)
    with open_private(tmp_path / "journal") as journal:
        print("new", file=journal, flush=True)
        assert (tmp_path / "journal").read_text() == "new\n"
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o600


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rocm_dp", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("name", "code"), [("mi300x_x8", 0), ("cpu", 0), ("partial_mesh", 1), ("bare_container", 1)]
)
def test_the_exit_code_says_whether_there_are_problems(
    name: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "machine.json").write_text(load(name).text)
    assert main(["doctor", "--from", str(tmp_path), "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["fine"] == (code == 0)
    worst = {row["check"] for row in report["findings"] if row["severity"] != "fine"}
    assert worst == set(load(name).expect)
    assert report["counts"]["error"] == sum(row["severity"] == "error" for row in report["findings"])


def test_a_machine_that_cannot_be_looked_at_is_exit_code_2(tmp_path: Path) -> None:
    assert main(["doctor", "--from", str(tmp_path / "absent")]) == 2
    (tmp_path / "machine.json").write_text("{")
    assert main(["doctor", "--from", str(tmp_path)]) == 2
    assert main(["doctor", "--only", "astrology"]) == 2


def test_the_screen_names_the_finding_the_reason_and_the_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "machine.json").write_text(load("cuda_torch").text)
    assert main(["doctor", "--from", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "torch is built for CUDA" in shown
    assert "sees no GPU" in shown
    assert "--constraint" in shown
    assert "xgmi mesh" not in shown


def test_this_machine_is_looked_at_without_torch_and_recorded(tmp_path: Path) -> None:
    done = run("doctor", "--json", "--record", "recording", folder=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    again = run("doctor", "--json", "--from", "recording", folder=tmp_path)
    assert json.loads(again.stdout) == json.loads(done.stdout)
    code = (
        "import sys; from rocm_dp.cli import main; main(['doctor']); print('torch' in sys.modules, file=sys.stderr)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert told.stderr.split()[-1] == "False"


@pytest.fixture
def two_ranks(ranks: Callable[[int], RankPool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are running already, in place of those that a command would start."""
    monkeypatch.setattr("rocm_dp.testing.RankPool", lambda world: nullcontext(ranks(world)))


@pytest.mark.usefixtures("two_ranks")
def test_info_says_what_is_chosen_and_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--ranks", "2", "--hidden", "8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["machine"]["ranks"] == "2 over gloo"
    assert torch.version.hip or told["machine"]["SUM_LEN in graphs"] == "off, this is not ROCm"
    plans = {plan["plan"]: plan for plan in told["plans"]}
    assert plans["decode, 32 rows each"]["chosen"] == "all_gather"
    assert (
        plans["prefill, one rank busy"]["refused"]["all_gather"] == "needs equal sizes, the dp ranks have (512, 0)"
    )
    for plan in plans.values():
        assert {"peer", "all_gather", "all_gather_v", "all_reduce"} <= {plan["chosen"], *plan["refused"]}


@pytest.mark.usefixtures("two_ranks")
def test_info_is_one_screen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["info", "--ranks", "2", "--hidden", "8"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 24
    assert "peer, copy_engine: needs GPUs" in shown
