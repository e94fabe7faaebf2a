"""``rocm-dp bench host``: what one eager call costs the host, the device not waited for."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rocm_dp.bench.about import About, about
from rocm_dp.bench.contenders import Refused, agreed, open_exchanges, plan_for, refusal
from rocm_dp.bench.inputs import Inputs
from rocm_dp.bench.library import Site, combine_paths, gather_paths
from rocm_dp.bench.rank import ranks_ready, synchronize
from rocm_dp.errors import PeerRefusedError, TransportRefusedError
from rocm_dp.testing import note, rank_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rocm_dp.bench.config import BenchConfig
    from rocm_dp.exchange import TokenExchange
    from rocm_dp.plan import TokenPlan

_MANY = 8  # experts a token: ids and weights of gather_many
_IN_FLIGHT = 4095  # the most records that an exchange may be told to let in flight: then it waits for none
_WAITS = (TransportRefusedError, PeerRefusedError)


@dataclass(frozen=True, slots=True)
class HostCost:
    """Microseconds of host time for one call of ``what``: the median, least and most over the repeats."""

    counts: str
    what: str
    ours: bool
    p50: float | None = None
    least: float | None = None
    most: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class HostFindings:
    """Everything from one rank."""

    about: About
    costs: tuple[HostCost, ...]


@dataclass(frozen=True, slots=True)
class _Issue:
    """What is issued again and again; ``refused``: why it can't be."""

    what: str
    call: Callable[[], object]
    ours: bool = False
    refused: str | None = None


def run_host(rank: int, config: BenchConfig) -> HostFindings:
    """Measure every call on every case; rank 0 sends (done, of how many) as notes."""
    costs: list[HostCost] = []
    with ranks_ready(config.layout(rank), config) as ready, torch.inference_mode():
        cases = [Inputs(config, ready.groups.layout, rank_device(), counts) for counts in config.cases]
        options = [replace(ready.options, transport=name, max_in_flight=_IN_FLIGHT) for name in config.transports]
        with open_exchanges(cases, ready.groups, options) as exchanges:
            for inputs in cases:
                site = Site(inputs, ready.groups.world, ready.fellows)
                issues = [*_ours(exchanges, inputs), *_library(site), *_runtime(inputs)]
                for issue in issues:
                    costs.append(_cost(issue, inputs, ready.groups.cpu))
                    if rank == 0:
                        note((len(costs), len(issues) * len(cases)))
        return HostFindings(about(config.ranks), tuple(costs))


def join_costs(ranks: Sequence[HostFindings]) -> list[HostCost]:
    """Return each cost on the rank where its median is the highest."""
    return [max(same, key=lambda one: one.p50 or 0.0) for same in zip(*(rank.costs for rank in ranks), strict=True)]


def _ours(exchanges: dict[str, TokenExchange | Refused], inputs: Inputs) -> Iterator[_Issue]:
    local = inputs.local()
    count, device = local.shape[0], inputs.device
    ids = torch.zeros(count, _MANY, dtype=torch.int32, device=device)
    many = (local, ids, torch.zeros(count, _MANY, device=device))
    for name, found in exchanges.items():
        plan = plan_for(name, inputs)
        partial = inputs.partial(plan)
        refused = found.reason if isinstance(found, Refused) else refusal(found, plan)
        if isinstance(found, Refused) or refused is not None:
            yield _Issue(name, _nothing, ours=True, refused=refused)
            continue
        calls = _verbs(found, plan, local, partial, many)
        yield from (_Issue(f"{name}: {verb}", call, ours=True) for verb, call in calls.items())


def _verbs(
    exchange: TokenExchange,
    plan: TokenPlan,
    local: torch.Tensor,
    partial: torch.Tensor,
    many: Sequence[torch.Tensor],
) -> dict[str, Callable[[], object]]:
    return {
        "gather": lambda: exchange.gather(local, plan),
        "combine": lambda: exchange.combine(partial, plan),
        "gather_async + wait": lambda: exchange.gather_async(local, plan).wait(),
        "combine_async + wait": lambda: exchange.combine_async(partial, plan).wait(),
        "gather_many": lambda: exchange.gather_many(many, plan),
    }


def _library(site: Site) -> Iterator[_Issue]:
    for verb, paths in (("gather", gather_paths), ("combine", combine_paths)):
        yield from (_Issue(f"{verb} by {path.name}", path.call) for path in paths(site))


def _runtime(inputs: Inputs) -> Iterator[_Issue]:
    """What the runtime charges for the pieces that a call is made of."""
    rows, refused = sum(inputs.counts), None if inputs.device.type == "cuda" else "no GPU"
    held: list[torch.cuda.Event] = []

    def first_record() -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()

    def record_again() -> None:
        if not held:
            held.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        held[0].record()

    yield _Issue("event made and recorded", first_record, refused=refused)
    yield _Issue("event recorded again", record_again, refused=refused)
    yield _Issue("torch.empty", lambda: inputs.empty(rows))


def _nothing() -> None:
    pass


def _cost(issue: _Issue, inputs: Inputs, cpu: dist.ProcessGroup) -> HostCost:
    """Time ``calls`` calls in a row, the device idle before and waited for after; all ranks together."""
    config, device = inputs.config, inputs.device
    blank = HostCost("+".join(map(str, inputs.counts)), issue.what, issue.ours)
    reason = issue.refused or agreed(_warm_up(issue, config.warmup, device), cpu)
    if reason is not None:
        return replace(blank, reason=reason)
    times = []
    for _ in range(config.iters):
        dist.barrier(group=cpu)
        start = time.perf_counter()
        for _ in range(config.calls):
            issue.call()
        times.append((time.perf_counter() - start) * 1e6 / config.calls)
        synchronize(device)
    return replace(blank, p50=statistics.median(times), least=min(times), most=max(times))


def _warm_up(issue: _Issue, calls: int, device: torch.device) -> str | None:
    try:
        for _ in range(calls):
            issue.call()
        synchronize(device)
    except (RuntimeError, ValueError, TypeError) as error:
        if issue.ours and not isinstance(error, _WAITS):
            raise
        return str(error).partition("\n")[0]
    return None
