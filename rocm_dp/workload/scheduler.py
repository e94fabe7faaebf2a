"""Continuous batching over data-parallel ranks: a pure simulation that turns requests into steps."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from rocm_dp.errors import ConfigError
from rocm_dp.plan import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rocm_dp.workload.traces import Request


class Routing(Enum):
    """How an arriving request is given to a rank, where it then stays."""

    ROUND_ROBIN = 1
    """To each rank in turn."""
    LEAST_LOADED = 2
    """To the rank with the fewest tokens still to process (the lowest such rank)."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What every rank may do in a step, and how long a step takes.

    A rank processes at most ``token_budget`` tokens a step, and at most ``max_running`` of its requests are
    under way; the others wait in order of arrival. ``mix_phases``: a rank's step may hold both decodes and
    prefill chunks; otherwise it holds chunks whenever it can, else decodes. ``max_context`` and
    ``max_generated`` clip requests, so that small machines can replay large traces. All ranks step together,
    in ``seconds_per_step + seconds_per_token * tokens of the busiest rank``; the defaults are of the order
    of a large model's, not measured ones.

    Raises ConfigError for a value out of range. ``max_running`` must not exceed ``token_budget``: then all
    decodes fit a step, and since a request that prefills isn't decoding, one token is left for it.
    """

    dp_size: int
    token_budget: int = 512
    max_running: int = 64
    routing: Routing = Routing.ROUND_ROBIN
    max_context: int | None = None
    max_generated: int | None = None
    mix_phases: bool = True
    seconds_per_step: float = 0.02
    seconds_per_token: float = 5e-5

    def __post_init__(self) -> None:
        for name in ("dp_size", "token_budget", "max_running", "max_context", "max_generated"):
            value = getattr(self, name)
            optional = name in ("max_context", "max_generated")
            if not (optional and value is None) and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be an int of at least 1, got {value!r}")
        for name in ("seconds_per_step", "seconds_per_token"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} must be finite and at least 0, got {value!r}")
        if not isinstance(self.routing, Routing):
            raise ConfigError(f"routing must be a Routing, got {self.routing!r}")
        if self.max_running > self.token_budget:
            raise ConfigError(
                f"max_running must not exceed token_budget ({self.token_budget}), got {self.max_running}"
            )


@dataclass(frozen=True, slots=True)
class Work:
    """``tokens`` tokens of request number ``request`` of the trace, from position ``start`` of its sequence.

    A prefill chunk ends at most at the prompt's end; a decode is one token from there on.
    """

    request: int
    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """What all ranks do together from ``time`` (seconds) on; ``phases`` and ``work`` are by dp rank.

    A rank with a prefill chunk is PREFILL, one with decodes only is DECODE, one without work is IDLE.
    The work of a rank is its decodes, then its chunks. ``finished``: the requests whose last token comes out
    of this step, so that their KV cache can be freed after it.
    """

    index: int
    time: float
    phases: tuple[Phase, ...]
    work: tuple[tuple[Work, ...], ...]
    finished: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Tokens of each dp rank."""
        return tuple(sum(item.tokens for item in items) for items in self.work)

    @property
    def phase(self) -> Phase:
        """PREFILL if any rank prefills, else DECODE if any decodes, else IDLE."""
        return next(phase for phase in Phase if phase in self.phases)


def schedule(requests: Iterable[Request], config: SchedulerConfig) -> Iterator[Step]:
    """Yield steps until every request is finished; requests are taken as the clock reaches their arrival.

    The last prefill chunk yields the first generated token, so a request that generates g tokens takes g - 1
    decodes. A request can start in the first step that doesn't begin before its arrival. When nothing is
    left to do, the clock jumps to the next arrival; so no step is empty. Same requests, same steps.

    Raises ConfigError, on the way, for a request that arrives before the one it follows.
    """
    ranks = [_Rank() for _ in range(config.dp_size)]
    arriving = _in_order(requests)
    upcoming = next(arriving, None)
    now, index = 0.0, 0
    while upcoming is not None or any(rank.outstanding for rank in ranks):
        if upcoming is not None and not any(rank.outstanding for rank in ranks):
            now = max(now, upcoming[1].arrival)
        while upcoming is not None and upcoming[1].arrival <= now:
            _route(*upcoming, ranks, config)
            upcoming = next(arriving, None)
        phases, work = zip(*(rank.step(config) for rank in ranks), strict=True)
        step = Step(index, now, phases, work, tuple(done for rank in ranks for done in rank.retire()))
        yield step
        now += config.seconds_per_step + config.seconds_per_token * max(step.counts)
        index += 1


def sequence_tokens(request: Request, config: SchedulerConfig) -> int:
    """Return how many tokens of ``request`` are processed in all: its prompt, and all it generates but the last."""
    generated = min(request.generated, config.max_generated or request.generated)
    return _prompt(request, config) + generated - 1


def _prompt(request: Request, config: SchedulerConfig) -> int:
    return min(request.context, config.max_context or request.context)


def _in_order(requests: Iterable[Request]) -> Iterator[tuple[int, Request]]:
    latest = 0.0
    for index, request in enumerate(requests):
        if request.arrival < latest:
            raise ConfigError(
                f"requests[{index}] must not arrive before requests[{index - 1}] ({latest} s), "
                f"got {request.arrival} s"
            )
        latest = request.arrival
        yield index, request


def _route(index: int, request: Request, ranks: list[_Rank], config: SchedulerConfig) -> None:
    if config.routing is Routing.ROUND_ROBIN:
        rank = ranks[index % len(ranks)]
    else:
        rank = min(ranks, key=lambda rank: rank.outstanding)
    rank.add(_Job(index, _prompt(request, config), sequence_tokens(request, config)))


@dataclass(slots=True)
class _Job:
    """A request under way: of the ``total`` tokens to process, ``done`` are processed or in this step."""

    request: int
    prompt: int
    total: int
    done: int = 0

    def advance(self, tokens: int) -> Work:
        work = Work(self.request, self.done, tokens)
        self.done += tokens
        return work


@dataclass(slots=True)
class _Rank:
    """One rank's requests, in order of arrival: ``running`` (at most ``max_running``), then ``waiting``."""

    waiting: deque[_Job] = field(default_factory=deque)
    running: list[_Job] = field(default_factory=list)
    outstanding: int = 0

    def add(self, job: _Job) -> None:
        self.waiting.append(job)
        self.outstanding += job.total

    def step(self, config: SchedulerConfig) -> tuple[Phase, tuple[Work, ...]]:
        decoding = [job for job in self.running if job.done >= job.prompt]
        budget = config.token_budget - (len(decoding) if config.mix_phases else 0)
        chunks = self._prefill(budget, config.max_running)
        if chunks and not config.mix_phases:
            decoding = []
        work = (*(job.advance(1) for job in decoding), *chunks)
        self.outstanding -= sum(item.tokens for item in work)
        return Phase.PREFILL if chunks else Phase.DECODE if work else Phase.IDLE, work

    def _prefill(self, budget: int, max_running: int) -> list[Work]:
        chunks = []
        for job in self._prefilling(max_running):
            chunks.append(job.advance(min(budget, job.prompt - job.done)))
            budget -= chunks[-1].tokens
            if not budget:
                break
        return chunks

    def _prefilling(self, max_running: int) -> Iterator[_Job]:
        """Yield the requests that can prefill, in order of arrival, admitting each only when asked for it."""
        yield from [job for job in self.running if job.done < job.prompt]
        while self.waiting and len(self.running) < max_running:
            self.running.append(self.waiting.popleft())
            yield self.running[-1]

    def retire(self) -> list[int]:
        """Drop the requests that are done, and return their numbers."""
        finished = [job.request for job in self.running if job.done == job.total]
        self.running = [job for job in self.running if job.done < job.total]
        return finished
