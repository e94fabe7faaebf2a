"""The checks that everything else relies on fail when the library is broken on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sabotage import CONTROLS, checked_under_sabotage

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.testing import RankPool


@pytest.mark.parametrize("name", CONTROLS)
def test_a_check_passes_the_real_library_and_fails_the_broken_one(
    ranks: Callable[[int], RankPool], name: str
) -> None:
    pool = ranks(CONTROLS[name][2].world)
    assert not any(pool.run(checked_under_sabotage, name, False))
    assert any(pool.run(checked_under_sabotage, name, True))
