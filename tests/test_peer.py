"""Memory mapped into every rank: shared by all, refused by all, and never left behind."""

from __future__ import annotations

import ctypes
import gc
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import peer_cases as cases
import pytest
import torch

from rocm_dp.errors import PeerRefusedError, RankFailedError
from rocm_dp.memory import peer, runtime
from rocm_dp.memory.peer import IpcProvider
from rocm_dp.memory.shared import SharedMemory, open_shared
from rocm_dp.platform import host_id
from rocm_dp.testing import RankPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_rank_reads_and_writes_the_memory_of_all_and_leaves_no_descriptor(ranks: Ranks, world: int) -> None:
    for counted in ranks(world).run(cases.everyone_writes_to_everyone, world, 6):
        assert len(set(counted[1:])) == 1


class FakeRuntime:
    """Memory of the CPU in place of a GPU's; what was done with it, in order."""

    def __init__(self) -> None:
        self.log, self.held = list[str](), dict[int, object]()

    def allocate(self, nbytes: int, *, uncached: bool) -> int:
        assert not uncached
        memory = (ctypes.c_uint8 * nbytes)()
        self.held[ctypes.addressof(memory)] = memory
        self.log.append("allocate")
        return ctypes.addressof(memory)

    def handle(self, address: int) -> tuple[int, ...]:
        assert address in self.held
        return (0,) * 8

    def open(self, words: Sequence[int]) -> int:
        return len(words)

    def close(self, address: int) -> None:
        self.log.append(f"unmap {address}")

    def free(self, address: int) -> None:
        del self.held[address]
        self.log.append("free")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    made = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(runtime, "loaded_runtime", lambda: made)
    return made


def offered() -> IpcProvider:
    return IpcProvider(64, torch.device("cpu"), uncached=False)


def test_own_memory_is_freed_once_and_behind_its_last_view(fake: FakeRuntime) -> None:
    provider = offered()
    provider.open((1, 2))
    view = provider.tensor[8:]
    provider.unmap()
    provider.free()
    assert fake.log == ["allocate", "unmap 2"]
    view.fill_(3)
    del view
    assert fake.log == ["allocate", "unmap 2", "free"]


def test_a_provider_that_is_only_dropped_frees_its_memory(fake: FakeRuntime) -> None:
    offered()
    gc.collect()
    assert fake.log == ["allocate", "free"]


def test_memory_that_a_peer_may_write_to_is_never_freed(fake: FakeRuntime) -> None:
    offered().abandon()
    gc.collect()
    assert fake.log == ["allocate"]


@pytest.mark.parametrize("name", ["handle", "as_tensor"])
def test_memory_that_can_not_be_offered_is_freed_once(
    fake: FakeRuntime, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fails(*_: object) -> None:
        raise PeerRefusedError("not today")

    monkeypatch.setattr(fake if name == "handle" else peer, name, fails)
    with pytest.raises(PeerRefusedError, match="not today"):
        offered()
    gc.collect()
    assert fake.log == ["allocate", "free"]


def test_mappings_are_gone_with_the_buffer(ranks: Ranks) -> None:
    assert ranks(3).run(cases.mappings, 3) == [(3, 0)] * 3


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("memory", "rank 1: no memory left"),
        ("host", "rank 1: host 1234"),
        ("handle", "rank 1: the memory of rank 0: stale"),
        ("size", f"rank 1: host {host_id():x}, {2 * cases.NBYTES} bytes"),
    ],
)
def test_what_one_rank_cannot_do_is_told_to_all_and_costs_nothing(ranks: Ranks, why: str, reason: str) -> None:
    said = ranks(3).run(cases.refused, 3, why)
    assert len(set(said)) == 1
    assert reason in said[0]
    assert "rank 0:" in said[0]


def test_a_rank_that_dies_leaves_the_others_free_to_close(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    notes = []
    with RankPool(3, backend="gloo") as pool, pytest.raises(RankFailedError, match="rank 1"):
        pool.run(cases.a_rank_dies, 3, on_note=lambda _, told: notes.append(told))
    assert set(Path("/dev/shm").iterdir()) == before
    assert all(seconds < 10 and left == 0 for _, seconds, left in notes)


def test_a_descriptor_that_stands_for_something_else_is_refused() -> None:
    own = SharedMemory(4096)
    process, descriptor, inode = own.words
    assert open_shared(own.words, 4096).numel() == 4096
    with pytest.raises(PeerRefusedError, match=f"not {inode + 1} of 4096"):
        open_shared((process, descriptor, inode + 1), 4096)
    with pytest.raises(PeerRefusedError, match=r"not \d+ of 8192"):
        open_shared(own.words, 8192)
    own.close()
    own.close()
    with pytest.raises(PeerRefusedError, match="can't be opened"):
        open_shared((process, descriptor, inode), 4096)


def test_the_host_is_told_by_boot_and_namespaces(tmp_path: Path) -> None:
    assert host_id() == host_id()
    one, other = tmp_path / "one", tmp_path / "other"
    for proc, boot in ((one, "a"), (other, "b")):
        (proc / "sys/kernel/random").mkdir(parents=True)
        (proc / "sys/kernel/random/boot_id").write_text(f"{boot}\n")
    assert len({host_id(one), host_id(other), host_id()}) == 3
