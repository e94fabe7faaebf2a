"""Memory of a CPU rank that other ranks of the machine can map: anonymous, so that nothing can be left behind."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import torch

from rocm_dp.errors import PeerRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAME = "rocm_dp-peer"


class SharedMemory:
    """Memory that this process made (``memfd_create``): no name, no file, gone with the last process that maps it.

    ``words``: what another process of this user needs to map it: process, file descriptor, inode.
    """

    def __init__(self, nbytes: int) -> None:
        try:
            self._fd = os.memfd_create(_NAME)
        except (AttributeError, OSError) as error:
            raise PeerRefusedError(f"no anonymous shared memory here ({error})") from error
        try:
            os.ftruncate(self._fd, nbytes)
            self.tensor = _mapped(self._fd, nbytes)
            self.words = (os.getpid(), self._fd, os.fstat(self._fd).st_ino)
        except BaseException as error:
            self.close()
            if isinstance(error, (OSError, ValueError)):
                raise PeerRefusedError(f"{nbytes} bytes of shared memory can't be had ({error})") from error
            raise

    def close(self) -> None:
        """Give up the descriptor; the memory goes when the last tensor over it does."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_shared(words: Sequence[int], nbytes: int) -> torch.Tensor:
    """Map what another process described by ``words``; PeerRefusedError when it isn't what it was."""
    process, descriptor, inode = words[:3]
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise PeerRefusedError(f"the memory of process {process} can't be opened ({error})") from error
    try:
        found = os.fstat(fd)
        if (found.st_ino, found.st_size) != (inode, nbytes):
            raise PeerRefusedError(
                f"process {process} shows inode {found.st_ino} of {found.st_size} bytes, not {inode} of {nbytes}"
            )
        return _mapped(fd, nbytes)
    finally:
        os.close(fd)


def _mapped(fd: int, nbytes: int) -> torch.Tensor:
    # The mapping holds no descriptor and lives as long as the tensor.
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
