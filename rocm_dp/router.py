"""What one exchange can carry, and which transport carries it: plans judged by facts that all ranks agree on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rocm_dp import rocm, routing
from rocm_dp.errors import CapacityError, ConfigError
from rocm_dp.graphs import GraphPlan
from rocm_dp.platform import environment
from rocm_dp.routing import SERIAL

if TYPE_CHECKING:
    import torch

    from rocm_dp.plan import TokenPlan
    from rocm_dp.routing import Facts, OverlapVerdict, Table, TransportVerdict, Use


@dataclass(frozen=True, slots=True)
class Router:
    """Answers alike on every rank. ``max_rows`` of the global buffer, ``max_local_rows`` of one dp rank in it
    (None: any).
    """

    dp_size: int
    device: torch.device
    max_rows: int | None
    max_local_rows: int | None
    facts: Facts
    table: Table

    def check(self, plan: TokenPlan | GraphPlan) -> None:
        """Raise ConfigError or CapacityError unless ``plan`` can be carried here."""
        if isinstance(plan, GraphPlan):
            ranks, most = plan.counts.numel(), plan.per_rank_capacity
            if plan.counts.device != self.device:
                raise ConfigError(
                    f"the plan's counts are on {plan.counts.device}, the exchange is on {self.device}"
                )
        else:
            ranks, most = len(plan.counts), max(plan.sizes)
        if ranks != self.dp_size:
            raise ConfigError(f"the plan has counts for {ranks} dp ranks, the layout has {self.dp_size}")
        if self.max_rows is not None and plan.rows > self.max_rows:
            raise CapacityError(f"the plan needs {plan.rows} rows, max_rows is {self.max_rows}")
        if self.max_local_rows is not None and most > self.max_local_rows:
            raise CapacityError(f"a dp rank needs {most} rows, max_local_rows is {self.max_local_rows}")

    def choose(self, plan: TokenPlan | GraphPlan, use: Use = SERIAL) -> str:
        """Return the transport for ``plan``; raise TransportRefusedError with every reason when none can."""
        return routing.chosen_name(routing.choose(plan, self.facts, self.table, use))

    def explain(self, plan: TokenPlan | GraphPlan, use: Use) -> list[TransportVerdict]:
        """Return every transport's verdict on ``plan``.

        In a graph, where ROCm needs captured steps padded to SUM_LEN, those over torch.distributed say so.
        """
        verdicts = routing.choose(plan, self.facts, self.table, use)
        if not use.graph or not (found := rocm.workaround(environment())).on:
            return list(verdicts)
        said = f"SUM_LEN in graphs is {found.text}"
        return [
            verdict if verdict.name in routing.NEED_PROOF else replace(verdict, reason=f"{verdict.reason}; {said}")
            for verdict in verdicts
        ]

    def overlap_verdict(self, plan: TokenPlan | GraphPlan, *, graph: bool) -> OverlapVerdict:
        """Say whether a step of ``plan`` pays in two halves."""
        return routing.overlap_verdict(plan, self.facts, self.table, graph=graph)

    @property
    def always_peer(self) -> bool:
        """Whether every plan goes over peer memory."""
        measured = self.table.measured.names - set(routing.OVER_MEMORY)
        return "peer" in self.facts.qualified and self.table.order[0] in routing.OVER_MEMORY and not measured
