"""How cases, results and errors travel between a pool and its ranks: as plain pickle bytes.

multiprocessing's own pickler is not used: torch has taught it to pass tensors by shared memory, which outlives a
killed rank.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import pickle
import sys
import time
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rocm_dp.errors import ConfigError, RocmDpError

if TYPE_CHECKING:
    from collections.abc import Callable

_ECHOES = ("closed by peer", "reset by peer", "connection refused", "broken pipe", "remote process exited")


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


def decode(rank: int, body: bytes) -> Any:
    """Unpickle what ``rank`` sent; RocmDpError when that fails here."""
    try:
        return pickle.loads(body)
    except Exception as error:
        raise RocmDpError(f"what rank {rank} sent can't be unpickled here: {error!r}") from error


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


def decode_case(case: bytes) -> tuple[Callable[..., object], tuple[object, ...]]:
    """The function and arguments of :func:`encode_case`; raises what importing or unpickling them raises."""
    module, file, payload = pickle.loads(case)
    if file is not None:
        _ensure_importable(module, file)
    fn, args = pickle.loads(payload)
    return fn, args


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


def failure_of(error: BaseException) -> Failure:
    """``error``, as it is raised now, on its way to the parent."""
    stamp = time.monotonic_ns()
    text = f"{error}".lower() if isinstance(error, RuntimeError) else ""
    echo = isinstance(error, (dist.DistError, ConnectionError)) or any(sign in text for sign in _ECHOES)
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    return Failure(stamp, echo, summary, "".join(traceback.format_exception(error)), pack_error(error))


def _ensure_importable(name: str, file: str) -> None:
    """Make ``import name`` give the module in ``file``, also where no entry of sys.path leads to it.

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
