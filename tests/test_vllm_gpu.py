"""vLLM's calls on 2 GPUs, eager and replayed. Run with ``-m gpu``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import vllm_cases

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.testing import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("case", vllm_cases.CALLS, ids=lambda case: case.__name__)
def test_vllms_calls_give_what_its_description_says(pair: RankPool, case: Callable[[int, int], None]) -> None:
    pair.run(case, 2)


def test_a_captured_dispatch_and_combine_replay_on_other_tensors(pair: RankPool) -> None:
    pair.run(vllm_cases.replayed, 2, 100)
