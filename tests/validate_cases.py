"""What the ranks run for the tests of ``rocm-dp validate``: the library as it is, and broken on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import torch.distributed as dist
from sabotage import leave_padding_unwritten, swap_starts, write_the_input

from rocm_dp.graphs import GraphPlan
from rocm_dp.transports import collectives
from rocm_dp.validate.graphs import check_replays
from rocm_dp.validate.launched import gathered
from rocm_dp.validate.rank import run_rank

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import torch

    from rocm_dp.exchange import TokenExchange
    from rocm_dp.validate.rank import RankResult, ValidateConfig

_reduce_scatter_v = collectives.reduce_scatter_v


def sum_twice() -> AbstractContextManager[object]:
    def twice(out: torch.Tensor, parts: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        _reduce_scatter_v(out, parts, group)
        out.mul_(2)

    return patch.object(collectives, "reduce_scatter_v", twice)


BREAKS = {
    "starts": swap_starts,
    "padding": leave_padding_unwritten,
    "sum": sum_twice,
    "input": write_the_input,
}


def broken(rank: int, how: str, config: ValidateConfig) -> RankResult:
    with BREAKS[how]():
        return run_rank(rank, config)


def stale_counts(rank: int, config: ValidateConfig) -> RankResult:
    """The counts on the device stay what they were at first, as in a graph that was captured with them.

    Not in the self-test, which would notice first.
    """
    honest, seen = GraphPlan.update, set[int]()

    def update(self: GraphPlan, counts: tuple[int, ...]) -> None:
        if id(self) not in seen:
            seen.add(id(self))
            honest(self, counts)

    def check(exchange: TokenExchange) -> Iterator[str]:
        with patch.object(GraphPlan, "update", update):
            yield from check_replays(exchange)

    with patch("rocm_dp.validate.rank.check_replays", check):
        return run_rank(rank, config)


def found_by_all(rank: int, result: RankResult) -> list[RankResult]:
    """As under torchrun: every rank learns what every other found."""
    result.rank = rank
    result.failures.append("x" * (rank * 1000))
    assert dist.is_initialized()
    return gathered(result)


def broken_starts(rank: int, config: ValidateConfig) -> RankResult:
    return broken(rank, "starts", config)


def dies(rank: int, config: ValidateConfig) -> RankResult:
    raise RuntimeError("RCCL: unhandled system error")
