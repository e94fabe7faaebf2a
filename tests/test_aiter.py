"""The ``aiter`` transport over a stand-in with the real one's contracts. No AMD GPU took part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiter_cases as cases
import pytest
import torch
from exchange_cases import Grid

from rocm_dp.transports import aiter  # noqa: A004 - the package, not the builtin

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.testing import RankPool

    Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("grid", [Grid(4, 4), Grid(4, 2), Grid(4, 2, 2), Grid(4, 1)], ids=str)
def test_equal_plans_are_gathered_and_combined_right(ranks: Ranks, grid: Grid) -> None:
    ranks(4).run(cases.every_plan, grid)


@pytest.mark.parametrize(
    "case",
    [
        cases.constructed_as_asked,
        cases.refusals,
        cases.a_call_that_aiter_alone_refuses,
        cases.registered_captures,
    ],
    ids=lambda case: case.__name__,
)
def test_it_is_trusted_only_as_far_as_its_contract_goes(ranks: Ranks, case: Callable[[int], None]) -> None:
    ranks(4).run(case)


def test_six_ranks_are_never_served() -> None:
    assert [world for world in range(1, 17) if not aiter.world_refusal(world)] == [2, 4, 8]
    assert aiter.world_refusal(6) == "aiter gathers and reduces right over (2, 4, 8) ranks, there are 6"


def test_shares_are_multiples_of_16_bytes_within_64_mib() -> None:
    mib = 1 << 20
    assert [aiter.size_refusal(n, 4) for n in (64, 64 * mib, 4 * 16 * 5)] == ["", "", ""]
    assert aiter.size_refusal(0, 4) == "nothing to move"
    assert aiter.size_refusal(64 * mib + 64, 4) == "the global buffer has 67108928 bytes, aiter takes 67108864"
    assert aiter.size_refusal(4 * 24, 4) == "a share has 24 bytes, aiter needs a multiple of 16"


def test_this_machine_says_why_not() -> None:
    if torch.version.hip is None:
        assert aiter.machine_refusal(torch.device("cpu")).startswith("aiter is for AMD GPUs, this is cpu on torch")


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:true"}, True),
    ],
)
def test_memory_that_cannot_be_exported_is_refused(variables: dict[str, str], refused: bool) -> None:
    assert bool(aiter.allocator_refusal(variables)) is refused
