"""What one rank does in ``rocm-dp bench gather`` and ``combine``: check every contender, then time it."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rocm_dp.bench.about import About, about
from rocm_dp.bench.capture import captured
from rocm_dp.bench.contenders import Contender, Refused, agreed, open_exchanges, our_contender
from rocm_dp.bench.inputs import Expected, Inputs, poison
from rocm_dp.bench.library import Site, combine_paths, gather_paths
from rocm_dp.bench.peer_copy import receive_bandwidth
from rocm_dp.bench.timing import Times, call_times, replay_times
from rocm_dp.errors import PeerRefusedError, TransportRefusedError
from rocm_dp.groups import Groups
from rocm_dp.options import Options
from rocm_dp.testing import note, rank_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_dp.bench.config import BenchConfig
    from rocm_dp.exchange import TokenExchange
    from rocm_dp.layout import RankLayout

_CALL_TIMEOUT = 300.0  # seconds for one collective, or less when the whole run has less


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rank found of one contender on one case. ``rows``: of the buffer that it moves, padding included."""

    case: int
    name: str
    ours: bool
    rows: int = 0
    wrong: int | None = None
    eager: Times | None = None
    graph: Times | None = None
    reason: str | None = None
    graph_reason: str | None = None


@dataclass(frozen=True, slots=True)
class RankFindings:
    """Everything from one rank. ``receive_gb_s``: what copies from all peers bring to rank 0; None if not known."""

    about: About
    findings: tuple[Finding, ...]
    receive_gb_s: float | None


def run_rank(rank: int, config: BenchConfig) -> RankFindings:
    """Measure every contender on every case; rank 0 sends (done, of how many) as notes."""
    with ranks_ready(config.layout(rank), config) as ready, torch.inference_mode():
        run = _Run(config, ready)
        wrong = run.check() if config.check else {}
        findings = [replace(one, wrong=run.total_wrong(one, wrong)) for one in run.time()]
        bandwidth = receive_bandwidth(config.ranks) if rank == 0 else None
        dist.barrier(group=ready.groups.cpu)
        return RankFindings(about(config.ranks), tuple(findings), bandwidth)


@dataclass(frozen=True, slots=True)
class Ready:
    """The groups of a run, that of this dp rank's ranks (None: it is alone), and the options of every exchange."""

    groups: Groups
    fellows: dist.ProcessGroup | None
    options: Options


@contextmanager
def ranks_ready(layout: RankLayout, config: BenchConfig) -> Iterator[Ready]:
    """Make the groups of a run; collective."""
    seconds = min(_CALL_TIMEOUT, config.timeout)
    timeout = timedelta(seconds=seconds)
    fellows = None
    with Groups.create(layout, timeout=timeout) as groups:
        if layout.replicas > 1:
            firsts = range(0, layout.world_size, layout.replicas)
            by_dp = [list(range(first, first + layout.replicas)) for first in firsts]
            fellows, _ = dist.new_subgroups_by_enumeration(by_dp, timeout=timeout)  # type: ignore[no-untyped-call]
        try:
            yield Ready(groups, fellows, Options(timeout=seconds))
        finally:
            if fellows is not None:
                dist.destroy_process_group(fellows)


def synchronize(device: torch.device) -> None:
    """Wait for the device; on the CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Run:
    def __init__(self, config: BenchConfig, ready: Ready) -> None:
        self._config, self._ready, self._device = config, ready, rank_device()
        layout = ready.groups.layout
        self._cases = [Inputs(config, layout, self._device, counts) for counts in config.cases]
        self._done = 0

    def check(self) -> dict[tuple[int, str], int]:
        """Return how many elements are wrong when every buffer was NaN before the call, by case and contender."""
        wrong: dict[tuple[int, str], int] = {}
        for case, contender, expected in self._contenders(poisoned=True):
            if isinstance(contender, Contender):
                for _ in range(1 if contender.spends_input else 2):
                    for tensor in contender.written:
                        poison(tensor)
                    got = self._first_call(contender)
                    if isinstance(got, Refused):
                        break
                    key = case, contender.name
                    wrong[key] = wrong.get(key, 0) + expected.wrong(got, contender.plan)
        return wrong

    def time(self) -> Iterator[Finding]:
        """Yield the times of every contender on every case; ``wrong`` is what was wrong after them."""
        for case, contender, expected in self._contenders(poisoned=False):
            at = Finding(case, contender.name, contender.ours)
            refused = contender if isinstance(contender, Refused) else self._first_call(contender)
            if isinstance(refused, Refused):
                yield replace(at, reason=refused.reason)
            elif isinstance(contender, Contender):
                yield self._timed(replace(at, rows=contender.plan.rows), contender, expected)

    def total_wrong(self, found: Finding, wrong: dict[tuple[int, str], int]) -> int | None:
        """Return all that was wrong of a finding, or None when nothing was checked."""
        if not self._config.check or found.reason is not None:
            return None
        return (found.wrong or 0) + wrong.get((found.case, found.name), 0)

    def _contenders(self, *, poisoned: bool) -> Iterator[tuple[int, Contender | Refused, Expected]]:
        """Yield all contenders of one case after the other, in random order that is the same on every rank."""
        config, groups = self._config, self._ready.groups
        options = [replace(self._ready.options, transport=name, poison=poisoned) for name in config.transports]
        with open_exchanges(self._cases, groups, options) as exchanges:
            for case, inputs in enumerate(self._cases):
                contenders = self._of_case(inputs, exchanges)
                random.Random(f"{config.seed}, {case}").shuffle(contenders)
                expected = Expected(config.verb, inputs)
                for contender in contenders:
                    yield case, contender, expected
                    self._done += 1
                    if groups.layout.rank == 0:
                        note((self._done, len(contenders) * len(self._cases) * (1 + config.check)))

    def _of_case(self, inputs: Inputs, exchanges: dict[str, TokenExchange | Refused]) -> list[Contender | Refused]:
        verb = self._config.verb
        site = Site(inputs, self._ready.groups.world, self._ready.fellows)
        paths = gather_paths(site) if verb == "gather" else combine_paths(site)
        ours = [our_contender(verb, name, exchange, inputs) for name, exchange in exchanges.items()]
        return [*paths, *ours]

    def _first_call(self, contender: Contender) -> torch.Tensor | Refused:
        """Return the result of a call, or why some rank can't make it. Our own errors, but refusals, are raised."""
        reason, got = None, None
        try:
            got = contender.call()
            synchronize(self._device)
        except (TransportRefusedError, PeerRefusedError) as error:
            reason = str(error)
        except (RuntimeError, ValueError, TypeError) as error:
            if contender.ours:
                raise
            reason = str(error).partition("\n")[0]
        reason = agreed(reason, self._ready.groups.cpu)
        if got is None or reason is not None:
            return Refused(contender.name, reason or "no result", contender.ours)
        return got

    def _timed(self, at: Finding, contender: Contender, expected: Expected) -> Finding:
        config = self._config
        checked = config.check and not contender.spends_input
        self._align()
        eager = call_times(contender.call, self._device, warmup=config.warmup, repeats=config.iters)
        wrong = expected.wrong(contender.call(), contender.plan) if checked else 0
        why_not = "no GPU" if self._device.type != "cuda" else None if config.calls else "not asked for"
        if why_not is not None:
            return replace(at, eager=eager, wrong=wrong, graph_reason=why_not)
        self._align()
        with captured(contender.call, config.calls) as capture:
            reason = agreed(capture.reason, self._ready.groups.cpu)
            if reason is not None:
                return replace(at, eager=eager, wrong=wrong, graph_reason=reason)
            self._align()
            graph = replay_times(capture.graph, config.calls, repeats=config.iters)
            if checked:
                for tensor in contender.written or capture.results:
                    poison(tensor)
                self._align()
                capture.graph.replay()
                wrong += expected.wrong(capture.results[-1], contender.plan)
            # Other ranks may still read what a graph that is given up would write.
            self._align()
        return replace(at, eager=eager, graph=graph, wrong=wrong)

    def _align(self) -> None:
        """Let all ranks go on together, their devices idle."""
        synchronize(self._device)
        dist.barrier(group=self._ready.groups.cpu)
