"""Tensors over memory that torch did not allocate: shared, given back once, and nothing kept of them."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from rocm_dp.memory import raw
from rocm_dp.memory.raw import as_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
NBYTES = 64


def memory() -> tuple[ctypes.Array[ctypes.c_uint8], int]:
    made = (ctypes.c_uint8 * NBYTES)(*range(NBYTES))
    return made, ctypes.addressof(made)


def test_a_tensor_shares_the_memory_and_both_ways() -> None:
    own, address = memory()
    tensor = as_tensor(address, NBYTES, CPU, lambda: None)
    assert (tensor.dtype, tensor.shape, tensor.data_ptr()) == (torch.uint8, (NBYTES,), address)
    assert tensor.tolist() == list(range(NBYTES))
    tensor[3] = 77
    assert own[3] == 77


def test_memory_is_released_once_and_with_the_last_view_of_it() -> None:
    released: list[str] = []
    own, address = memory()
    tensor = as_tensor(address, NBYTES, CPU, lambda: released.append("once"))
    view = tensor[8:16].view(torch.int64)
    del tensor
    assert released == []
    assert view.item() == int.from_bytes(bytes(own[8:16]), "little")
    del view
    assert released == ["once"]


def test_the_last_view_may_go_on_any_thread() -> None:
    threads: list[int] = []
    _own, address = memory()
    held = [as_tensor(address, NBYTES, CPU, lambda: threads.append(threading.get_ident()))]
    last = threading.Thread(target=held.clear)
    last.start()
    last.join()
    assert threads == [last.ident]


def blocks_of(make: Callable[[], object], times: int) -> int:
    """How many blocks of Python's allocator are left of so many calls."""
    for _ in range(100):
        make()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(times):
        make()
    gc.collect()
    return sys.getallocatedblocks() - before


def test_ten_thousand_tensors_leave_nothing() -> None:
    _own, address = memory()
    assert blocks_of(lambda: as_tensor(address, NBYTES, CPU, lambda: None), 10_000) < 100


def test_what_keeps_a_number_for_each_would_be_seen() -> None:
    _own, address = memory()
    kept = []

    def make() -> None:
        kept.append((as_tensor(address, NBYTES, CPU, lambda: None).data_ptr(),))

    assert blocks_of(make, 1000) > 900


@pytest.mark.parametrize("taken", [False, True])
def test_after_an_error_nothing_is_released_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, *, taken: bool
) -> None:
    _own, address = memory()

    def refuses(capsule: object) -> None:
        if taken:
            torch.utils.dlpack.from_dlpack(capsule)
        raise RuntimeError("not today")

    monkeypatch.setattr(raw, "from_dlpack", refuses)
    released: list[str] = []

    def make() -> None:
        with pytest.raises(RuntimeError, match="not today"):
            as_tensor(address, NBYTES, CPU, lambda: released.append("wrongly"))

    assert blocks_of(make, 1000) < 100
    assert not released


@pytest.mark.parametrize(("hip", "number"), [(False, 2), (True, 10)])
def test_a_gpu_has_the_number_that_its_torch_expects(
    monkeypatch: pytest.MonkeyPatch, *, hip: bool, number: int
) -> None:
    monkeypatch.setattr(raw, "_HIP", hip)
    assert raw._device_type(torch.device("cuda", 1)) == number


AT_EXIT = """
import ctypes, torch
from rocm_dp.memory.raw import as_tensor
own = (ctypes.c_uint8 * 64)()
torch.kept = as_tensor(ctypes.addressof(own), 64, torch.device("cpu"), lambda: print("released"))
print("end")
"""


def test_a_process_may_end_with_a_tensor_alive_and_then_nothing_is_released() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
