"""What one rank does in ``rocm-dp bench overlap``."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rocm_dp.bench.about import About, about
from rocm_dp.bench.contenders import Refused, open_exchanges
from rocm_dp.bench.inputs import Inputs
from rocm_dp.bench.overlap_config import pair_name
from rocm_dp.bench.overlap_layers import make_weights
from rocm_dp.bench.overlap_measure import Effort, Mode, OverlapTimes, measure
from rocm_dp.bench.overlap_ways import Case, Way, ways
from rocm_dp.bench.rank import ranks_ready
from rocm_dp.bench.timeline import Span, overlapped_spans
from rocm_dp.platform import hardware_queues
from rocm_dp.testing import note, rank_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rocm_dp.bench.forward import Forward
    from rocm_dp.bench.overlap_config import OverlapConfig, Pair
    from rocm_dp.bench.rank import Ready
    from rocm_dp.exchange import TokenExchange
    from rocm_dp.layout import RankLayout

IN_FLIGHT = 2048  # records: a deep forward may be launched whole without a wait, and is waited for before the next


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rank found of one contender on one case in one mode: times, or the reason why there are none.

    ``pays``: whether the library would overlap; None where it was not asked.
    """

    case: int
    name: str
    ours: bool
    mode: str
    times: OverlapTimes | None = None
    pays: bool | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class RankFindings:
    """Everything from one rank. ``hw_queues``: as its environment tells; ``forwards``: the stages of one forward of
    each contender and case, by name.
    """

    about: About
    hw_queues: int
    findings: tuple[Finding, ...]
    forwards: tuple[tuple[str, tuple[Span, ...]], ...] = ()


def run_rank(rank: int, config: OverlapConfig) -> RankFindings:
    """Measure every contender on every case in every mode; rank 0 sends (done, of how many) as notes."""
    with ranks_ready(config.layout(rank), config) as ready, torch.inference_mode():
        run = _Run(config, ready)
        findings = tuple(run.findings())
        dist.barrier(group=ready.groups.cpu)
        forwards = tuple(run.forwards) if rank == 0 else ()
        return RankFindings(about(config.ranks), hardware_queues(), findings, forwards)


class _Run:
    def __init__(self, config: OverlapConfig, ready: Ready) -> None:
        self._config, self._ready, self._device = config, ready, rank_device()
        self._modes = [Mode.EAGER, Mode.GRAPH] if self._device.type == "cuda" and config.calls else [Mode.EAGER]
        self._effort = Effort(config.warmup, config.iters, config.check)
        self.forwards: list[tuple[str, tuple[Span, ...]]] = []
        self._done = 0

    def findings(self) -> Iterator[Finding]:
        """Yield what is found of all contenders of one case after the other."""
        config, groups = self._config, self._ready.groups
        inputs = [case_inputs(config, groups.layout, self._device, pair) for pair in config.pairs]
        weights = make_weights(inputs[0][0], config.intermediate)
        options = replace(self._ready.options, max_in_flight=IN_FLIGHT)
        each = [replace(options, transport=name) for name in config.transports]
        each += [options] if config.auto else []
        stream = _stream_beside(self._device)
        with open_exchanges([one for case in inputs for one in case], groups, each, batches=2) as exchanges:
            for index, parts in enumerate(inputs):
                case = Case(parts, weights, config.layers)
                yield from self._of_case(index, case, exchanges, stream)

    def _of_case(
        self,
        index: int,
        case: Case,
        exchanges: dict[str, TokenExchange | Refused],
        stream: torch.cuda.Stream | None,
    ) -> Iterator[Finding]:
        """Yield what is found of one case, in random order that is the same on every rank."""
        contenders = ways(case, exchanges, self._ready, stream)
        random.Random(f"{self._config.seed}, {index}").shuffle(contenders)
        for way in contenders:
            yield from self._of_way(index, way)
            self._done += 1
            if self._ready.groups.layout.rank == 0:
                note((self._done, len(contenders) * len(self._config.pairs)))

    def _of_way(self, index: int, way: Way) -> Iterator[Finding]:
        made = way.make()
        for mode in self._modes:
            at = Finding(index, way.name, way.ours, mode.value)
            found = self._measured(made, mode)
            if isinstance(found, Refused):
                yield replace(at, reason=found.reason)
                continue
            pays = None if isinstance(made, Refused) or made.pays is None else made.pays[mode is Mode.GRAPH]
            yield replace(at, times=found, pays=pays)
            if self._config.trace and mode is Mode.EAGER and not isinstance(made, Refused):
                name = f"{pair_name(self._config.pairs[index])}: {way.name}"
                self.forwards.append((name, tuple(overlapped_spans(made))))

    def _measured(self, made: Forward | Refused, mode: Mode) -> OverlapTimes | Refused:
        if isinstance(made, Refused):
            return made
        return measure(made, mode, self._effort, self._ready.groups.cpu)


def case_inputs(
    config: OverlapConfig, layout: RankLayout, device: torch.device, pair: Pair
) -> tuple[Inputs, Inputs, Inputs]:
    """Return the inputs of both halves of a case, and of the batch that was not split."""
    whole = tuple(map(sum, zip(*pair, strict=True)))
    first, second, both = (Inputs(config, layout, device, counts) for counts in (*pair, whole))
    return first, second, both


def _stream_beside(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream for the library's calls, of as high a priority as ours; None on the CPU."""
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
