"""A gather and a combine captured once and replayed in the soak's GRAPH steps; GPUs only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_dp.errors import TransportRefusedError
from rocm_dp.graphs import GraphPlan
from rocm_dp.plan import PaddingMode, TokenPlan

if TYPE_CHECKING:
    from rocm_dp.exchange import TokenExchange
    from rocm_dp.soak.config import SoakConfig


class Replay:
    """One graph for every step's counts where a transport reads them on the device, else for one fixed plan.

    Collective, and the device is idle when it is made. ``close`` before the exchange: the graph holds its kernels.
    """

    def __init__(self, exchange: TokenExchange, config: SoakConfig) -> None:
        self._plan = _plan_to_capture(exchange, config)
        device_counts = isinstance(self._plan, GraphPlan)
        exchange.reserve(batches=2, plans=[self._plan] if isinstance(self._plan, GraphPlan) else ())
        rows = config.tokens if device_counts else self._fixed.counts[exchange.layout.dp_rank]
        self._local = torch.zeros(rows, exchange.hidden, dtype=exchange.dtype, device=exchange.device)
        self._whole = torch.zeros(self._plan.rows, exchange.hidden, dtype=exchange.dtype, device=exchange.device)
        self._dp_rank = exchange.layout.dp_rank
        for _ in range(2):
            self._call(exchange)
        torch.cuda.synchronize(exchange.device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._gathered, self._combined = self._call(exchange)

    @property
    def _fixed(self) -> TokenPlan:
        assert isinstance(self._plan, TokenPlan)
        return self._plan

    def plan_of(self, plan: TokenPlan) -> TokenPlan:
        """Return the plan that a replay carries in place of ``plan``: its counts packed, or the fixed plan."""
        if isinstance(self._plan, GraphPlan):
            return TokenPlan(plan.counts, PaddingMode.SUM_LEN, plan.phase)
        return self._plan

    def run(self, plan: TokenPlan, local: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Replay with ``local`` [L, H] and ``whole`` [G, H] of ``plan``; return what is gathered and combined."""
        own = plan.counts[self._dp_rank]
        if isinstance(self._plan, GraphPlan):
            self._plan.update(plan.counts)
        self._local[:own].copy_(local)
        self._whole[: plan.rows].copy_(whole)
        self._graph.replay()
        return self._gathered[: plan.rows], self._combined[:own]

    def close(self) -> None:
        """Give the graph up."""
        torch.cuda.synchronize(self._local.device)
        self._graph.reset()

    def _call(self, exchange: TokenExchange) -> tuple[torch.Tensor, torch.Tensor]:
        pending = exchange.gather_async(self._local, self._plan, batch=1)
        combined = exchange.combine(self._whole, self._plan)
        return pending.wait(), combined


def _plan_to_capture(exchange: TokenExchange, config: SoakConfig) -> TokenPlan | GraphPlan:
    try:
        return exchange.graph_plan(capacity=config.tokens * config.dp, per_rank_capacity=config.tokens)
    except TransportRefusedError:
        return TokenPlan((config.tokens // 2 or 1,) * config.dp, PaddingMode.MAX_LEN)
