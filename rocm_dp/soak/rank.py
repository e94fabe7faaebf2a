"""What one rank of a soak does: step after step, sampled at quiet points; all it finds travels as notes."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rocm_dp.errors import ConfigError
from rocm_dp.exchange import TokenExchange
from rocm_dp.groups import Groups
from rocm_dp.layout import RankLayout
from rocm_dp.soak.capture import Replay
from rocm_dp.soak.hazards import SeedSystem
from rocm_dp.soak.inject import inject
from rocm_dp.soak.probes import limits_of, make_probe
from rocm_dp.soak.program import program
from rocm_dp.soak.work import ID_WIDTH, Rows, Worker
from rocm_dp.testing import note, rank_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_dp.soak.config import SoakConfig
    from rocm_dp.soak.program import SoakStep
    from rocm_dp.soak.sample import Probe

_TIMEOUT = timedelta(seconds=300)
_MOST_SAMPLES = 1000  # then every other interval: a run of days must not drown in samples
_EARLY = 5  # steps of a kind, with whose latency later ones are compared


@dataclass(frozen=True, slots=True)
class Started:
    """Sent once: why samplers are absent, the limits of the counters, the device."""

    absent: dict[str, str]
    limits: dict[str, float]
    device: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Sent at the end, also after an error: samplers that failed, and the types of objects that grew most.

    ``last``: all counters at the moment of an error, which is what a diagnosis needs; empty without one.
    """

    steps: int
    sampler_failures: tuple[str, ...]
    grown: tuple[tuple[str, int], ...]
    last: dict[str, float]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sent for each result that differs from the oracle."""

    text: str


class Window:
    """What is told of the steps since the last sample: their latency, and by how much they are later than early
    steps of the same kind, over the median of the kinds.
    """

    def __init__(self) -> None:
        self._early: dict[object, list[float]] = defaultdict(list)
        self._steps: list[tuple[SoakStep, float]] = []

    def note(self, step: SoakStep, seconds: float) -> None:
        """Note one step."""
        early = self._early[step.kind]
        if len(early) < _EARLY:
            early.append(seconds)
        self._steps.append((step, seconds))

    def take(self) -> dict[str, float]:
        """Return the counters of the window, which has a step at least, and start the next."""
        seconds = sorted(seconds for _, seconds in self._steps)
        rows = sum(step.plan.rows for step, _ in self._steps)
        early = {kind: median(found) for kind, found in self._early.items()}
        # What is added to every step is the same for all kinds; how many times longer they take is not.
        later = median(one - early[step.kind] for step, one in self._steps)
        found = {
            "latency.p50_ms": 1e3 * median(seconds),
            "latency.p99_ms": 1e3 * seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))],
            "latency.drift": 1 + later / max(median(early.values()), 1e-9),
            "program.wasted": 1 - sum(step.plan.total for step, _ in self._steps) / rows if rows else 0.0,
            "program.skew": sum(step.plan.skew for step, _ in self._steps) / len(self._steps),
        }
        self._steps.clear()
        return found


def run_rank(rank: int, config: SoakConfig) -> None:
    """Run the soak on this rank, sending Started, a Sample now and then, and Ended as notes."""
    if config.seed_system and rank_device().type != "cuda":
        raise ConfigError("--like-the-seed-system needs GPUs: record_stream does nothing to CPU tensors")
    with (
        _exchange(rank, config) as exchange,
        torch.inference_mode(),
        _frozen(),
        _replaying(exchange, config) as replay,
    ):
        if config.seed_system:
            _soak(exchange, config, SeedSystem(exchange))
        else:
            _soak(exchange, config, Worker(exchange, Rows(config, exchange.device, rank), replay))


@contextmanager
def _exchange(rank: int, config: SoakConfig) -> Iterator[TokenExchange]:
    """Make the exchange that lives as long as the soak, with everything reserved."""
    layout = RankLayout(rank, config.ranks, config.dp)
    with (
        Groups.create(layout, timeout=_TIMEOUT) as groups,
        TokenExchange(
            layout,
            groups,
            device=rank_device(),
            hidden=config.hidden,
            dtype=getattr(torch, config.dtype),
            max_rows=config.local_rows * config.dp,
            max_local_rows=config.local_rows,
        ) as exchange,
    ):
        exchange.reserve(batches=2, many=((config.hidden, exchange.dtype), (ID_WIDTH, torch.int32)))
        yield exchange


@contextmanager
def _frozen() -> Iterator[None]:
    """Leave what is alive by now out of every collection and count of objects."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _replaying(exchange: TokenExchange, config: SoakConfig) -> Iterator[Replay | None]:
    if exchange.device.type != "cuda" or config.seed_system:
        yield None
        return
    replay = Replay(exchange, config)
    try:
        yield replay
    finally:
        replay.close()


def _soak(exchange: TokenExchange, config: SoakConfig, worker: Worker | SeedSystem) -> None:
    probe, objects = make_probe(exchange)
    note(Started(dict(probe.absent), limits_of(exchange), _name(exchange.device)))
    leak = inject(config.inject if exchange.layout.rank == config.ranks - 1 else None, exchange)
    done, last = 0, dict[str, float]()
    try:
        for done in _steps(exchange, config, worker, probe):
            if leak is not None:
                leak.step(done)
    except Exception:
        last = probe.read(done).values
        raise
    finally:
        if leak is not None:
            leak.close()
        note(Ended(done, tuple(probe.failures), tuple(objects.grown()), last))


def _steps(exchange: TokenExchange, config: SoakConfig, worker: Worker | SeedSystem, probe: Probe) -> Iterator[int]:
    """Do the steps, yielding how many are done after each; sample now and then."""
    window, interval, samples = Window(), config.interval, 0
    deadline = time.monotonic() + 60 * config.minutes if config.minutes is not None else None
    began = time.perf_counter()
    for step in program(config):
        worker.do(step, check=step.index % config.check_every == 0)
        done = step.index + 1
        yield done
        window.note(step, time.perf_counter() - began)
        over = config.steps is not None and done >= config.steps
        if done % interval == 0 or over:
            _send_sample(exchange, probe, worker, done, window)
            samples += 1
            if samples % _MOST_SAMPLES == 0:
                interval *= 2
            if over or _any_rank_is_late(exchange, deadline):
                return
        began = time.perf_counter()


def _send_sample(
    exchange: TokenExchange, probe: Probe, worker: Worker | SeedSystem, done: int, window: Window
) -> None:
    """Sample at a quiet point: the last step is done, and nothing of it is left but what is kept."""
    if exchange.device.type == "cuda":
        # Not the device: that would also let finish what a leak keeps behind on a stream of its own.
        torch.cuda.current_stream(exchange.device).synchronize()
    for text in worker.take_mismatches():
        note(Mismatch(text))
    shown = {**window.take(), "program.checks": worker.checks, "program.waits": worker.waits}
    note(probe.read(done, shown.items()))


def _any_rank_is_late(exchange: TokenExchange, deadline: float | None) -> bool:
    """Whether the time is over on any rank: all must stop at the same step."""
    if deadline is None:
        return False
    late = torch.tensor([int(time.monotonic() > deadline)])
    dist.all_reduce(late, op=dist.ReduceOp.MAX, group=exchange.groups.cpu)
    return bool(late.item())


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
