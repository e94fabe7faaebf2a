"""The rank's side of :mod:`rocm_dp.testing`: what runs in each process, and what it says to the parent.

Every message is two frames on the rank's pipe, a kind and a body of plain pickle bytes.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import threading
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rocm_dp.errors import RocmDpError
from rocm_dp.testing_pickle import decode_case, dumps, failure_of

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

HELLO, READY, NOTE, RESULT, FAILURE = b"hello", b"ready", b"note", b"result", b"failure"
STOP = b""

# Public, but torch has no type for it here.
TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]

_PR_SET_PDEATHSIG = 1
# The parent alone decides when a case takes too long: it can name the rank that hangs, a collective can't.
_NO_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What one rank must know to join: ``port`` is the parent's store, ``start_timeout`` is in seconds."""

    rank: int
    world_size: int
    backend: str
    port: int
    start_timeout: float
    parent_pid: int
    # PR_SET_PDEATHSIG fires when the *thread* that started us ends: only the main one lives long enough.
    from_main_thread: bool

    @property
    def device(self) -> torch.device:
        """``cuda:<rank>`` under nccl, else ``cpu``."""
        return torch.device("cuda", self.rank) if self.backend == "nccl" else torch.device("cpu")


class Link:
    """The rank's end of the pipe; any thread of the rank may send."""

    def __init__(self, spec: RankSpec, conn: Connection) -> None:
        self.spec, self._conn, self._lock = spec, conn, threading.Lock()

    def send(self, kind: bytes, body: bytes = b"") -> None:
        """Sends one message whole. Raises OSError once the parent is gone."""
        with self._lock:
            self._conn.send_bytes(kind)
            self._conn.send_bytes(body)

    def receive(self) -> bytes:
        """The next case. Raises EOFError once the parent is gone."""
        return self._conn.recv_bytes()


# note() is called from code that knows of no link.
_LINK: ContextVar[Link] = ContextVar("rocm_dp.testing.link")


def note(obj: object) -> None:
    """Sends ``obj`` from inside a rank to the parent's ``on_note(rank, obj)`` while the case runs.

    Raises RocmDpError outside a rank, and what pickle raises if ``obj`` can't be pickled.
    """
    _here().send(NOTE, dumps(obj))


def rank_device() -> torch.device:
    """This rank's device: ``cuda:<rank>`` under nccl, else ``cpu``. Raises RocmDpError outside a rank."""
    return _here().spec.device


def _here() -> Link:
    try:
        return _LINK.get()
    except LookupError:
        what = "note() and rank_device() are for the thread in which run_ranks or a RankPool runs a rank's code"
        raise RocmDpError(what) from None


def main(spec: RankSpec, conn: Connection, stacks: Connection) -> None:
    """One rank, from its start to the parent's STOP."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _end_with_parent(spec)
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=True)
    link = Link(spec, conn)
    _LINK.set(link)
    try:
        link.send(HELLO)
        if _join(link):
            while (case := link.receive()) != STOP:
                _run_case(link, case)
        else:
            link.receive()
    except (EOFError, ConnectionError):
        return  # The parent has gone, and its reason is not ours to tell.
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _end_with_parent(spec: RankSpec) -> None:
    if sys.platform == "linux" and spec.from_main_thread:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != spec.parent_pid:
            os._exit(1)
    else:
        threading.Thread(target=_watch_parent, name="rocm_dp-watch-parent", daemon=True).start()


def _watch_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _join(link: Link) -> bool:
    spec = link.spec
    try:
        torch.set_num_threads(max(1, _cores() // spec.world_size))
        loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
        if loopback:  # Gloo else looks up the host's name, which many containers can't resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        limit = timedelta(seconds=spec.start_timeout)
        store = TCPStore("127.0.0.1", spec.port, is_master=False, timeout=limit)
        device = spec.device if spec.backend == "nccl" else None
        if device is not None:
            torch.cuda.set_device(device)
        dist.init_process_group(
            spec.backend,
            store=store,
            rank=spec.rank,
            world_size=spec.world_size,
            timeout=_NO_TIMEOUT,
            device_id=device,
        )
    except BaseException as error:
        link.send(FAILURE, dumps(failure_of(error)))
        return False
    link.send(READY)
    return True


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_case(link: Link, case: bytes) -> None:
    try:
        fn, args = decode_case(case)
        result = fn(link.spec.rank, *args)
    except BaseException as error:
        link.send(FAILURE, dumps(failure_of(error)))
        return
    try:
        body = dumps(result)
    except Exception as error:
        what = f"rank {link.spec.rank} returned a {type(result).__name__} that can't be pickled: {error}"
        link.send(FAILURE, dumps(failure_of(RocmDpError(what))))
        return
    link.send(RESULT, body)
