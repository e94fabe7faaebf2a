"""Ranks for the tests: started once for each world size, fed many cases."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, settings

from rocm_dp.testing import RankPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# How long an example takes says nothing on a machine that also runs eight ranks.
settings.register_profile("rocm_dp", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rocm_dp")


@pytest.fixture(scope="session", autouse=True)
def _no_table_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was tuned here is nothing to the tests, in this process and in its ranks."""
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}):
        yield


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[[int], RankPool]]:
    """Like ``ranks``; Triton interprets its kernels in them, so that peer memory is at hand."""
    pools: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        if world in pools and pools[world].broken:
            pools.pop(world).close()
        if world not in pools:
            with patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
                pools[world] = RankPool(world, backend="gloo", timeout=200.0)
        return pools[world]

    yield pool
    for made in pools.values():
        made.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """A function from the world size to its pool of gloo ranks; a pool that broke is replaced."""
    pools: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        if world in pools and pools[world].broken:
            pools.pop(world).close()
        if world not in pools:
            pools[world] = RankPool(world, backend="gloo", timeout=120.0)
        return pools[world]

    yield pool
    for made in pools.values():
        made.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks over NCCL or RCCL, a GPU each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    with RankPool(2, backend="nccl", timeout=280.0) as pool:
        yield pool
