"""What the ranks run for the tests of ``bench overlap``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rocm_dp import TokenExchange
from rocm_dp.bench.contenders import open_exchanges
from rocm_dp.bench.inputs import Inputs
from rocm_dp.bench.overlap_comm import ExchangeComm
from rocm_dp.bench.overlap_layers import make_weights
from rocm_dp.bench.overlap_measure import Effort, Mode, OverlapTimes, measure
from rocm_dp.bench.overlap_rank import RankFindings, run_rank
from rocm_dp.bench.overlap_ways import Case, our_way
from rocm_dp.bench.rank import ranks_ready
from rocm_dp.options import Options
from rocm_dp.testing import rank_device

if TYPE_CHECKING:
    from rocm_dp.bench.overlap_comm import Arriving
    from rocm_dp.bench.overlap_config import OverlapConfig
    from rocm_dp.bench.overlap_layers import Weights


@dataclass
class Seen:
    """One rank's rows before and after a forward of both halves, and what it multiplied them by."""

    start: list[torch.Tensor]
    weights: Weights
    outcomes: dict[str, list[torch.Tensor]]
    times: OverlapTimes
    has_stream: bool


def one_case(rank: int, config: OverlapConfig) -> Seen:
    """Measure one case with one exchange, as a tuner would, and return what came out of it."""
    with ranks_ready(config.layout(rank), config) as ready, torch.inference_mode():
        first, second = (Inputs(config, ready.groups.layout, rank_device(), counts) for counts in config.cases)
        both = Inputs(config, ready.groups.layout, rank_device(), tuple(map(sum, zip(*config.cases, strict=True))))
        case = Case((first, second, both), make_weights(first, config.intermediate), config.layers)
        (name,) = config.transports
        with open_exchanges(
            case.inputs, ready.groups, [Options(transport=name, timeout=60.0)], batches=2
        ) as opened:
            exchange = opened[name]
            assert isinstance(exchange, TokenExchange)
            buffers = exchange.stats().buffers_made
            forward = our_way(name, exchange, case)
            times = measure(forward, Mode.EAGER, Effort(1, 2), ready.groups.cpu)  # type: ignore[arg-type]
            assert isinstance(times, OverlapTimes)
            outcomes = {kind: forward.outcome(run) for kind, run in forward.runs().items() if kind != "comm"}  # type: ignore[union-attr]
            assert exchange.stats().buffers_made == buffers, "something was allocated after reserve"
            start = [half.start.clone() for half in forward.halves]  # type: ignore[union-attr]
            return Seen(start, case.weights, outcomes, times, exchange.comm_stream is not None)


class _Liar:
    """Rows under way of which one element comes out wrong."""

    def __init__(self, honest: Arriving) -> None:
        self._honest = honest

    def wait(self) -> torch.Tensor:
        got = self._honest.wait().clone()
        if got.numel():
            got[-1, -1] += 1
        return got


def combine_with_a_lie(rank: int, config: OverlapConfig) -> RankFindings:
    """Run the bench with an error in every combine that overlaps."""
    honest = ExchangeComm.combine_async

    def lying(self: ExchangeComm, *args: Any) -> Arriving:
        return _Liar(honest(self, *args))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExchangeComm, "combine_async", lying)
        return run_rank(rank, config)
