"""What the allocators of C and Python have handed out: leaks of native code, whatever they keep for later."""

from __future__ import annotations

import ctypes
import sys

from rocm_dp.soak.sample import AbsentError

ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""The environment of ranks in which ``rss`` tells of leaks alone.

Threads of gloo free what others allocate. With an arena for each, those fall to pieces for hours while
``heap.used`` is flat: see docs/soak.md.
"""
FEW_RECORDS = {"TORCH_FR_BUFFER_SIZE": "64"}
"""The environment of ranks in which torch.distributed keeps its last 64 collectives on record.

Of itself it keeps 2000 (2.4 MB), and until they are full, for some 700 steps, every step looks like a leak.
"""
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Mallinfo2(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS.split())  # of <malloc.h>


class HeapSampler:
    """``heap.used``: bytes allocated and not freed, in all arenas and by mmap (glibc 2.33 and newer)."""

    name = "heap"

    def __init__(self) -> None:
        try:
            self._ask = ctypes.CDLL(None).mallinfo2
        except AttributeError as error:
            raise AbsentError("the C library has no mallinfo2") from error
        self._ask.restype = _Mallinfo2

    def read(self) -> dict[str, float]:
        """Ask the allocator."""
        found = self._ask()
        return {"heap.used": float(found.uordblks + found.hblkhd)}


class BlockSampler:
    """``heap.blocks``: blocks in use of Python's own allocator.

    Numbers and strings lie there too, which its collector does not track: a reference that an extension forgets to
    give back shows here long before it does in ``rss``.
    """

    name = "blocks"

    def __init__(self) -> None:
        if not sys.getallocatedblocks():
            raise AbsentError("Python's allocator is not in use (PYTHONMALLOC)")

    def read(self) -> dict[str, float]:
        """Ask the allocator."""
        return {"heap.blocks": float(sys.getallocatedblocks())}
