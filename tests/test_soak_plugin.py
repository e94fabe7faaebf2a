"""The pytest plugin in somebody else's project: what leaks fails, what doesn't passes."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rocm_dp.errors import ConfigError
from rocm_dp.soak.guard import LeakGuard
from rocm_dp.soak.inject import INJECTIONS
from rocm_dp.soak.outcome import cause_of

if TYPE_CHECKING:
    from collections.abc import Callable

pytest_plugins = ("pytester",)

# An engine-like loop: a cache of requests, a buffer that is used again, a worker thread.
ENGINE = """
import threading
import pytest

class Engine:
    def __init__(self, leak=""):
        self.leak, self.buffer, self.kept, self.files = leak, bytearray(4096), [], []

    def step(self, number):
        self.buffer[number % 4096] = 1
        worker = threading.Thread(target=lambda: None)
        worker.start()
        worker.join()
        if self.leak == "file" and number % 4 == 0:
            self.files.append(open("/dev/null"))
        if self.leak == "object":
            self.kept.append([number])

@pytest.mark.soak(steps=160)
def test_clean(leak_guard):
    engine = Engine()
    assert sum(1 for step in leak_guard.steps() if engine.step(step) is None) == 160

@pytest.mark.soak(steps=160)
@pytest.mark.parametrize("leak", ["file", "object"])
def test_leaks(leak_guard, leak):
    engine = Engine(leak)
    for step in leak_guard.steps():
        engine.step(step)
    del engine.files[:0]

@pytest.mark.soak(steps=160)
def test_left_early(leak_guard):
    for step in leak_guard.steps():
        if step == 100:
            break

@pytest.mark.soak(steps=160)
def test_fails_by_itself(leak_guard):
    for step in leak_guard.steps():
        assert step < 3, "the test's own"

def test_default(leak_guard):
    assert sum(1 for _ in leak_guard.steps()) == 200

def test_of_another_kind():
    pass
"""
SETTINGS = """
[pytest]
addopts = --strict-markers
filterwarnings =
    error
    ignore::ResourceWarning
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini(SETTINGS)
    pytester.makepyfile(test_engine=ENGINE)
    return pytester


def test_an_engines_own_tests_are_gated(project: pytest.Pytester) -> None:
    done = project.runpytest_subprocess("-p", "rocm_dp.soak.plugin", "-p", "no:cacheprovider", "-v")
    done.assert_outcomes(passed=3, failed=4)
    text = done.stdout.str()
    for name in ("test_clean", "test_default", "test_of_another_kind"):
        assert f"{name} PASSED" in text, text
    assert "fds.file LEAK: never back to" in text
    assert "objects.all LEAK: never back to" in text
    assert "builtins.list +" in text, "what grew most is named"
    assert "was left after 100 of 160 steps" in text
    assert "the test's own" in text
    assert "rss" not in text.split("test_fails_by_itself")[-1]


def test_the_marker_leaves_such_tests_out_like_any_other(project: pytest.Pytester) -> None:
    done = project.runpytest_subprocess("-p", "rocm_dp.soak.plugin", "-p", "no:cacheprovider", "-m", "not soak")
    done.assert_outcomes(passed=2, deselected=5)
    shown = project.runpytest_subprocess("-p", "rocm_dp.soak.plugin", "--markers").stdout.str()
    assert "@pytest.mark.soak(steps=200):" in shown


LIGHT = """
import sys
import pytest

@pytest.mark.soak(steps=32)
def test_it(leak_guard):
    assert sum(1 for _ in leak_guard.steps()) == 32
    assert "torch" not in sys.modules
"""


def test_an_installed_plugin_is_loaded_once_though_asked_for_twice_and_imports_no_torch(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.makepyfile(test_light=LIGHT)
    about = project.mkdir("site") / "installed-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[pytest11]\nrocm_dp.soak.plugin = rocm_dp.soak.plugin\n")
    monkeypatch.setenv("PYTHONPATH", str(about.parent))
    for asked in ([], ["-p", "rocm_dp.soak.plugin"]):
        done = project.runpytest_subprocess(*asked, "-p", "no:cacheprovider", "test_light.py")
        done.assert_outcomes(passed=1)


def test_the_plugin_is_an_entry_point_under_its_modules_name() -> None:
    if sys.version_info >= (3, 11):
        import tomllib  # novermin
    else:
        import tomli as tomllib
    project = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"rocm_dp.soak.plugin": "rocm_dp.soak.plugin"}


def test_a_guard_outside_pytest_finds_a_leaked_thread() -> None:
    over = threading.Event()
    threads = []
    with LeakGuard(160) as guard:
        guard.limit("threads", 1000.0)
        for step in guard.steps():
            if step % 8 == 0:
                threads.append(threading.Thread(target=over.wait))
                threads[-1].start()
        said = guard.finish()
    over.set()
    for thread in threads:
        thread.join()
    assert "threads LEAK: never back to" in said
    [verdict] = [verdict for verdict in guard.verdicts() if verdict.name == "threads"]
    assert 0 < verdict.hours_left < 1


def found_by(step: Callable[[int], object]) -> tuple[set[str], str]:
    """The counters that fail over 2,000 steps, but for the time, which other tests share; and the cause named."""
    with LeakGuard(2000) as guard:
        for number in guard.steps():
            step(number)
        verdicts = [verdict for verdict in guard.verdicts() if verdict.name != "latency.drift"]
    return {verdict.name for verdict in verdicts if not verdict.passed}, cause_of(verdicts)


def test_numbers_kept_of_each_step_are_found_though_no_collector_tracks_them() -> None:
    kept: list[float] = []
    failed, cause = found_by(lambda number: kept.extend(number + part / 8 for part in range(4)))
    assert "heap.blocks" in failed
    assert cause == "rss"
    assert "heap.blocks" not in found_by(lambda number: number + 0.5)[0]


def test_memory_kept_of_each_step_is_named_so_however_long_the_run() -> None:
    leak = INJECTIONS["rss"](None)  # type: ignore[arg-type]
    failed, cause = found_by(leak.step)
    leak.close()
    assert {"rss", "heap.used"} <= failed
    assert cause == "rss"


@pytest.mark.parametrize("steps", [0, 31, 2.5, None])
def test_too_few_steps_are_refused(steps: object) -> None:
    with pytest.raises(ConfigError, match="steps must be an int of at least 32"):
        LeakGuard(steps)  # type: ignore[arg-type]
