"""Counts on the device: one plan, and on GPUs one captured graph, serves counts that change between replays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_dp import reference
from rocm_dp.errors import TransportRefusedError
from rocm_dp.plan import PaddingMode, TokenPlan
from rocm_dp.validate.cases import REPLAYS, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rocm_dp.exchange import TokenExchange

MOST_ROWS = max(max(counts) for counts in REPLAYS)  # of a dp rank


def check_replays(exchange: TokenExchange) -> Iterator[str]:
    """Yield what was wrong ("": nothing) for each counts of ``REPLAYS``; nothing where no transport can.

    ``exchange`` has room for ``MOST_ROWS`` of each dp rank, and for no more: what is captured must never move.
    """
    dp_size = exchange.layout.dp_size
    if exchange.dtype.itemsize == 1:
        return
    try:
        plan = exchange.graph_plan(capacity=MOST_ROWS * dp_size, per_rank_capacity=MOST_ROWS)
    except TransportRefusedError:
        return
    exchange.reserve(plans=[plan])
    # Rank r's rows are r + 1, so that a sum over ranks is exact, and a stale row is seen.
    local = torch.zeros(MOST_ROWS, exchange.hidden, dtype=exchange.dtype, device=exchange.device)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        everyone = exchange.gather(local, plan)
        return everyone, exchange.combine(everyone, plan)

    plan.update(spread(REPLAYS[0], dp_size))
    run = _captured(step) if exchange.device.type == "cuda" else step
    for turn, pattern in enumerate(REPLAYS):
        counts = spread(pattern, dp_size)
        local.fill_(float(exchange.layout.dp_rank + 1 + turn))
        plan.update(counts)
        everyone, own = (tensor.cpu() for tensor in run())
        yield _judged(exchange, TokenPlan(counts, PaddingMode.SUM_LEN), turn, everyone, own)


def _captured(
    step: Callable[[], tuple[torch.Tensor, torch.Tensor]],
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> tuple[torch.Tensor, torch.Tensor]:
        graph.replay()
        return results

    return replay


def _judged(exchange: TokenExchange, plan: TokenPlan, turn: int, everyone: torch.Tensor, own: torch.Tensor) -> str:
    """Compare the whole buffers: real rows first, zeros behind."""
    layout = exchange.layout
    rows = torch.zeros_like(everyone)
    for dp in range(layout.dp_size):
        rows[reference.scatter_range(plan, dp)] = float(dp + 1 + turn)
    sums = torch.zeros_like(own)
    sums[: plan.counts[layout.dp_rank]] = float((layout.dp_rank + 1 + turn) * layout.world_size)
    if not reference.same_bits(everyone, rows):
        return f"a gather with counts {plan.counts} on the device differs"
    return "" if reference.same_bits(own, sums) else f"a combine with counts {plan.counts} on the device differs"
