"""Memory mapped into every rank: shared by all, refused by all, and never left behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import peer_cases as cases
import pytest

from rocm_dp.errors import PeerRefusedError, RankFailedError
from rocm_dp.memory.shared import SharedMemory, open_shared
from rocm_dp.platform import host_id
from rocm_dp.testing import RankPool

if TYPE_CHECKING:
    from collections.abc import Callable

    Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_rank_reads_and_writes_the_memory_of_all_and_leaves_no_descriptor(ranks: Ranks, world: int) -> None:
    for counted in ranks(world).run(cases.everyone_writes_to_everyone, world, 6):
        assert len(set(counted[1:])) == 1


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
