"""What one rank does in ``rocm-dp tune``: time a layer over each transport, whole and in halves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from rocm_dp.bench.contenders import Refused, agreed, open_exchanges
from rocm_dp.bench.overlap_layers import make_weights
from rocm_dp.bench.overlap_measure import Effort, Mode, OverlapTimes, measure, slowest
from rocm_dp.bench.overlap_rank import IN_FLIGHT, case_inputs
from rocm_dp.bench.overlap_ways import Case, our_way
from rocm_dp.bench.rank import ranks_ready
from rocm_dp.measured import Measured, MeasuredTable
from rocm_dp.testing import note, rank_device
from rocm_dp.tuned import path_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rocm_dp.bench.overlap_config import TuneConfig
    from rocm_dp.bench.rank import Ready
    from rocm_dp.exchange import TokenExchange


@dataclass(frozen=True, slots=True)
class Timed:
    """One transport on one case in one mode."""

    rows: int
    skew: float
    graph: bool
    name: str
    times: OverlapTimes


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Everything from one rank: where the table of this machine belongs, what was timed, and what was refused."""

    path: str
    timed: tuple[Timed, ...]
    refused: tuple[str, ...]


def run_tune(rank: int, config: TuneConfig) -> RankTimes:
    """Time every transport on every case in every mode; rank 0 sends (done, of how many) as notes."""
    with ranks_ready(config.layout(rank), config) as ready, torch.inference_mode():
        device = rank_device()
        inputs = [case_inputs(config, ready.groups.layout, device, pair) for pair in config.pairs]
        weights = make_weights(inputs[0][0], config.intermediate)
        options = replace(ready.options, max_in_flight=IN_FLIGHT, table=None)
        each = [replace(options, transport=name) for name in config.transports]
        timed: list[Timed] = []
        refused: list[str] = []
        with open_exchanges([one for case in inputs for one in case], ready.groups, each, batches=2) as exchanges:
            for index, (skew, parts) in enumerate(zip(config.skews, inputs, strict=True)):
                for found in _of_case(skew, Case(parts, weights, config.layers), exchanges, config, ready):
                    if isinstance(found, Timed):
                        timed.append(found)
                    else:
                        refused.append(found)
                if rank == 0:
                    note((index + 1, len(inputs)))
        path = path_for(ready.groups.layout, device, config.hidden, inputs[0][0].dtype)
        return RankTimes(str(path), tuple(timed), tuple(dict.fromkeys(refused)))


def _of_case(
    skew: float,
    case: Case,
    exchanges: dict[str, TokenExchange | Refused],
    config: TuneConfig,
    ready: Ready,
) -> Iterator[Timed | str]:
    on_gpu = case.inputs[0].device.type == "cuda" and config.calls
    effort, rows = Effort(config.warmup, config.iters), sum(case.inputs[-1].counts)
    for name, exchange in exchanges.items():
        way = our_way(name, exchange, case)
        for mode in (Mode.EAGER, Mode.GRAPH) if on_gpu else (Mode.EAGER,):
            found = way if isinstance(way, Refused) else measure(way, mode, effort, ready.groups.cpu)
            if isinstance(found, Refused):
                yield f"{name}, {mode.value}: {found.reason}"
            elif agreed("wrong" if found.wrong else None, ready.groups.cpu):
                yield f"{name}, {mode.value}: overlapped results differ from serial ones"
            else:
                yield Timed(rows, skew, mode is Mode.GRAPH, name, found)


def table_of(ranks: Sequence[RankTimes]) -> MeasuredTable:
    """Join what the ranks timed, the slowest of them counting."""
    found: dict[tuple[bool, int, float], list[tuple[str, bool, float]]] = {}
    for same in zip(*(rank.timed for rank in ranks), strict=True):
        first, times = same[0], slowest([one.times for one in same])
        kinds = found.setdefault((first.graph, first.rows, first.skew), [])
        kinds += [(first.name, False, times.whole), (first.name, True, times.overlap)]
    return MeasuredTable(tuple(Measured(*where, tuple(kinds)) for where, kinds in found.items()))
