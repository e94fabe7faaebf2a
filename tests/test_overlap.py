"""overlap: halves that take turns give what one after the other gives; an error in one leaves nobody waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import overlap_cases as cases
import pytest
from exchange_cases import Grid

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.testing import RankPool

    Ranks = Callable[[int], RankPool]

PAIR = Grid(2, 2)


@pytest.mark.parametrize("transport", [None, "all_gather_v", "all_reduce"])
def test_halves_that_take_turns_equal_the_same_halves_in_turn(ranks: Ranks, transport: str | None) -> None:
    assert ranks(2).run(cases.halves_and_whole, PAIR, transport, 20, 3) == [0, 0]


@pytest.mark.parametrize("transport", [None, pytest.param("peer", marks=pytest.mark.soak)])
def test_they_do_over_peer_memory(interpreted: Ranks, transport: str | None) -> None:
    assert interpreted(2).run(cases.halves_and_whole, PAIR, transport, 1, 2) == [0, 0]


def test_an_error_in_one_half_is_told_to_every_rank_and_nobody_waits(interpreted: Ranks) -> None:
    (other, after_other, seconds), (failed, after, _) = interpreted(2).run(cases.one_half_fails, PAIR)
    assert failed == "ValueError: out of experts"
    assert after == "ClosedError: these groups can't be used after: ValueError: out of experts"
    assert other.startswith("PeerTimeoutError: ")
    assert "rank 1 gave up, made another call, or did not come" in other
    assert "rank 1: ValueError: out of experts" in other
    assert after_other.startswith("ClosedError: these groups can't be used after: ")
    assert seconds < 20  # of the 60 that a wait may take
