"""The steps of a soak: drawn from the seed, legal, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from itertools import count, cycle, islice
from random import Random
from typing import TYPE_CHECKING

from rocm_dp.plan import PaddingMode, Phase, TokenPlan
from rocm_dp.workload.scheduler import SchedulerConfig, schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_dp.soak.config import SoakConfig
    from rocm_dp.workload.scheduler import Step

_IDLE_SHARE = 0.2  # of the ranks, so that all but one and all of them are idle now and then too


class StepKind(Enum):
    """What a step does with its plan."""

    SERIAL = 1
    """A gather and a combine, one after the other."""
    OVERLAP = 2
    """Both halves of every rank's rows, interleaved on the comm stream."""
    MANY = 3
    """Hidden states and ids in one message."""
    GRAPH = 4
    """A replay of a captured graph, where there is one; else as SERIAL."""
    LIFETIME = 5
    """Another exchange on the same groups: made, used with growing buffers, closed."""


_WEIGHTS = {
    StepKind.SERIAL: 8,
    StepKind.OVERLAP: 6,
    StepKind.MANY: 3,
    StepKind.GRAPH: 4,
    StepKind.LIFETIME: 1,
}
_MOST_TRACED = 20_000
FULL = -1  # the number of the plan with the most rows
# MAX_LEN plans can go over all of them.
TRANSPORTS = (None, "all_gather", "all_gather_v", "all_reduce")


@dataclass(frozen=True, slots=True)
class SoakStep:
    """Step ``index``. ``offset``: which rows each rank sends; ``transport``: of a LIFETIME's exchange."""

    index: int
    kind: StepKind
    plan: TokenPlan
    batch: int
    offset: int
    partial: bool
    transport: str | None


def program(config: SoakConfig) -> Iterator[SoakStep]:
    """Yield steps for ever; step ``i`` depends on the seed and ``i`` alone, and on the trace where there is one.

    First a tour: every plan in every kind and batch, so that nothing is met for the first time later.
    """
    traced = _trace_plans(config) if config.trace is not None else None
    tour = _tour(config)
    for index in count():
        random = Random(f"rocm-dp soak {config.seed} {index}")
        kind = random.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
        number = random.randrange(config.plans) if config.plans else index
        drawn = kind, number, random.randrange(2), random.choice(TRANSPORTS)
        kind, number, batch, transport = next(tour, drawn)
        plan = next(traced) if traced is not None and number != FULL else draw_plan(config, number)
        if kind is StepKind.LIFETIME and transport == "all_gather":
            plan = replace(plan, padding=PaddingMode.MAX_LEN)
        partial = config.dp < config.ranks and number % 2 == 1
        yield SoakStep(index, kind, plan, batch, random.randrange(config.tokens), partial, transport)


def draw_plan(config: SoakConfig, number: int) -> TokenPlan:
    """Return plan ``number`` of the program: any counts, idle ranks too, either padding; FULL: all there is."""
    if number == FULL:
        return TokenPlan((config.tokens,) * config.dp, PaddingMode.SUM_LEN, align=config.align)
    random = Random(f"rocm-dp soak {config.seed} plan {number}")
    most = random.choice((1, 4, config.tokens // 2 or 1, config.tokens))
    counts = tuple(
        0 if random.random() < _IDLE_SHARE else random.randint(1, min(most, config.tokens))
        for _ in range(config.dp)
    )
    phase = random.choice((Phase.PREFILL, Phase.DECODE)) if any(counts) else Phase.IDLE
    return TokenPlan(counts, random.choice(list(PaddingMode)), phase, config.align)


def _tour(config: SoakConfig) -> Iterator[tuple[StepKind, int, int, str | None]]:
    """Yield what the first steps do: the largest plan in each kind and transport, then each plan."""
    for batch in (0, 1):
        yield from ((kind, FULL, batch, None) for kind in StepKind if kind is not StepKind.LIFETIME)
        yield from ((StepKind.LIFETIME, FULL, batch, transport) for transport in TRANSPORTS)
    if config.trace is not None:
        return
    for number in range(config.plans):
        for kind in (StepKind.SERIAL, StepKind.MANY):
            yield from ((kind, number, batch, None) for batch in (0, 1))
        yield StepKind.OVERLAP, number, 0, None


def tour_steps(config: SoakConfig) -> int:
    """Return how many steps the tour takes."""
    return sum(1 for _ in _tour(config))


def _trace_plans(config: SoakConfig) -> Iterator[TokenPlan]:
    """Yield the plans of the trace's first steps, and start over at the end.

    They are made at once: requests that queue up while they are simulated would look like a leak.
    """
    assert config.trace is not None
    scheduler = SchedulerConfig(
        dp_size=config.dp, token_budget=config.tokens, max_running=max(1, config.tokens // 4)
    )
    steps = islice(schedule(config.trace.requests, scheduler), min(config.steps or _MOST_TRACED, _MOST_TRACED))
    yield from cycle([_traced_plan(step, config) for step in steps])


def _traced_plan(step: Step, config: SoakConfig) -> TokenPlan:
    padding = PaddingMode.MAX_LEN if step.phase is Phase.DECODE else PaddingMode.SUM_LEN
    return TokenPlan(step.counts, padding, step.phase, config.align)
