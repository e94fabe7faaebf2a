"""torch.compile around the verbs: they cut a region cleanly, and new counts compile nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import compile_cases
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.testing import RankPool

    Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize(
    "case", [compile_cases.changing_counts, compile_cases.async_verbs], ids=lambda c: c.__name__
)
def test_200_different_counts_compile_nothing_after_warm_up(
    ranks: Ranks, case: Callable[[int], tuple[int, int]]
) -> None:
    for warm, last in ranks(2).run(case):
        assert warm >= 2, "what lies between the verbs is compiled"
        assert last == warm


def test_the_count_of_graphs_sees_a_recompilation(ranks: Ranks) -> None:
    assert all(last > warm for warm, last in ranks(2).run(compile_cases.reading_counts))
