"""How long the layers of one case take with one contender: alone, in turn, and overlapped. Collective.

``measure`` needs no more than a Forward, which ``overlap_ways.our_way`` makes of an open exchange with two reserved
batches; ``slowest`` joins what the ranks measured.
"""

from __future__ import annotations

import statistics
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING

import torch.distributed as dist

from rocm_dp.bench.capture import captured
from rocm_dp.bench.contenders import Refused, agreed
from rocm_dp.bench.forward import run_overlapped, run_serial
from rocm_dp.bench.inputs import wrong_elements
from rocm_dp.bench.overlap_comm import NoComm
from rocm_dp.bench.rank import synchronize
from rocm_dp.bench.timeline import MarkedCompute, Marks, new_clock
from rocm_dp.bench.timing import run_us
from rocm_dp.errors import PeerRefusedError, TransportRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from rocm_dp.bench.forward import Forward

    Run = Callable[[], object]


class Mode(Enum):
    """How a forward is launched."""

    EAGER = "eager"
    GRAPH = "graph"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is done: ``warmup`` forwards, then ``repeats`` that medians are of; whether results are checked."""

    warmup: int = 3
    repeats: int = 10
    check: bool = True


@dataclass(frozen=True, slots=True)
class OverlapTimes:
    """Microseconds of a layer, both halves together, medians over the repeats of this rank.

    ``compute`` and ``comm``: each alone; ``serial``: the first half, then the second; ``overlap``: in turns;
    ``whole``: the batch not split.
    ``host``: what it takes the host to launch the overlapped layer, the device not waited for; None in a graph.
    ``slowdown``: time inside the compute stages of the overlapped run over the same where nothing moves; None if
    not to be had. ``wrong``: elements of the overlapped result that differ in any bit from the serial one, or are
    no finite number in either; None if not checked.
    """

    compute: float
    comm: float
    serial: float
    overlap: float
    whole: float
    host: float | None = None
    slowdown: float | None = None
    wrong: int | None = None


def slowest(ranks: Sequence[OverlapTimes]) -> OverlapTimes:
    """Return the largest of each value over the ranks, and all wrong elements."""
    values: dict[str, list[float]] = {
        field.name: [value for one in ranks if (value := getattr(one, field.name)) is not None]
        for field in fields(OverlapTimes)
    }
    wrong = [one.wrong for one in ranks if one.wrong is not None]
    most = {name: max(found, default=None) for name, found in values.items() if name != "wrong"}
    return OverlapTimes(**most, wrong=sum(wrong) if wrong else None)  # type: ignore[arg-type]


def measure(forward: Forward, mode: Mode, effort: Effort, cpu: dist.ProcessGroup) -> OverlapTimes | Refused:
    """Measure ``forward``, the same on all ranks of the gloo group ``cpu``, or say why it can't run or be captured.

    The exchange behind it is open and keeps its buffers. Our own errors, but refusals, are raised.
    """
    return _Measurement(forward, mode, effort, cpu).run()


class _Measurement:
    def __init__(self, forward: Forward, mode: Mode, effort: Effort, cpu: dist.ProcessGroup) -> None:
        self._forward, self._mode, self._effort, self._cpu = forward, mode, effort, cpu
        self._device = forward.device

    def run(self) -> OverlapTimes | Refused:
        forward, runs = self._forward, self._forward.runs()
        reason = agreed(self._first(runs), self._cpu)
        if reason is not None:
            return Refused(forward.name, reason, forward.ours)
        times: dict[str, float] = {}
        outcomes: dict[str, list[torch.Tensor]] = {}
        for name, run in runs.items():
            with self._launched(run) as (launch, reason):
                if reason is not None:
                    return Refused(forward.name, reason, forward.ours)
                times[name] = self._timed(launch)
                if self._effort.check and name in ("serial", "overlap"):
                    outcomes[name] = forward.outcome(launch)
                # Other ranks may still read what a graph that is given up would write.
                self._align()
        host = self._host(runs["overlap"]) if self._mode is Mode.EAGER else None
        return OverlapTimes(**times, host=host, slowdown=self._slowdown(), wrong=_wrong(outcomes))

    def _first(self, runs: Mapping[str, Run]) -> str | None:
        """Run everything once; return why that is impossible here."""
        self._align()
        try:
            for run in runs.values():
                run()
            synchronize(self._device)
        except (TransportRefusedError, PeerRefusedError) as error:
            return str(error)
        except (RuntimeError, ValueError, TypeError) as error:
            if self._forward.ours:
                raise
            return str(error).partition("\n")[0]
        return None

    @contextmanager
    def _launched(self, run: Run) -> Iterator[tuple[Run, str | None]]:
        """Give what launches ``run`` in this mode, and the reason why some rank can't capture it."""
        self._align()
        if self._mode is Mode.EAGER:
            yield run, None
            return
        with captured(run, 1) as capture:
            yield capture.graph.replay, agreed(capture.reason, self._cpu)

    def _timed(self, launch: Run) -> float:
        self._align()
        for _ in range(self._effort.warmup):
            launch()
        us = run_us(launch, self._device, repeats=self._effort.repeats) / self._forward.depth
        self._align()
        return us

    def _host(self, run: Run) -> float:
        times = []
        for _ in range(self._effort.repeats):
            self._align()
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e6)
        self._align()
        return statistics.median(times) / self._forward.depth

    def _slowdown(self) -> float | None:
        """Return the time inside compute stages while rows move over the same while none do."""
        layers, depth = self._forward.layers(), self._forward.depth
        silent, comm = NoComm(self._forward.halves), self._forward.comm
        alone = self._busy(lambda marks: run_serial(depth, MarkedCompute(layers, marks), silent))
        beside = self._busy(lambda marks: run_overlapped(depth, MarkedCompute(layers, marks), comm))
        return beside / alone if alone and beside else None

    def _busy(self, run: Callable[[Marks], None]) -> float | None:
        """Return the median time inside the compute stages of a forward; None where a graph can't tell."""
        in_graph = self._mode is Mode.GRAPH
        marks = Marks(new_clock(self._device, in_graph=in_graph))

        def eager() -> None:
            marks.clear()
            run(marks)

        with self._launched(eager) as (launch, reason):
            if reason is not None:
                return None
            times = []
            for _ in range(self._effort.repeats):
                self._align()
                launch()
                self._align()
                # The runtime may take events in a graph and then not time them.
                with suppress(RuntimeError, ValueError) if in_graph else nullcontext():
                    times.append(marks.busy_us())
        return statistics.median(times) if times else None

    def _align(self) -> None:
        """Let all ranks go on together, their devices idle."""
        synchronize(self._device)
        dist.barrier(group=self._cpu)


def _wrong(outcomes: dict[str, list[torch.Tensor]]) -> int | None:
    if not outcomes:
        return None
    pairs = list(zip(outcomes["serial"], outcomes["overlap"], strict=True))
    differ = sum(wrong_elements(overlap, serial) for serial, overlap in pairs)
    return differ + sum(int((~half.isfinite()).sum()) for pair in pairs for half in pair)
