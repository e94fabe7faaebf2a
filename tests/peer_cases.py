"""What ranks do with each other's memory, and how they part."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from rocm_dp import Groups, RankLayout
from rocm_dp.control import Op
from rocm_dp.errors import PeerRefusedError
from rocm_dp.memory import peer
from rocm_dp.memory.peer import PeerBuffer
from rocm_dp.memory.raw import as_tensor
from rocm_dp.testing import note, rank_device

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

NBYTES = 4096


def seen(buffer: PeerBuffer, rank: int) -> torch.Tensor:
    """The memory of ``rank`` through this process's mapping of it."""
    address = int(buffer.addresses[rank])
    if buffer.tensor.is_cuda:
        return as_tensor(address, NBYTES, buffer.tensor.device)[0]
    return torch.frombuffer((ctypes.c_uint8 * NBYTES).from_address(address), dtype=torch.uint8)


def groups_of(rank: int, world: int, timeout: float = 30.0) -> Groups:
    return Groups.create(RankLayout(rank, world, world), timeout=timedelta(seconds=timeout))


def everyone_writes_to_everyone(rank: int, world: int, rounds: int) -> list[int]:
    """Each rank writes its number into its own place of every rank's memory; the descriptors before and after."""
    counted = []
    with groups_of(rank, world) as groups:
        for number in range(rounds):
            counted.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208 - by the kernel's own list
            with PeerBuffer(NBYTES, groups=groups, device=rank_device(), uncached=bool(number % 2)) as buffer:
                assert not buffer.tensor.any(), "peer memory must start as zeros"
                groups.control.call(Op.CONFIRM, {})
                assert len(buffer.addresses) == world
                assert int(buffer.addresses[rank]) == buffer.tensor.data_ptr()
                for other in range(world):
                    seen(buffer, other)[rank * 8 : rank * 8 + 8] = 10 + rank
                if buffer.tensor.is_cuda:
                    torch.cuda.synchronize()
                groups.control.call(Op.CONFIRM, {})
                want = torch.arange(10, 10 + world, dtype=torch.uint8).repeat_interleave(8)
                for other in range(world):
                    assert torch.equal(seen(buffer, other)[: world * 8].cpu(), want), (
                        f"rank {other} holds other bytes"
                    )
                groups.control.call(Op.CONFIRM, {})
    return counted


def refused(rank: int, world: int, why: str) -> str:
    """Rank 1 can't take part; every rank is told why, and all can share memory afterwards."""
    breaks: dict[str, AbstractContextManager[object]] = {
        "memory": patch.object(peer, "_offer", lambda *_, **__: (None, "no memory left")),
        "host": patch.object(peer, "host_id", lambda: 0x1234),
        "handle": patch.object(
            peer.SharedProvider, "open", lambda *_: (_ for _ in ()).throw(PeerRefusedError("stale"))
        ),
        "size": nullcontext(),
    }
    said = ""
    with groups_of(rank, world) as groups:
        nbytes = NBYTES * 2 if why == "size" and rank == 1 else NBYTES
        try:
            if rank == 1:
                with breaks[why]:
                    PeerBuffer(nbytes, groups=groups, device=rank_device())
            else:
                PeerBuffer(nbytes, groups=groups, device=rank_device())
        except PeerRefusedError as error:
            said = str(error)
        with PeerBuffer(NBYTES, groups=groups, device=rank_device()):
            return said


def a_rank_dies(rank: int, world: int) -> None:
    """Rank 1 is killed while its memory is mapped everywhere; the others close without it, in bounded time."""
    groups = groups_of(rank, world, timeout=3.0)
    buffer = PeerBuffer(NBYTES, groups=groups, device=rank_device())
    groups.control.call(Op.CONFIRM, {})
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    # The memory of the dead is still there for those who map it.
    assert int(seen(buffer, 1).sum()) == 0
    start = time.monotonic()
    buffer.close()
    buffer.close()
    note((rank, time.monotonic() - start, mapped()))


def mapped() -> int:
    """Mappings of peer memory in this process."""
    return Path("/proc/self/maps").read_text().count("rocm_dp-peer")


def mappings(rank: int, world: int) -> tuple[int, int]:
    """Mappings of peer memory while a buffer is open, and after."""
    with groups_of(rank, world) as groups:
        with PeerBuffer(NBYTES, groups=groups, device=rank_device()):
            during = mapped()
        return during, mapped()
