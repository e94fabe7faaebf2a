"""From what the ranks found to one line for each contender of each case, and the figures over all cases."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

from rocm_dp.bench import bandwidth
from rocm_dp.bench.timing import Times
from rocm_dp.plan import PaddingMode, TokenPlan

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rocm_dp.bench.about import About
    from rocm_dp.bench.config import BenchConfig
    from rocm_dp.bench.rank import Finding, RankFindings


@dataclass(frozen=True, slots=True)
class Result:
    """One contender on one case: the slowest rank's times, in us; bandwidths in GB/s.

    ``rows`` and ``bytes``: real ones of all ranks; ``moved_rows``: of the buffer, padding included. Bandwidths are
    of ``graph_p50`` where there is one, else of ``eager_p50``, and so are ``over_floor_us`` and ``times_floor``.
    ``ratio_*``: to the best library path of the case. ``wrong``: elements, over all ranks and passes.
    """

    counts: str
    rows: int
    bytes: int
    type: str
    skew: float
    contender: str
    ours: bool
    moved_rows: int = 0
    eager_p10: float | None = None
    eager_p50: float | None = None
    eager_p90: float | None = None
    eager_p99: float | None = None
    graph_p10: float | None = None
    graph_p50: float | None = None
    graph_p90: float | None = None
    algbw: float | None = None
    busbw: float | None = None
    real_busbw: float | None = None
    ratio_eager: float | None = None
    ratio_graph: float | None = None
    floor_us: float | None = None
    over_floor_us: float | None = None
    times_floor: float | None = None
    wrong: int | None = None
    reason: str | None = None
    graph_reason: str | None = None

    @property
    def us(self) -> float | None:
        """The time that bandwidths are of."""
        return self.eager_p50 if self.graph_p50 is None else self.graph_p50


@dataclass(frozen=True, slots=True)
class Summary:
    """One of our transports: geometric means, over the cases that it could carry, of the ratios to the best."""

    transport: str
    cases: int
    ratio_eager: float | None
    ratio_graph: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """The whole run. ``receive_gb_s``: what copies from all its peers bring to a GPU."""

    about: About
    config: BenchConfig
    receive_gb_s: float | None
    results: tuple[Result, ...]
    summary: tuple[Summary, ...]

    @property
    def wrong(self) -> int:
        """All wrong elements."""
        return sum(result.wrong or 0 for result in self.results)

    @property
    def checked(self) -> int:
        """How many contenders and cases were compared with the reference."""
        return sum(result.wrong is not None for result in self.results)

    def as_dict(self) -> dict[str, object]:
        """Return everything as plain values for JSON."""
        return asdict(self)


def make_report(ranks: Sequence[RankFindings], config: BenchConfig) -> Report:
    """Join the findings of all ranks, which are in the same order on each."""
    receive = ranks[0].receive_gb_s
    joined = [_join(same, config, receive) for same in zip(*(rank.findings for rank in ranks), strict=True)]
    results: list[Result] = []
    for case in range(len(config.cases)):
        of_case = [result for at, result in joined if at == case]
        results += _with_ratios(sorted(of_case, key=lambda one: _place(one, config)))
    summary = [_summary(name, results) for name in config.transports]
    return Report(ranks[0].about, config, receive, tuple(results), tuple(summary))


def _join(same: Sequence[Finding], config: BenchConfig, receive: float | None) -> tuple[int, Result]:
    """Return the number of the case and what all ranks found of one contender: the slowest of each time."""
    first = same[0]
    counts = config.cases[first.case]
    plan = TokenPlan(counts, PaddingMode.SUM_LEN)
    eager, graph = _slowest(one.eager for one in same), _slowest(one.graph for one in same)
    wrong = [one.wrong for one in same if one.wrong is not None]
    timed = graph or eager
    figures = _figures(timed.p50, first.rows, plan, config) if timed else {}
    floor = _floors(timed.p50 if timed else None, counts, config, receive)
    return first.case, Result(
        counts="+".join(map(str, counts)),
        rows=plan.total,
        bytes=plan.total * config.row_bytes,
        type=config.dtype,
        skew=plan.skew,
        contender=first.name,
        ours=first.ours,
        moved_rows=first.rows,
        **_named("eager", eager, ("p10", "p50", "p90", "p99")),
        **_named("graph", graph, ("p10", "p50", "p90")),
        **figures,
        **floor,
        wrong=sum(wrong) if wrong else None,
        reason=first.reason,
        graph_reason=first.graph_reason,
    )


def _place(result: Result, config: BenchConfig) -> tuple[int, str]:
    """Where a contender stands: ours first, as asked for, whatever the order in which they were measured."""
    names = config.transports
    return names.index(result.contender) if result.ours else len(names), result.contender


def _named(way: str, times: Times | None, names: Sequence[str]) -> dict[str, float]:
    return {f"{way}_{name}": getattr(times, name) for name in names} if times else {}


def _slowest(times: Iterable[Times | None]) -> Times | None:
    found = [one for one in times if one is not None]
    if not found:
        return None
    return Times(*(max(getattr(one, field.name) for one in found) for field in fields(Times)))


def _figures(us: float, rows: int, plan: TokenPlan, config: BenchConfig) -> dict[str, float]:
    moved = rows * config.row_bytes
    return {
        "algbw": bandwidth.algbw(moved, us),
        "busbw": bandwidth.busbw(moved, us, config.ranks),
        "real_busbw": bandwidth.busbw(plan.total * config.row_bytes, us, config.ranks),
    }


def _floors(
    us: float | None, counts: tuple[int, ...], config: BenchConfig, receive: float | None
) -> dict[str, float]:
    if receive is None:
        return {}
    replicas = config.layout(0).replicas
    gather = config.verb == "gather"
    rows = bandwidth.gather_receives(counts) if gather else bandwidth.combine_receives(counts, replicas)
    floor = bandwidth.floor_us(rows * config.row_bytes, receive)
    if us is None or not floor:
        return {"floor_us": floor}
    return {"floor_us": floor, "over_floor_us": us - floor, "times_floor": us / floor}


def _with_ratios(results: Sequence[Result]) -> list[Result]:
    """Add to ours how long they take compared with the best library path, eager and in a graph."""
    best = {
        way: min((t for r in results if not r.ours and (t := getattr(r, f"{way}_p50")) is not None), default=None)
        for way in ("eager", "graph")
    }

    def ratio(result: Result, way: str) -> float | None:
        us, least = getattr(result, f"{way}_p50"), best[way]
        return us / least if result.ours and us is not None and least else None

    return [replace(r, ratio_eager=ratio(r, "eager"), ratio_graph=ratio(r, "graph")) for r in results]


def _summary(name: str, results: Sequence[Result]) -> Summary:
    ours = [result for result in results if result.ours and result.contender == name]
    return Summary(
        name,
        sum(result.us is not None for result in ours),
        bandwidth.geometric_mean(r.ratio_eager for r in ours if r.ratio_eager is not None),
        bandwidth.geometric_mean(r.ratio_graph for r in ours if r.ratio_graph is not None),
    )
