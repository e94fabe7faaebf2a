"""The rank's side of :mod:`rocm_dp.testing`: what runs in each process, and what it says to the parent.

Every message is two frames on the rank's pipe, a kind and a body of plain pickle bytes. multiprocessing's
own pickler is not used: torch has taught it to pass tensors by shared memory, which outlives a killed rank.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import types
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rocm_dp.errors import ConfigError, RocmDpError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

HELLO, READY, NOTE, RESULT, FAILURE = b"hello", b"ready", b"note", b"result", b"failure"
STOP = b""

# Public, but torch has no type for it here.
TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]

_PR_SET_PDEATHSIG = 1
# The parent alone decides when a case takes too long: it can name the rank that hangs, a collective can't.
_NO_TIMEOUT = timedelta(days=1)
_ECHOES = ("closed by peer", "reset by peer", "connection refused", "broken pipe", "remote process exited")


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


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way to the parent.

    ``stamp`` is CLOCK_MONOTONIC in ns. ``echo`` is true of errors that look like the consequence of another
    rank's failure. ``error`` is what :func:`revive` reads, or None if the exception can't travel.
    """

    stamp: int
    echo: bool
    summary: str
    trace: str
    error: bytes | None


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


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type == "cuda":
            # Unpickled as it is, it would start the GPU in the parent.
            plain: Any = obj.detach().cpu()
            return plain.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, type) and obj.__module__ == "builtins":
            # pytest's outcomes say that they live in builtins, where pickle doesn't find them.
            name = obj.__name__
            if getattr(sys.modules.get("_pytest.outcomes"), name, None) is obj:
                return _outcome, (name,)
        return NotImplemented


def _outcome(name: str) -> Any:
    return getattr(importlib.import_module("_pytest.outcomes"), name)


def dumps(obj: object) -> bytes:
    """Plain pickle bytes; GPU tensors become CPU tensors, pytest's outcomes are found again."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(obj)
    return buffer.getvalue()


def encode_case(fn: Callable[..., object], args: tuple[object, ...]) -> bytes:
    """One case as bytes: where ``fn``'s module lies, and the pickled call. ConfigError if it can't travel."""
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    module = str(getattr(inner, "__module__", None))
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" and file is None:
        where = "an interactive session, or of a script that has run to its end"
        raise ConfigError(f"fn must stand in a file that the ranks can import, got {fn!r} of {where}")
    try:
        dumps(fn)
    except Exception as error:
        raise ConfigError(
            f"fn must be a function at the top of a module, got {fn!r}: "
            f"a lambda or a function inside another can't reach the ranks ({error})"
        ) from error
    try:
        payload = dumps((fn, args))
    except Exception as error:
        kinds = ", ".join(type(arg).__name__ for arg in args)
        raise ConfigError(f"args must be picklable to reach the ranks, got ({kinds}): {error}") from error
    return pickle.dumps((module, file, payload))


def revive(data: bytes) -> BaseException:
    """The exception that :func:`pack_error` packed. Raises whatever its own unpickling raises."""
    loaded = pickle.loads(data)
    if not isinstance(loaded, tuple):
        error: BaseException = loaded
        return error
    cls, args, state = loaded
    rebuilt: BaseException = cls.__new__(cls, *args)
    rebuilt.__dict__.update(state)
    return rebuilt


def pack_error(error: BaseException) -> bytes | None:
    """``error`` as bytes that come back with its type and text, or None if there are none."""
    # An exception whose __init__ hands other arguments to super() than it takes comes back only by its parts.
    for form in (error, (type(error), error.args, error.__dict__)):
        try:
            data = dumps(form)
            again = revive(data)
            if type(again) is type(error) and str(again) == str(error):
                return data
        except Exception:  # Whatever pickle raises, this form can't travel.
            continue
    return None


def _failure(error: BaseException) -> Failure:
    stamp = time.monotonic_ns()
    text = f"{error}".lower() if isinstance(error, RuntimeError) else ""
    echo = isinstance(error, (dist.DistError, ConnectionError)) or any(sign in text for sign in _ECHOES)
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    return Failure(stamp, echo, summary, "".join(traceback.format_exception(error)), pack_error(error))


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
        # A quarter of a rank's time went into looking through all of torch for garbage at its end.
        gc.freeze()


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
        link.send(FAILURE, dumps(_failure(error)))
        return False
    link.send(READY)
    return True


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_case(link: Link, case: bytes) -> None:
    try:
        module, file, payload = pickle.loads(case)
        if file is not None:
            ensure_importable(module, file)
        fn, args = pickle.loads(payload)
        result = fn(link.spec.rank, *args)
    except BaseException as error:
        link.send(FAILURE, dumps(_failure(error)))
        return
    try:
        body = dumps(result)
    except Exception as error:
        what = f"rank {link.spec.rank} returned a {type(result).__name__} that can't be pickled: {error}"
        link.send(FAILURE, dumps(_failure(RocmDpError(what))))
        return
    link.send(RESULT, body)


def ensure_importable(name: str, file: str) -> None:
    """Makes ``import name`` give the module in ``file``, also where no entry of sys.path leads to it.

    pytest's importlib mode names modules by their place in the repository, which need not be on sys.path.
    """
    if name in sys.modules:
        return
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not None and found.origin and Path(found.origin).resolve() == Path(file).resolve():
        return
    _add_missing_parents(name, Path(file))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"module {name} can't be loaded from {file}", name=name, path=file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _add_missing_parents(name: str, file: Path) -> None:
    # pickle asks for a.b.c by importing a first.
    folder = file.parent if file.name != "__init__.py" else file.parent.parent
    while "." in name:
        name = name.rpartition(".")[0]
        if name not in sys.modules:
            parent = types.ModuleType(name)
            parent.__path__ = [str(folder)]
            sys.modules[name] = parent
        folder = folder.parent
