"""What the ranks of test_testing.py run from a module of its own: the errors and deaths."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

from rocm_dp.errors import TraceError


class PickyError(Exception):
    """Its __init__ doesn't take what it hands on, so pickle can't make it again by itself."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank, self.reason = rank, reason


class SealedError(Exception):
    def __reduce__(self) -> NoReturn:
        raise TypeError("sealed")


class LockedError(Exception):
    """Holds what no pickle can."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class OnlyThereError(Exception):
    """Comes back from pickle on a rank, never in the parent."""

    def __reduce__(self) -> tuple[object, tuple[int, str]]:
        return only_in, (os.getpid(), str(self))


def only_in(pid: int, text: str) -> OnlyThereError:
    if os.getpid() != pid:
        raise OSError("not here")
    return OnlyThereError(text)


def wait_for_all(rank: int) -> None:
    dist.all_reduce(torch.ones(1))


def fail_while_others_wait(rank: int, bad: int) -> None:
    if rank == bad:
        raise KeyError("first", 17)
    wait_for_all(rank)


def fail_after_closing(rank: int, bad: int) -> None:
    if rank == bad:
        try:
            raise LookupError("the cause")
        finally:
            dist.destroy_process_group()
            time.sleep(1)
    wait_for_all(rank)


def fail_in_turn(rank: int) -> None:
    dist.barrier()  # they come here as late as their imports take
    time.sleep(0.3 if rank == 0 else 0)
    raise ValueError(f"from {rank}")


def raise_picky(rank: int) -> None:
    raise PickyError(rank, "picky")


def raise_trace_error(rank: int) -> None:
    raise TraceError("requests.jsonl", 3, "no counts")


def raise_sealed(rank: int) -> None:
    raise SealedError("what it says")


def raise_locked(rank: int) -> None:
    raise LockedError("what it says")


def raise_only_there(rank: int) -> None:
    raise OnlyThereError("what it says")


def exit_quietly(rank: int) -> None:
    sys.exit(0)


def interrupt(rank: int) -> None:
    raise KeyboardInterrupt


def skip(rank: int) -> None:
    pytest.skip("not on this machine")


def fail_outright(rank: int) -> None:
    pytest.fail("no good", pytrace=False)


def return_lock(rank: int) -> object:
    return threading.Lock() if rank == 1 else None


def kill_itself(rank: int, bad: int) -> None:
    if rank == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_all(rank)


def leave_at_once(rank: int, bad: int) -> None:
    if rank == bad:
        os._exit(7)
    wait_for_all(rank)


def sleep_in_here(rank: int, bad: int) -> None:
    if rank == bad:
        time.sleep(600)


def stop_itself(rank: int, bad: int) -> None:
    if rank == bad:
        os.kill(os.getpid(), signal.SIGSTOP)
