"""The preloaded counter of HSA signals, against a runtime library that is compiled here and does as HSA's does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rocm_dp.errors import ConfigError
from rocm_dp.platform import cache_folder, preloading
from rocm_dp.soak.sample import AbsentError
from rocm_dp.soak.signals import SignalSampler, build_counter

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

# Refuses past 4 live signals, as KFD does past 4096.
RUNTIME = """
#include <stdint.h>
typedef struct { uint64_t handle; } hsa_signal_t;
static int live;
static uint32_t create(hsa_signal_t *out) {
    if (live == 4) return 0x1008; /* HSA_STATUS_ERROR_OUT_OF_RESOURCES */
    out->handle = 1000 + live++;
    return 0;
}
uint32_t hsa_signal_create(int64_t v, uint32_t n, const void *a, hsa_signal_t *out) { return create(out); }
uint32_t hsa_amd_signal_create(int64_t v, uint32_t n, const void *a, uint64_t f, hsa_signal_t *out) {
    return f == 7 ? create(out) : 1;
}
uint32_t hsa_signal_destroy(hsa_signal_t s) {
    if (!s.handle) return 0x1002; /* HSA_STATUS_ERROR_INVALID_SIGNAL */
    live--;
    return 0;
}
"""
# As HIP does: linked against the runtime, called through its symbols.
CLIENT = """
#include <stdint.h>
typedef struct { uint64_t handle; } hsa_signal_t;
uint32_t hsa_signal_create(int64_t, uint32_t, const void *, hsa_signal_t *);
uint32_t hsa_amd_signal_create(int64_t, uint32_t, const void *, uint64_t, hsa_signal_t *);
uint32_t hsa_signal_destroy(hsa_signal_t);
uint32_t make(uint64_t *out) { return hsa_signal_create(1, 0, 0, (hsa_signal_t *)out); }
uint32_t make_amd(uint64_t *out) { return hsa_amd_signal_create(1, 0, 0, 7, (hsa_signal_t *)out); }
uint32_t end(uint64_t handle) { hsa_signal_t s = {handle}; return hsa_signal_destroy(s); }
"""
PROGRAM = """
import ctypes, json, sys
from rocm_dp.soak.sample import AbsentError
from rocm_dp.soak.signals import SignalSampler
try:
    SignalSampler().read()
except AbsentError as error:
    print(json.dumps(str(error)))
client = ctypes.CDLL(sys.argv[1], mode=int(sys.argv[2]))
client.end.argtypes = [ctypes.c_uint64]
out = ctypes.c_uint64()
codes = [client.make(ctypes.byref(out)), client.make_amd(ctypes.byref(out)), client.make_amd(ctypes.byref(out))]
codes += [client.end(out), client.end(0), client.make(ctypes.byref(out)), client.make(ctypes.byref(out))]
codes += [client.make(ctypes.byref(out))]
print(json.dumps([codes, SignalSampler().read()]))
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hsa")
    runtime, client = folder / "libhsa-runtime64.so.1", folder / "libclient.so"
    for source, out, extra in (
        (RUNTIME, runtime, ["-Wl,-soname,libhsa-runtime64.so.1"]),
        (CLIENT, client, [str(runtime), f"-Wl,-rpath,{folder}"]),
    ):
        (folder / "it.c").write_text(source)
        command = ["cc", "-shared", "-fPIC", "-o", str(out), str(folder / "it.c"), *extra]
        subprocess.run(command, check=True, capture_output=True)
    return client


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_counter(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("mode", [0, 256], ids=["RTLD_LOCAL", "RTLD_GLOBAL"])
def test_live_signals_are_counted_whatever_scope_the_runtime_was_loaded_into(
    client: Path, counter: Path, mode: int, tmp_path: Path
) -> None:
    with preloading(counter):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(client), str(mode)],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
        )
    before, (codes, counts) = map(json.loads, done.stdout.splitlines())
    assert "no call that creates a signal has passed" in before, "0 would be a lie"
    # Three made, one ended, nothing ended, two more; the fifth live one is refused and not counted.
    assert codes == [0, 0, 0, 0, 0x1002, 0, 0, 0x1008]
    assert counts == {"hsa.live": 4, "hsa.peak": 4, "hsa.created": 5, "hsa.destroyed": 1}


def test_without_the_preload_the_counter_is_absent_and_says_how_to_have_it() -> None:
    with pytest.raises(AbsentError, match="--count-signals"):
        SignalSampler()


def test_without_a_runtime_a_call_fails_and_nothing_crashes(counter: Path, tmp_path: Path) -> None:
    code = "import ctypes; print(ctypes.CDLL(None).hsa_signal_create(1, 0, None, None))"
    with preloading(counter):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
        )
    assert int(done.stdout) == 0x100B


def test_many_may_build_it_at_once_and_it_is_there_whole_and_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: build_counter(tmp_path / "cache"), range(4)))
    assert list((tmp_path / "cache").iterdir()) == list(made)
    [library] = made
    stamp = library.stat().st_mtime_ns
    assert build_counter(tmp_path / "cache") == library
    assert library.stat().st_mtime_ns == stamp, "it is not built again"


def test_without_a_compiler_the_error_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="C compiler, none of cc, gcc, clang"):
        build_counter(tmp_path / "cache")


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigError, match="no space left"):
        build_counter(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "rocm_dp"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "rocm_dp"


def test_what_is_preloaded_already_stays_and_comes_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LD_PRELOAD", "libother.so")
    with preloading(tmp_path / "one.so"):
        assert os.environ["LD_PRELOAD"] == f"{tmp_path / 'one.so'}:libother.so"
    assert os.environ["LD_PRELOAD"] == "libother.so"
    monkeypatch.delenv("LD_PRELOAD")
    with preloading(tmp_path / "one.so"):
        assert os.environ["LD_PRELOAD"] == str(tmp_path / "one.so")
    assert "LD_PRELOAD" not in os.environ
