"""What one rank does in the demo: agree, compute, exchange, check, step after step."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING

import torch

from rocm_dp.agreement import StepRules, agree
from rocm_dp.demo.checked import CheckedExchange
from rocm_dp.errors import ConfigError
from rocm_dp.exchange import TokenExchange
from rocm_dp.groups import Groups
from rocm_dp.layout import RankLayout
from rocm_dp.options import ExchangeStats, Options
from rocm_dp.overlap import interleave
from rocm_dp.plan import PaddingMode, Phase
from rocm_dp.routing import Table
from rocm_dp.testing import note, rank_device
from rocm_dp.workload.model import ModelConfig, MoEModel, split_work
from rocm_dp.workload.scheduler import SchedulerConfig, schedule, sequence_tokens

if TYPE_CHECKING:
    from rocm_dp.agreement import Agreement
    from rocm_dp.workload.scheduler import Step
    from rocm_dp.workload.traces import Trace

_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """Everything a rank needs; equal on all ranks. ``dtype`` by its torch name, e.g. bfloat16."""

    trace: Trace
    ranks: int
    dp: int
    scheduler: SchedulerConfig
    model: ModelConfig
    cp: int = 1
    steps: int = 100
    hidden: int = 256
    dtype: str = "bfloat16"
    overlap: bool = True
    transport: str | None = None

    def __post_init__(self) -> None:
        layout = RankLayout(0, self.ranks, self.dp, self.cp)
        if self.scheduler.dp_size != self.dp:
            raise ConfigError(f"the scheduler has {self.scheduler.dp_size} dp ranks, the demo {self.dp}")
        if self.steps < 1:
            raise ConfigError(f"steps must be at least 1, got {self.steps}")
        self.model.check(self.hidden, layout.tp_size)
        if self.transport:
            Table((self.transport,))


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as it was agreed."""

    counts: tuple[int, ...]
    phase: Phase
    padding: PaddingMode
    align: int
    overlap: bool


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank saw: ``seconds`` by part of the layer, checks and failures, resources warm and at the end."""

    rank: int
    device: str
    steps: tuple[StepRecord, ...]
    seconds: dict[str, float]
    checks: int
    failures: tuple[str, ...]
    worst_sum_error: float
    warm: ExchangeStats
    end: ExchangeStats


def run_rank(rank: int, config: DemoConfig) -> RankReport:
    """Replay the trace on this rank; rank 0 sends the number of finished steps as notes."""
    layout = RankLayout(rank, config.ranks, config.dp, config.cp)
    most = -(-config.scheduler.token_budget // layout.replicas) * layout.replicas
    with (
        Groups.create(layout, timeout=_TIMEOUT) as groups,
        TokenExchange(
            layout,
            groups,
            device=rank_device(),
            hidden=config.hidden,
            dtype=getattr(torch, config.dtype),
            max_rows=most * config.dp,
            max_local_rows=most,
            options=Options(transport=config.transport),
        ) as exchange,
        torch.inference_mode(),
    ):
        exchange.reserve(batches=2)
        return _replay(exchange, groups, config)


def _replay(exchange: TokenExchange, groups: Groups, config: DemoConfig) -> RankReport:
    layout = exchange.layout
    checked = CheckedExchange(exchange)
    model = MoEModel(checked, config.model)
    records: list[StepRecord] = []
    # The equal-size transport, when it is forced, carries equal sizes only.
    rules = StepRules(padding=PaddingMode.MAX_LEN if config.transport == "all_gather" else None)
    warm = exchange.stats()
    for step in islice(schedule(config.trace.requests, config.scheduler), config.steps):
        agreement = agree(
            step.counts[layout.dp_rank],
            phase=step.phases[layout.dp_rank],
            can_overlap=config.overlap,
            want_overlap=step.phases[layout.dp_rank] is Phase.PREFILL,
            can_graph=False,
            groups=groups,
            layout=layout,
            collectives=("gather", "combine") * config.model.layers,
            rules=rules,
        )
        if agreement.plan.counts != step.counts:
            checked.failures.append(f"agreed on {agreement.plan.counts}, the scheduler says {step.counts}")
        _compute(model, checked, step, agreement, config)
        plan = agreement.plan
        records.append(StepRecord(plan.counts, plan.phase, plan.padding, plan.align, agreement.overlap))
        if layout.rank == 0:
            note(len(records))
        if len(records) == 1:
            warm = exchange.stats()
    return RankReport(
        rank=layout.rank,
        device=_device_name(exchange.device),
        steps=tuple(records),
        seconds=dict(checked.seconds),
        checks=checked.checks,
        failures=tuple(checked.failures),
        worst_sum_error=checked.worst_sum_error,
        warm=warm,
        end=exchange.stats(),
    )


def _compute(
    model: MoEModel, checked: CheckedExchange, step: Step, agreement: Agreement, config: DemoConfig
) -> None:
    """Run the model on this rank's work, as one batch or as two that take turns."""
    dp_rank = checked.layout.dp_rank
    work = step.work[dp_rank]
    for item in work:
        if item.start == 0:
            model.admit(item.request, sequence_tokens(config.trace.requests[item.request], config.scheduler))
    parts = [work]
    plans = [agreement.plan]
    if agreement.overlap:
        plans = list(agreement.plan.halves())
        parts = list(split_work(work, plans[0].counts[dp_rank]))
    checked.start_lap()
    results = interleave(
        *(
            model.forward(model.embed(part), part, plan, batch=batch)
            for batch, (part, plan) in enumerate(zip(parts, plans, strict=True))
        )
    )
    rows = sum(result.shape[0] for result in results)
    if rows != step.counts[dp_rank] or not all(bool(torch.isfinite(result).all()) for result in results):
        checked.failures.append(f"rank {checked.layout.rank}: step {step.index}: {rows} rows, or not finite")
    model.retire(step.finished)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
