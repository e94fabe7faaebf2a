"""The peer kernels, interpreted, across real processes: counts on the device, one wait a call, two slots."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from unittest.mock import patch

import peer_kernel_cases as cases
import pytest
import torch

from rocm_dp.testing import RankPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[[int], RankPool]]:
    """Ranks in which Triton interprets its kernels, by world size."""
    pools: dict[int, RankPool] = {}

    def pool(world: int) -> RankPool:
        if world not in pools:
            with patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
                pools[world] = RankPool(world, backend="gloo", timeout=200.0)
        return pools[world]

    yield pool
    for made in pools.values():
        made.close()


# Interpreted ranks take seconds to start: the other worlds with -m soak.
WORLDS = [(2, 2), (2, 1), (3, 3), (5, 5), (8, 4)]
MORE_WORLDS = [(1, 1), (4, 2), (4, 4), (6, 3), (7, 7), (8, 8)]


@pytest.mark.parametrize(
    ("world", "dp"), [*WORLDS, *(pytest.param(*world, marks=pytest.mark.soak) for world in MORE_WORLDS)]
)
def test_gather_and_combine_equal_the_oracle_at_any_world_size_with_counts_on_the_device(
    interpreted: Callable[[int], RankPool], world: int, dp: int
) -> None:
    steps = 6
    for wrong, state in interpreted(world).run(cases.gathers, world, dp, cases.FORMS[0], steps):
        assert (wrong, state) == (0, [steps, 0, 0, 0])
    for wrong, state in interpreted(world).run(cases.combines, world, dp, 12, torch.float32, steps):
        assert (wrong, state) == (0, [steps, 0, 0, 0])


@pytest.mark.parametrize("form", cases.FORMS[1:], ids=lambda form: str(form.dtype))
def test_rows_of_any_dtype_and_width_are_gathered_bit_for_bit(
    interpreted: Callable[[int], RankPool], form: cases.Form
) -> None:
    assert {wrong for wrong, _ in interpreted(3).run(cases.gathers, 3, 3, form, 6)} == {0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_sums_are_made_in_float32_in_rank_order(
    interpreted: Callable[[int], RankPool], dtype: torch.dtype
) -> None:
    assert {wrong for wrong, _ in interpreted(3).run(cases.combines, 3, 3, 7, dtype, 6)} == {0}


def test_a_slow_rank_reads_what_is_its_own_and_without_the_wait_or_the_second_slot_it_does_not(
    interpreted: Callable[[int], RankPool],
) -> None:
    pool, steps = interpreted(3), 8
    assert pool.run(cases.with_a_slow_rank, 3, cases.SPINS, 2, steps) == [0, 0, 0]
    assert sum(pool.run(cases.with_a_slow_rank, 3, 0, 2, steps)) > 0
    assert sum(pool.run(cases.with_a_slow_rank, 3, cases.SPINS, 1, steps)) > 0


def test_a_rank_that_never_calls_is_named_and_nobody_waits_for_ever(
    interpreted: Callable[[int], RankPool],
) -> None:
    first, absent, last = interpreted(3).run(cases.one_rank_never_calls, 3)
    missing = [2, 0, 2, 1 << 1]
    assert (first, absent, last) == (missing, [1, 0, 0, 0], missing)
