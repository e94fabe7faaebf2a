"""The soak on GPUs: graphs and streams take part, and what only a device can leak is found. Run with ``-m gpu``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from soak_cases import soaked

from rocm_dp.soak.config import REQUIRED, SoakConfig
from rocm_dp.soak.gates import Status
from rocm_dp.soak.selftest import self_test

if TYPE_CHECKING:
    from rocm_dp.testing import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
PAIR = SoakConfig(ranks=2, dp=2, steps=800, required=(*REQUIRED, "torch"))


def test_the_self_test_finds_and_names_every_leak_and_has_no_false_alarm(pair: RankPool) -> None:
    trials = list(self_test(pair, PAIR, clean=3))
    assert [
        (trial.injected, trial.seed, trial.named, trial.outcome.problems) for trial in trials if not trial.right
    ] == []
    assert len(trials) == 3 + 11


def test_the_way_of_the_replaced_system_fails_within_500_steps(pair: RankPool) -> None:
    config = SoakConfig(ranks=2, dp=2, steps=500, hidden=7168, tokens=1024, seed_system=True)
    _, outcome = soaked(pair, config)
    assert outcome.cause == "record-stream"
    leaks = {verdict.name: verdict for verdict in outcome.verdicts if verdict.status is Status.LEAK}
    assert leaks.keys() & {"torch.balloon", "torch.reserved", "torch.segments"}
