"""Tensors over memory that torch did not allocate: shared, given back once, and nothing kept of them."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from rocm_dp.memory import raw
from rocm_dp.memory.raw import as_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CPU = torch.device("cpu")
NBYTES = 64


Made = tuple["Callable[[], torch.Tensor]", list[str]]


@pytest.fixture
def memory() -> ctypes.Array[ctypes.c_uint8]:
    return (ctypes.c_uint8 * NBYTES)(*range(NBYTES))


@pytest.fixture
def made(memory: ctypes.Array[ctypes.c_uint8]) -> Iterator[Made]:
    """A function that makes a tensor, and what was released so far."""
    released: list[str] = []

    def make() -> torch.Tensor:
        tensor, owner = as_tensor(ctypes.addressof(memory), NBYTES, CPU)
        weakref.finalize(owner, released.append, "once").atexit = False
        return tensor

    yield make, released
    gc.collect()


def test_a_tensor_shares_the_memory_both_ways(memory: ctypes.Array[ctypes.c_uint8]) -> None:
    tensor, _ = as_tensor(ctypes.addressof(memory), NBYTES, CPU)
    assert (tensor.dtype, tensor.shape, tensor.device) == (torch.uint8, (NBYTES,), CPU)
    assert tensor.data_ptr() == ctypes.addressof(memory)
    assert tensor.untyped_storage().nbytes() == NBYTES
    assert tensor.tolist() == list(range(NBYTES))
    tensor[3] = 77
    assert memory[3] == 77


def test_the_owner_goes_once_and_with_the_last_view(made: Made) -> None:
    make, released = made
    view = make()[8:16].view(torch.int64)
    assert released == []
    assert view.item() == int.from_bytes(bytes(range(8, 16)), "little")
    del view
    assert released == ["once"]


def test_the_last_view_may_go_on_any_thread(made: Made) -> None:
    make, released = made
    held = [make()]
    last = threading.Thread(target=held.clear)
    last.start()
    last.join()
    assert released == ["once"]


def boom() -> torch.Tensor:
    raise ValueError("the user's")


def generator(make: Callable[[], torch.Tensor]) -> Iterator[torch.Tensor]:
    yield make()
    yield boom()


DROPS: dict[str, Callable[[Callable[[], torch.Tensor]], object]] = {
    "temporary": lambda make: make() + boom(),
    "argument": lambda make: torch.add(make(), boom()),
    "view": lambda make: make()[8:16].view(torch.int64) + boom(),
    "list": lambda make: list(generator(make)),
    "dict": lambda make: {1: make(), 2: boom()},
}


@pytest.mark.parametrize("how", DROPS)
def test_an_error_on_its_way_comes_through_when_the_last_view_goes(made: Made, how: str) -> None:
    make, released = made
    for _ in range(100):
        with pytest.raises(ValueError, match="the user's"):
            DROPS[how](make)
    gc.collect()
    assert released == ["once"] * 100


def test_an_error_of_torch_comes_through_when_the_last_view_goes(made: Made) -> None:
    make, released = made
    for _ in range(100):
        with pytest.raises(RuntimeError, match="invalid for input"):
            make().reshape(7, 7)
        with pytest.raises(IndexError):
            make()[100]
    gc.collect()
    assert released == ["once"] * 200


def blocks_of(make: Callable[[int], object], times: int) -> int:
    """How many blocks of Python's allocator are left of so many calls."""
    for number in range(100):
        make(number)
    gc.collect()
    before = sys.getallocatedblocks()
    for number in range(times):
        make(number)
    gc.collect()
    return sys.getallocatedblocks() - before


def test_ten_thousand_tensors_of_any_size_leave_nothing() -> None:
    own = (ctypes.c_uint8 * 10_000)()
    assert blocks_of(lambda number: as_tensor(ctypes.addressof(own), 1 + number, CPU), 10_000) < 100


def test_a_number_kept_of_each_would_be_seen(memory: ctypes.Array[ctypes.c_uint8]) -> None:
    kept = []

    def make(_: int) -> None:
        kept.append((as_tensor(ctypes.addressof(memory), NBYTES, CPU)[0].data_ptr(),))

    assert blocks_of(make, 1000) > 900


@pytest.mark.skipif(bool(torch.version.cuda or torch.version.hip), reason="this torch asks the driver first")
def test_memory_of_a_gpu_is_taken_for_that_and_not_touched_before() -> None:
    with pytest.raises(AssertionError, match="CUDA"):
        as_tensor(4096, NBYTES, torch.device("cuda", 0))


def test_a_gpu_must_be_named() -> None:
    with pytest.raises(AssertionError, match="which GPU"):
        as_tensor(4096, NBYTES, torch.device("cuda"))


@pytest.mark.parametrize("taken", [False, True])
def test_when_torch_refuses_nothing_is_kept(
    memory: ctypes.Array[ctypes.c_uint8], monkeypatch: pytest.MonkeyPatch, *, taken: bool
) -> None:
    def refuses(capsule: object) -> None:
        if taken:
            torch.utils.dlpack.from_dlpack(capsule)
        raise RuntimeError("not today")

    def make(_: int) -> None:
        with pytest.raises(RuntimeError, match="not today"):
            as_tensor(ctypes.addressof(memory), NBYTES, CPU)

    monkeypatch.setattr(raw, "from_dlpack", refuses)
    assert blocks_of(make, 1000) < 100


@pytest.mark.parametrize(("hip", "number"), [(False, 2), (True, 10)])
def test_a_gpu_has_the_number_that_its_torch_expects(
    monkeypatch: pytest.MonkeyPatch, *, hip: bool, number: int
) -> None:
    monkeypatch.setattr(raw, "_HIP", hip)
    assert raw._device_type(torch.device("cuda", 1)) == number


AT_EXIT = """
import ctypes, torch, weakref
from rocm_dp.memory.raw import as_tensor
own = (ctypes.c_uint8 * 64)()
torch.kept, owner = as_tensor(ctypes.addressof(own), 64, torch.device("cpu"))
weakref.finalize(owner, print, "released").atexit = False
print("end")
"""


def test_a_process_may_end_with_a_tensor_alive_and_then_nothing_is_released() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
