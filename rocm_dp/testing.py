"""Run code on several ranks from one ordinary process, as tests do.

::

    def total(rank: int, scale: int) -> float:              # at the top of a module
        mine = torch.full((1,), float(rank * scale), device=rank_device())
        torch.distributed.all_reduce(mine)
        return mine.item()

    assert run_ranks(total, 2, 10) == [10.0, 10.0]

    with RankPool(2) as pool:                               # the ranks start once and stay alive
        for scale in (1, 2, 3):
            assert pool.run(total, scale) == [scale, scale]

A script that does so keeps it under ``if __name__ == "__main__":``, since every rank imports the script.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rocm_dp import testing_worker as worker
from rocm_dp.errors import ClosedError, ConfigError, RocmDpError
from rocm_dp.testing_crew import START_TIMEOUT, Crew, RankTraceback, Round
from rocm_dp.testing_pickle import decode, encode_case
from rocm_dp.testing_worker import note, rank_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["RankPool", "RankTraceback", "note", "rank_device", "run_ranks"]

T = TypeVar("T")


def run_ranks(
    fn: Callable[..., T], world_size: int, *args: object, backend: str | None = None, timeout: float = 60.0
) -> list[T]:
    """Runs ``fn(rank, *args)`` in ``world_size`` processes; the results, listed by rank.

    A :class:`RankPool` that is used once: see there for ``backend``, ``timeout`` (seconds) and the errors.
    """
    case = encode_case(fn, args)
    with RankPool(world_size, backend=backend, timeout=timeout) as pool:
        return pool._run(case, timeout, None)


class RankPool:
    """``world_size`` processes with torch.distributed ready, one a rank, that stay alive for many cases.

    ``backend`` is "nccl" (rank i on GPU i) or "gloo"; None is nccl where there are GPUs enough, else gloo.
    ``timeout`` is the seconds that a case may take, unless its ``run`` says otherwise; the start of the
    ranks has its own bound, ``START_TIMEOUT``. ``env``: environment variables that the ranks have beside ours from
    their first instruction on, as runtimes read theirs early; while they are started this process has them too.

    Raises ConfigError for arguments that can't be right and for a main script that the ranks can't import,
    RankFailedError for a rank that dies while starting, TimeoutError for one that does not come, and what
    the rank raised if it can't join the process group.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str | None = None,
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._timeout = _check_timeout(timeout)
        env = _check_env(env)
        _check_main()
        self.world_size = _check_world_size(world_size)
        self.backend = _choose_backend(backend, world_size)
        self._busy = threading.Lock()
        self._fault: str | None = None
        self._closed = False
        self._crew = Crew()
        # weakref.finalize would come after multiprocessing's join of its children at exit, and run in forks.
        self._finalizer = Finalize(self, self._crew.end, exitpriority=100)
        with self._ending_on_error("its start"):
            with _environment(env):
                self._crew.start(self.world_size, self.backend)
            Round(self._crew.ranks, worker.READY).collect(START_TIMEOUT)

    @property
    def broken(self) -> bool:
        """True after an error: the ranks have been ended, and ``run`` only raises."""
        return self._fault is not None

    def run(
        self,
        fn: Callable[..., T],
        *args: object,
        timeout: float | None = None,
        on_note: Callable[[int, Any], object] | None = None,
    ) -> list[T]:
        """Runs ``fn(rank, *args)`` on every rank; the results, listed by rank.

        ``fn`` stands at the top of a module. ``args`` and results travel as plain pickles, and tensors
        arrive on the CPU. ``timeout`` is in seconds; ``on_note(rank, obj)`` is called here for each
        ``note(obj)`` of a rank.

        Raises the first real error of any rank, with a RankTraceback as its cause; RocmDpError in its place
        if it can't be pickled or is a SystemExit or KeyboardInterrupt; RankFailedError if a rank dies;
        TimeoutError with the stacks of the ranks that have not answered. Any of these ends the ranks.
        ConfigError (``fn`` or ``args`` that can't reach the ranks) and ClosedError leave them as they are.
        """
        seconds = self._timeout if timeout is None else _check_timeout(timeout)
        return self._run(encode_case(fn, args), seconds, on_note)

    def _run(self, case: bytes, timeout: float, on_note: Callable[[int, Any], object] | None) -> list[Any]:
        if self._closed:
            raise ClosedError("this RankPool was closed")
        if self._fault is not None:
            raise RocmDpError(f"this RankPool is broken: its ranks were ended after {self._fault}")
        if not self._busy.acquire(blocking=False):
            raise RocmDpError("this RankPool is running a case; one at a time")
        try:
            with self._ending_on_error("a case"):
                self._crew.feed(case)
                answers = Round(self._crew.ranks, worker.RESULT, on_note).collect(timeout)
                return [decode(rank, answers[rank]) for rank in range(self.world_size)]
        finally:
            self._busy.release()

    @contextlib.contextmanager
    def _ending_on_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._fault = f"{what} raised {type(error).__name__}"
            self._finalizer()
            raise

    def close(self) -> None:
        """Lets the ranks leave, and ends those that don't. Never raises for a broken or closed pool."""
        if not self._closed:
            self._closed = True
            try:
                self._crew.stop()
            finally:
                self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """Have ``extra`` in the environment, which processes started meanwhile inherit."""
    before = {name: os.environ.get(name) for name in extra}
    try:
        os.environ.update(extra)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _check_env(env: Mapping[str, str] | None) -> dict[str, str]:
    found = dict(env or {})
    for name, value in found.items():
        if (
            not isinstance(name, str)
            or not isinstance(value, str)
            or not name
            or "=" in name
            or "\0" in name + value
        ):
            raise ConfigError(f"env must map names of environment variables to text, got {name!r}: {value!r}")
    return found


def _check_main() -> None:
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is not None and path.startswith("<") and getattr(main, "__spec__", None) is None:
        raise ConfigError(f"the main script must be a file, which the ranks import, got {path}")


def _check_world_size(world_size: int) -> int:
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise ConfigError(f"world_size must be an int of at least 1, got {world_size!r}")
    return world_size


def _check_timeout(timeout: float) -> float:
    if not isinstance(timeout, (int, float)) or math.isnan(timeout) or timeout <= 0:
        raise ConfigError(f"timeout must be a number of seconds above 0, got {timeout!r}")
    return timeout


def _choose_backend(backend: str | None, world_size: int) -> str:
    if backend == "gloo":
        return backend
    if backend not in (None, "nccl"):
        raise ConfigError(f'backend must be "nccl", "gloo" or None, got {backend!r}')
    gpus = torch.cuda.device_count()
    if backend == "nccl" and gpus < world_size:
        raise ConfigError(f"backend nccl needs a GPU for each rank: {world_size} ranks, but {gpus} GPUs")
    return "nccl" if gpus >= world_size else "gloo"
