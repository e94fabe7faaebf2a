"""The parent's side of :mod:`rocm_dp.testing`: the processes, and one question at a time to all of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from rocm_dp import testing_worker as worker
from rocm_dp.errors import ConfigError, RankFailedError, RocmDpError
from rocm_dp.testing_pickle import Failure, decode, revive

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

START_TIMEOUT = 120.0  # seconds for all ranks to import torch and meet, apart from any case's own timeout
GRACE = 0.5  # seconds in which a failure with an earlier time stamp may still come in
ECHO_GRACE = 5.0  # the same while all failures look like echoes: the real one may still be unwinding
STOP_TIMEOUT = 10.0  # seconds for idle ranks to leave by themselves
TERM_TIMEOUT = 2.0  # seconds between SIGTERM and SIGKILL
STACK_TIMEOUT = 2.0  # seconds to wait for the stacks of ranks that hang

_NAME = "rocm_dp-rank-"
_UNGUARDED = 86  # exit code of a rank whose main script started ranks itself


class RankTraceback(Exception):  # noqa: N818 - it is only ever the cause of an error
    """The ``__cause__`` of an error that came from a rank: its ``rank`` and the traceback there, ``text``."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank, self.text = rank, text

    def __str__(self) -> str:
        return f'on rank {self.rank}:\n"""\n{self.text.rstrip()}\n"""'


@dataclass
class _Rank:
    index: int
    process: SpawnProcess
    conn: Connection
    stacks: Connection
    said_hello: bool = False


class Crew:
    """Owns the processes, their pipes and the store where they meet."""

    def __init__(self) -> None:
        self.ranks: list[_Rank] = []
        self._store: object = None
        self._feeder: threading.Thread | None = None

    def start(self, world_size: int, backend: str) -> None:
        """Start the store and the processes; they say hello and join by themselves."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            # Without a socket of ours the store would listen on every interface.
            self._store = worker.TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
            )
        main_thread = threading.current_thread() is threading.main_thread()
        resource_tracker.ensure_running()  # Its first start would unblock SIGINT again.
        # Blocked here is blocked in the children, until they ignore it: Ctrl-C is the parent's alone.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(world_size):
                self._start_rank(
                    worker.RankSpec(rank, world_size, backend, port, START_TIMEOUT, os.getpid(), main_thread)
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _start_rank(self, spec: worker.RankSpec) -> None:
        context = multiprocessing.get_context("spawn")
        conn, their_conn = context.Pipe()
        stacks, their_stacks = context.Pipe(duplex=False)
        process = context.Process(
            target=worker.main, args=(spec, their_conn, their_stacks), name=f"{_NAME}{spec.rank}"
        )
        self.ranks.append(_Rank(spec.rank, process, conn, stacks))
        try:
            process.start()
        except RuntimeError:
            if multiprocessing.current_process().name.startswith(_NAME):
                raise SystemExit(_UNGUARDED) from None
            raise
        finally:
            their_conn.close()
            their_stacks.close()

    def feed(self, case: bytes) -> None:
        """Sends ``case`` to all ranks without waiting, since a rank that hangs may never read it."""
        conns = [rank.conn for rank in self.ranks]
        self._feeder = threading.Thread(target=_feed, args=(conns, case), name="rocm_dp-feeder", daemon=True)
        self._feeder.start()

    def stop(self) -> None:
        """Ask all ranks to leave and wait a while."""
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.conn.send_bytes(worker.STOP)
        self._join(STOP_TIMEOUT)

    def end(self) -> None:
        """End every process that is left, and give everything up."""
        try:
            for rank in self._alive():
                rank.process.terminate()
            self._join(TERM_TIMEOUT)
        finally:
            for rank in self._alive():
                rank.process.kill()
            self._join(STOP_TIMEOUT)
            if self._feeder is not None:  # It has no reader any more; its pipes must stay open until it saw that.
                self._feeder.join(TERM_TIMEOUT)
            for rank in self.ranks:
                with contextlib.suppress(ValueError):  # Stuck in a driver, it dies when that lets go of it.
                    rank.process.close()
                rank.conn.close()
                rank.stacks.close()
            self.ranks.clear()
            self._store = self._feeder = None

    def _alive(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.process.pid is not None and rank.process.is_alive()]

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for rank in self._alive():
            rank.process.join(max(0.0, deadline - time.monotonic()))


def _feed(conns: Sequence[Connection], case: bytes) -> None:
    for conn in conns:
        with contextlib.suppress(OSError):  # A rank that died is found by its reader.
            conn.send_bytes(case)


@dataclass
class _Problem:
    rank: int
    stamp: int
    error: BaseException
    echo: bool = False


@dataclass
class Round:
    """One question to all ranks: hears them until each has answered, failed or died, or time is up."""

    ranks: Sequence[_Rank]
    until: bytes
    on_note: Callable[[int, Any], object] | None = None
    answers: dict[int, bytes] = field(default_factory=dict)
    problems: dict[int, _Problem] = field(default_factory=dict)

    def collect(self, timeout: float) -> dict[int, bytes]:
        """The answers by rank. Raises the first problem, or TimeoutError after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0 and self._missing():
            problems = len(self.problems)
            self._listen(min(left, 1.0))
            if len(self.problems) > problems:
                echoes = all(problem.echo for problem in self.problems.values())
                deadline = min(deadline, time.monotonic() + (ECHO_GRACE if echoes else GRACE))
        if self.problems:
            raise min(self.problems.values(), key=lambda problem: (problem.echo, problem.stamp)).error
        if missing := self._missing():
            raise TimeoutError(_overdue(missing, len(self.ranks), timeout))
        return self.answers

    def _missing(self) -> list[_Rank]:
        done = self.answers.keys() | self.problems.keys()
        return [rank for rank in self.ranks if rank.index not in done]

    def _listen(self, seconds: float) -> None:
        # A death has no time stamp; it came after this, and before whatever else is heard in this look.
        looked = time.monotonic_ns()
        heard = [rank for rank in self.ranks if rank.index not in self.problems]
        wait([rank.conn for rank in heard] + [rank.process.sentinel for rank in heard], seconds)
        for rank in heard:
            if not self._hear(rank):
                self.problems[rank.index] = _Problem(rank.index, looked, _death(rank))

    def _hear(self, rank: _Rank) -> bool:
        """Takes at most one message of ``rank``, so that none drowns the others out; False if it is dead."""
        try:
            if rank.conn.poll():
                self._take(rank, rank.conn.recv_bytes(), rank.conn.recv_bytes())
                return True
        except (EOFError, ConnectionError):
            rank.process.join(TERM_TIMEOUT)
            return False
        return rank.process.exitcode is None

    def _take(self, rank: _Rank, kind: bytes, body: bytes) -> None:
        if kind == self.until:
            self.answers[rank.index] = body
        elif kind == worker.HELLO:
            rank.said_hello = True
        elif kind == worker.FAILURE:
            failure: Failure = decode(rank.index, body)
            error = _revive(rank.index, failure)
            self.problems[rank.index] = _Problem(rank.index, failure.stamp, error, failure.echo)
        elif kind == worker.NOTE and self.on_note is not None:
            self.on_note(rank.index, decode(rank.index, body))


def _death(rank: _Rank) -> RocmDpError:
    code = rank.process.exitcode
    if code == _UNGUARDED and not rank.said_hello:
        return ConfigError(
            "the main script starts ranks while it is being imported, and each rank imports it to find its "
            'functions: put that code under `if __name__ == "__main__":`'
        )
    error = RankFailedError(rank.index, code)
    if not rank.said_hello:
        error.__cause__ = RocmDpError("it died while importing the main script or torch: see its stderr")
    return error


def _revive(rank: int, failure: Failure) -> BaseException:
    error: BaseException = RocmDpError(f"rank {rank}: {failure.summary}")
    if failure.error is not None:
        with contextlib.suppress(Exception):
            error = revive(failure.error)
    if isinstance(error, (SystemExit, KeyboardInterrupt, GeneratorExit)):
        # Raised here, it would end the caller's own process, sys.exit(0) even with success.
        error = RocmDpError(f"rank {rank} was left by {error!r}")
    error.__cause__ = RankTraceback(rank, failure.trace)
    return error


def _overdue(missing: Sequence[_Rank], world_size: int, timeout: float) -> str:
    names = ", ".join(str(rank.index) for rank in missing)
    stacks = [f"rank {index} stood at:\n{text}" for index, text in _stacks(missing).items()]
    return "\n".join([f"no answer in {timeout:g} s from rank {names} (of {world_size})", *stacks])


def _stacks(ranks: Sequence[_Rank]) -> dict[int, str]:
    """Where each of ``ranks`` stands: the Python stacks of all its threads, as faulthandler prints them."""
    texts = {rank.index: b"" for rank in ranks}
    asked = [rank for rank in ranks if rank.said_hello and rank.process.exitcode is None]
    for rank in asked:  # Before its hello the signal would kill it.
        os.kill(rank.process.pid or 0, signal.SIGUSR1)
    deadline = time.monotonic() + STACK_TIMEOUT
    while asked:
        # The text has no end mark: it is whole when nothing more comes for a while.
        left = max(0.0, deadline - time.monotonic())
        whole = all(texts[rank.index] for rank in asked)
        ready = wait([rank.stacks for rank in asked], min(left, 0.2) if whole else left)
        if not ready or not left:
            break
        for rank in [rank for rank in asked if rank.stacks in ready]:
            chunk = os.read(rank.stacks.fileno(), 65536)
            texts[rank.index] += chunk
            if not chunk:
                asked.remove(rank)
    return {rank.index: texts[rank.index].decode(errors="replace") or _no_stack(rank) for rank in ranks}


def _no_stack(rank: _Rank) -> str:
    why = "it does not react" if rank.said_hello else "it was still importing the main script or torch"
    return f"  (no stack: {why})"
