"""rocm_dp.testing: ranks answer, the first real error is the one seen, and nothing stays behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import rank_cases as cases
import torch
import torch.distributed as dist

from rocm_dp.errors import ClosedError, ConfigError, RankFailedError, RocmDpError, TraceError
from rocm_dp.testing import RankPool, RankTraceback, note, rank_device, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A wait that only ends by its time-out fails the claims that say "promptly".
PROMPT = 30.0


class Point:
    """A class of this module: known to the ranks too, whatever name pytest gave the module."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and other.x == self.x

    __hash__ = None  # type: ignore[assignment]


def ranks_here() -> list[psutil.Process]:
    """Our rank processes; multiprocessing's resource tracker is not one."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "spawn_main" in " ".join(child.cmdline()):
                found.append(child)
    return found


def shared_by(pids: set[int]) -> list[Path]:
    """The files by which torch shares CPU tensors, as far as ``pids`` made them."""
    return [path for pid in pids for path in Path("/dev/shm").glob(f"torch_{pid}_*")]


@pytest.fixture(scope="module")
def lasting_pool() -> Iterator[RankPool]:
    with RankPool(2, backend="gloo") as pool:
        yield pool


@pytest.fixture
def no_rank_left() -> Iterator[None]:
    before = {child.pid for child in ranks_here()}
    yield
    assert {child.pid for child in ranks_here()} <= before


# Answers


def whoami(rank: int, *args: object) -> tuple[int, int, tuple[object, ...]]:
    return rank, dist.get_rank(), args


def test_results_are_listed_by_rank(lasting_pool: RankPool) -> None:
    assert lasting_pool.run(whoami, "a", 2) == [(0, 0, ("a", 2)), (1, 1, ("a", 2))]


def pid(rank: int) -> int:
    return os.getpid()


def test_cases_run_in_the_same_processes(lasting_pool: RankPool) -> None:
    pids = [lasting_pool.run(pid) for _ in range(3)]
    assert pids[0] == pids[1] == pids[2]
    assert len({os.getpid(), *pids[0]}) == 3


def summed(rank: int, mine: torch.Tensor) -> torch.Tensor:
    total = mine.to(rank_device()) * (rank + 1)
    dist.all_reduce(total)
    return total


def test_tensors_go_out_and_come_back_without_shared_memory(lasting_pool: RankPool) -> None:
    results = lasting_pool.run(summed, torch.arange(4.0))
    assert all(torch.equal(result, torch.tensor([0.0, 3.0, 6.0, 9.0])) for result in results)
    assert shared_by({os.getpid(), *lasting_pool.run(pid)}) == []


def echo_twice(rank: int, data: bytes) -> tuple[bytes, bytes]:
    note(data)
    return data, data[::-1]


def test_large_arguments_notes_and_results_do_not_block_each_other(lasting_pool: RankPool) -> None:
    data = os.urandom(1 << 20) * 24
    sizes: list[int] = []
    results = lasting_pool.run(echo_twice, data, on_note=lambda _, obj: sizes.append(len(obj)))
    assert results == [(data, data[::-1])] * 2
    assert sizes == [len(data)] * 2


def count_up(rank: int, upto: int) -> None:
    for i in range(upto):
        note((rank, i))


def test_notes_arrive_in_order_while_the_case_runs(lasting_pool: RankPool) -> None:
    heard: dict[int, list[object]] = {0: [], 1: []}
    lasting_pool.run(count_up, 50, on_note=lambda rank, obj: heard[rank].append(obj))
    assert heard == {rank: [(rank, i) for i in range(50)] for rank in range(2)}


def test_notes_that_nobody_asked_for_are_dropped(lasting_pool: RankPool) -> None:
    assert lasting_pool.run(count_up, 3) == [None, None]


def moved(rank: int, point: Point) -> Point:
    return Point(point.x + rank)


def test_classes_of_the_test_module_travel_both_ways(lasting_pool: RankPool) -> None:
    assert lasting_pool.run(moved, Point(5)) == [Point(5), Point(6)]


def threads(rank: int) -> int:
    return torch.get_num_threads()


def test_ranks_share_the_cores(lasting_pool: RankPool) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert lasting_pool.run(threads) == [max(1, cores // 2)] * 2


def device_name(rank: int) -> str:
    return str(rank_device())


def test_gloo_ranks_live_on_the_cpu(lasting_pool: RankPool) -> None:
    assert lasting_pool.backend == "gloo"
    assert lasting_pool.run(device_name) == ["cpu", "cpu"]


def nested(rank: int) -> list[int]:
    return [result[0] for result in run_ranks(whoami, 1, backend="gloo")]


@pytest.mark.usefixtures("no_rank_left")
def sockets(_: int = 0) -> list[str]:
    """The addresses of this process's sockets, once it has spoken to all."""
    if dist.is_initialized():
        dist.all_reduce(torch.ones(4), group=dist.new_group(backend="gloo"))
    return [connection.laddr.ip for connection in psutil.Process().net_connections("inet")]


def test_all_sockets_of_cpu_ranks_and_of_whoever_starts_them_are_on_loopback() -> None:
    with RankPool(2, backend="gloo") as pool:
        for found in (*pool.run(sockets), sockets()):
            assert found
            assert {address.removeprefix("::ffff:") for address in found} == {"127.0.0.1"}


def test_one_rank_is_enough_and_a_rank_may_start_ranks() -> None:
    assert run_ranks(nested, 1, backend="gloo") == [[0]]


# Refusals: nothing has started, or nothing is lost


def test_note_and_rank_device_say_that_they_belong_in_a_rank() -> None:
    with pytest.raises(RocmDpError, match="runs a rank"):
        note(1)
    with pytest.raises(RocmDpError, match="runs a rank"):
        rank_device()


@pytest.mark.parametrize("world_size", [0, -1, True, 2.0, "2"])
def test_a_world_size_that_is_none_is_refused(world_size: Any) -> None:
    with pytest.raises(ConfigError, match=f"world_size must be .*got {world_size!r}"):
        RankPool(world_size)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), "1"])
def test_a_timeout_that_is_none_is_refused(lasting_pool: RankPool, timeout: Any) -> None:
    with pytest.raises(ConfigError, match=r"timeout must be .*got"):
        RankPool(1, timeout=timeout)
    with pytest.raises(ConfigError, match=r"timeout must be .*got"):
        lasting_pool.run(pid, timeout=timeout)


def test_a_backend_that_can_not_serve_is_refused() -> None:
    for env in ({"A=B": "1"}, {"A": 1}, {"": "1"}, {"A": "1\0"}):
        with pytest.raises(ConfigError, match=r"env must map names of environment variables to text, got"):
            RankPool(1, env=env)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got 'mpi'"):
        RankPool(1, backend="mpi")
    too_many = torch.cuda.device_count() + 1
    with pytest.raises(ConfigError, match=f"{too_many} ranks, but {too_many - 1} GPUs"):
        RankPool(too_many, backend="nccl")


def test_a_function_that_can_not_travel_is_refused_before_any_process_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def local(rank: int) -> None: ...

    monkeypatch.setattr("multiprocessing.context.SpawnProcess.start", lambda _: pytest.fail("started"))
    for fn in (lambda rank: rank, local):
        with pytest.raises(ConfigError, match="top of a module"):
            run_ranks(fn, 2)
    with pytest.raises(ConfigError, match=r"args must be picklable .*got \(int, lock\)"):
        run_ranks(whoami, 2, 1, threading.Lock())


def test_a_refused_case_leaves_the_pool_usable(lasting_pool: RankPool) -> None:
    with pytest.raises(ConfigError, match="top of a module"):
        lasting_pool.run(lambda rank: rank)
    assert not lasting_pool.broken
    assert len(lasting_pool.run(pid)) == 2


def test_a_pool_runs_one_case_at_a_time(lasting_pool: RankPool) -> None:
    said: list[str] = []

    def again(rank: int, obj: object) -> None:
        with pytest.raises(RocmDpError, match="one at a time") as caught:
            lasting_pool.run(pid)
        said.append(str(caught.value))

    lasting_pool.run(count_up, 1, on_note=again)
    assert len(said) == 2


# Errors

ERRORS: list[tuple[Callable[..., object], tuple[int, ...], type[BaseException], tuple[object, ...], int]] = [
    (cases.fail_while_others_wait, (1,), KeyError, ("first", 17), 1),
    (cases.fail_after_closing, (0,), LookupError, ("the cause",), 0),
    (cases.fail_in_turn, (), ValueError, ("from 1",), 1),
]


@pytest.mark.usefixtures("no_rank_left")
@pytest.mark.parametrize(("fn", "args", "kind", "said", "rank"), ERRORS)
def test_the_first_real_error_wins_with_its_type_arguments_and_traceback(
    fn: Callable[..., object], args: tuple[int, ...], kind: type[BaseException], said: object, rank: int
) -> None:
    with RankPool(2, backend="gloo") as pool:
        start = time.monotonic()
        with pytest.raises(kind) as caught:
            pool.run(fn, *args, timeout=60)
        assert time.monotonic() - start < PROMPT
    assert type(caught.value) is kind
    assert caught.value.args == said
    cause = caught.value.__cause__
    assert isinstance(cause, RankTraceback)
    assert cause.rank == rank
    assert f"in {fn.__name__}" in str(cause)


ONE_RANK: list[tuple[Callable[..., object], type[BaseException], str]] = [
    (cases.raise_picky, cases.PickyError, "^rank 0: picky$"),
    (cases.raise_sealed, cases.SealedError, "^what it says$"),
    (cases.raise_only_there, RocmDpError, "^rank 0: .*OnlyThereError: what it says$"),
    (cases.exit_quietly, RocmDpError, r"^rank 0 was left by SystemExit\(0\)$"),
    (cases.skip, pytest.skip.Exception, "not on this machine"),
]
LIKE_THEM: list[tuple[Callable[..., object], type[BaseException], str]] = [
    (cases.raise_trace_error, TraceError, "^requests.jsonl, line 3: no counts$"),
    (cases.raise_locked, RocmDpError, "^rank 0: .*LockedError: what it says$"),
    (cases.interrupt, RocmDpError, r"^rank 0 was left by KeyboardInterrupt\(\)$"),
    (cases.fail_outright, pytest.fail.Exception, "no good"),
]


@pytest.mark.usefixtures("no_rank_left")
# Each takes a rank of its own: those that travel by the same way as another one with -m soak.
@pytest.mark.parametrize(
    ("fn", "kind", "said"), [*ONE_RANK, *(pytest.param(*case, marks=pytest.mark.soak) for case in LIKE_THEM)]
)
def test_an_error_arrives_as_itself_or_says_what_it_was(
    fn: Callable[..., object], kind: type[BaseException], said: str
) -> None:
    with pytest.raises(kind, match=said) as caught:
        run_ranks(fn, 1, backend="gloo")
    assert type(caught.value) is kind
    assert isinstance(caught.value.__cause__, RankTraceback)


@pytest.mark.usefixtures("no_rank_left")
def test_an_unpicklable_result_names_its_rank_and_breaks_the_pool() -> None:
    with RankPool(2, backend="gloo") as pool:
        with pytest.raises(RocmDpError, match="rank 1 returned a lock that can't be pickled"):
            pool.run(cases.return_lock)
        assert pool.broken
        with pytest.raises(RocmDpError, match=r"broken.*a case raised RocmDpError"):
            pool.run(pid)
    with pytest.raises(ClosedError):
        pool.run(pid)


def refuse(rank: int, obj: object) -> None:
    raise LookupError("a listener's own error")


@pytest.mark.usefixtures("no_rank_left")
def test_an_error_of_the_listener_ends_the_case() -> None:
    with RankPool(1, backend="gloo") as pool:
        with pytest.raises(LookupError, match="listener"):
            pool.run(count_up, 1, on_note=refuse)
        assert pool.broken


@pytest.mark.usefixtures("no_rank_left")
@pytest.mark.parametrize(("fn", "exitcode"), [(cases.kill_itself, -signal.SIGKILL), (cases.leave_at_once, 7)])
def test_a_rank_that_dies_is_named_promptly(fn: Callable[..., object], exitcode: int) -> None:
    with RankPool(2, backend="gloo") as pool:
        start = time.monotonic()
        with pytest.raises(RankFailedError) as caught:
            pool.run(fn, 1)
        assert time.monotonic() - start < PROMPT
    assert (caught.value.rank, caught.value.exitcode) == (1, exitcode)


@pytest.mark.usefixtures("no_rank_left")
def test_a_hang_names_its_rank_and_shows_where_it_stands() -> None:
    with RankPool(2, backend="gloo", timeout=60) as pool:
        pool.run(cases.wait_for_all)  # The first case of a module imports it, and that too takes its time.
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"no answer in 1 s from rank 1 \(of 2\)") as caught:
            pool.run(cases.sleep_in_here, 1, timeout=1)
        assert time.monotonic() - start < PROMPT
    assert "in sleep_in_here" in str(caught.value)


@pytest.mark.usefixtures("no_rank_left")
def test_a_rank_that_does_not_even_react_is_named_and_killed() -> None:
    with RankPool(1, backend="gloo") as pool:
        pool.run(cases.wait_for_all)
        with pytest.raises(TimeoutError, match=r"rank 0(.|\n)*does not react"):
            pool.run(cases.stop_itself, 0, timeout=0.5)


# Nothing stays behind


@pytest.mark.usefixtures("no_rank_left")
def test_a_pool_that_is_only_dropped_ends_its_ranks() -> None:
    pool = RankPool(1, backend="gloo")
    (rank,) = pool.run(pid)
    del pool
    gc.collect()
    assert not psutil.pid_exists(rank)


def open_things() -> tuple[list[str], int]:
    gc.collect()
    links = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return sorted(link.partition(":")[0] for link in links), threading.active_count()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.soak
@pytest.mark.usefixtures("lasting_pool", "no_rank_left")
def test_five_pools_leave_no_descriptor_thread_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    before = open_things()
    pids = {os.getpid()}
    for _ in range(5):
        with RankPool(1, backend="gloo") as pool:
            pids.update(pool.run(pid))
            assert pool.run(summed, torch.ones(1)) == [torch.ones(1)]
    assert open_things() == before
    assert shared_by(pids) == []
    assert list(tmp_path.iterdir()) == []


def start_script(folder: Path, body: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(body))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, script], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


HANGING = """
    import os, threading, time
    from rocm_dp.testing import RankPool, note

    def hang(rank):
        note(os.getpid())
        time.sleep(600)

    def main():
        with RankPool(2, backend="gloo") as pool:
            pool.run(hang, on_note=lambda rank, pid: print(pid, flush=True))

    if __name__ == "__main__":
        {start}
"""
IN_MAIN_THREAD = HANGING.format(start="main()")
IN_A_THREAD = HANGING.format(start="thread = threading.Thread(target=main); thread.start(); thread.join()")


def await_end(pids: list[int]) -> None:
    end = time.monotonic() + PROMPT
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize(
    ("body", "sent"),
    [(IN_MAIN_THREAD, signal.SIGINT), (IN_MAIN_THREAD, signal.SIGKILL), (IN_A_THREAD, signal.SIGKILL)],
    ids=["SIGINT", "SIGKILL", "SIGKILL, pool in a thread"],
)
def test_no_rank_outlives_its_parent(tmp_path: Path, body: str, sent: signal.Signals) -> None:
    with start_script(tmp_path, body) as parent:
        assert parent.stdout is not None
        ranks = [int(parent.stdout.readline()) for _ in range(2)]
        os.kill(parent.pid, sent)
        for rank in ranks:  # Ctrl-C goes to the whole terminal, and ranks leave it to the parent.
            if sent is signal.SIGINT:
                os.kill(rank, sent)
        _, stderr = parent.communicate(timeout=PROMPT)
    await_end(ranks)
    assert parent.returncode == -sent
    assert stderr.count("Traceback") == (1 if sent is signal.SIGINT else 0)


def test_a_script_that_ends_with_an_open_pool_leaves_quietly(tmp_path: Path) -> None:
    body = """
        import os
        from rocm_dp.testing import RankPool

        def pid(rank):
            return os.getpid()

        if __name__ == "__main__":
            pool = RankPool(2, backend="gloo")
            print(*pool.run(pid))
    """
    with start_script(tmp_path, body) as parent:
        stdout, stderr = parent.communicate(timeout=60)
    assert (parent.returncode, stderr) == (0, "")
    await_end([int(word) for word in stdout.split()])


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    body = """
        from rocm_dp.testing import run_ranks

        def rank_of(rank):
            return rank

        run_ranks(rank_of, 2, backend="gloo")
    """
    with start_script(tmp_path, body) as parent:
        _, stderr = parent.communicate(timeout=60)
    assert parent.returncode == 1
    assert "ConfigError: the main script starts ranks while it is being imported" in stderr
    assert stderr.count("Traceback") == 1


def test_a_script_that_the_ranks_can_not_import_is_told_so(tmp_path: Path) -> None:
    body = """
        import multiprocessing
        from rocm_dp.testing import RankPool

        if __name__ == "__main__":
            RankPool(1, backend="gloo")
        else:
            raise SystemExit(3)
    """
    with start_script(tmp_path, body) as parent:
        _, stderr = parent.communicate(timeout=60)
    assert "RankFailedError: rank 0 died without an answer (exit code 3)" in stderr
    assert "died while importing the main script" in stderr
