"""Which transport carries a call, whether overlap pays, and why. Pure: the same answer on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rocm_dp.errors import ConfigError, TransportRefusedError
from rocm_dp.measured import MeasuredTable
from rocm_dp.plan import Phase, TokenPlan

if TYPE_CHECKING:
    from rocm_dp.graphs import GraphPlan

NAMES = ("peer", "copy_engine", "aiter", "all_gather", "all_gather_v", "all_reduce")
OVER_MEMORY = ("peer", "copy_engine")
NEED_PROOF = (*OVER_MEMORY, "aiter")  # trusted only after they passed a self-test on this very machine
LAST = "all_reduce"  # whatever was measured: it needs room for all rows where the others need a dp rank's
_HALVES = 2
# Rows a dp rank, on average, of a prefill that is run in halves where nothing was measured. On 2 x H200 3086 took 9
# to 19 % less time so, 47 took 1.6 times as long; what lies between is left alone: docs/overlap.md.
_LARGE = 2048
_FIRST = "first in the table that can"


@dataclass(frozen=True, slots=True)
class Facts:
    """What the ranks agreed on at start-up.

    ``replicas``: ranks that share the rows of one dp rank. ``qualified``: the transports that passed their
    self-test on this machine; ``unqualified``: those that did not, with the reason.
    """

    replicas: int = 1
    qualified: tuple[str, ...] = ()
    unqualified: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Use:
    """How a call will run: beside the computation of the other half (``overlap``), and within a ``graph``."""

    overlap: bool = False
    graph: bool = False


SERIAL = Use()


@dataclass(frozen=True, slots=True)
class Table:
    """Transports in order of preference; the first that does not refuse is chosen. ``measured`` comes before that.

    The built-in order: kernels over peer memory where they passed their self-test, and copies by DMA in a prefill
    that is overlapped, where kernels would take compute units away. Otherwise equal sizes take the equal-size
    collective, aiter's where it passed its self-test; failing that only the real rows are moved, and an all-reduce,
    which moves every row of the buffer twice, comes last.
    """

    order: tuple[str, ...] = NAMES
    measured: MeasuredTable = field(default=MeasuredTable())

    def __post_init__(self) -> None:
        unknown = set(self.order) - set(NAMES)
        if unknown or not self.order:
            raise ConfigError(f"transports must be among {NAMES}, got {self.order}")

    def needs(self, name: str) -> bool:
        """Whether transport ``name`` must be tested: it may be chosen, or does a part of what may."""
        return name in self.order or (name == "peer" and "copy_engine" in self.order)

    def ranked(self, plan: TokenPlan | GraphPlan, use: Use) -> list[tuple[str, str]]:
        """Return the transports, the best first, and what speaks for each."""
        times = self.times(plan, use)
        order = self.order
        if use.overlap and isinstance(plan, TokenPlan) and plan.phase is Phase.PREFILL:
            order = tuple(sorted(order, key=lambda name: name != "copy_engine"))
        known = [name for name in order if (name, use.overlap) in times and name != LAST]
        # What was measured changes places with what else was; what was not keeps its own.
        by_time = iter(sorted(known, key=lambda name: times[name, use.overlap]))
        ranked = [next(by_time) if name in known else name for name in order]
        return [
            (name, f"measured: {times[name, use.overlap]:.1f} us a layer" if name in known else _FIRST)
            for name in ranked
        ]

    def times(self, plan: TokenPlan | GraphPlan, use: Use) -> dict[tuple[str, bool], float]:
        """Return what was measured for steps like this plan's; overlapped, the plan is one half of a step."""
        halves = _HALVES if use.overlap else 1
        if isinstance(plan, TokenPlan):
            return self.measured.times(plan.total * halves, plan.skew, graph=use.graph)
        return self.measured.times(plan.rows * halves, 1.0, graph=True)


@dataclass(frozen=True, slots=True)
class TransportVerdict:
    """What ``explain`` says of one transport: whether it is chosen, and why or why not."""

    name: str
    chosen: bool
    reason: str


@dataclass(frozen=True, slots=True)
class OverlapVerdict:
    """Whether running a step as two halves that take turns pays, and why or why not."""

    pays: bool
    reason: str


def refusal(name: str, plan: TokenPlan | GraphPlan, facts: Facts) -> str | None:
    """Return why transport ``name`` can't carry this plan, or None when it can."""
    if name in NEED_PROOF and name not in facts.qualified:
        return dict(facts.unqualified).get(name, "has not passed its self-test here")
    if name == "peer":
        return None
    if not isinstance(plan, TokenPlan):
        return "needs counts on the host"
    if name in {"aiter", "all_gather"}:
        if len(set(plan.sizes)) > 1:
            return f"needs equal sizes, the dp ranks have {plan.sizes}"
        if plan.sizes[0] % facts.replicas:
            return f"needs sizes divisible by the {facts.replicas} ranks of a dp rank, got {plan.sizes[0]}"
    return None


def choose(
    plan: TokenPlan | GraphPlan, facts: Facts, table: Table, use: Use = SERIAL
) -> tuple[TransportVerdict, ...]:
    """Judge every transport of ``table`` for this plan, in order of preference; at most one is chosen."""
    verdicts: list[TransportVerdict] = []
    chosen: str | None = None
    for name, reason in table.ranked(plan, use):
        no = refusal(name, plan, facts)
        if no is not None:
            verdicts.append(TransportVerdict(name, chosen=False, reason=no))
        elif chosen is None:
            chosen = name
            verdicts.append(TransportVerdict(name, chosen=True, reason=reason))
        else:
            verdicts.append(TransportVerdict(name, chosen=False, reason=f"could, but {chosen} comes first"))
    return tuple(verdicts)


def chosen_name(verdicts: tuple[TransportVerdict, ...]) -> str:
    """Return the chosen transport's name; raise TransportRefusedError with every reason when none was."""
    for verdict in verdicts:
        if verdict.chosen:
            return verdict.name
    raise TransportRefusedError("; ".join(f"{verdict.name} {verdict.reason}" for verdict in verdicts))


def overlap_verdict(plan: TokenPlan | GraphPlan, facts: Facts, table: Table, *, graph: bool) -> OverlapVerdict:
    """Say whether a step of ``plan`` is faster as two halves, one computing while the other's rows are under way.

    By what was measured for this use, if anything was. Otherwise a large prefill is whose rows can go by copies:
    halves of few rows read the weights twice for nothing, and kernels beside computation take its compute units.
    """
    if isinstance(plan, TokenPlan) and plan.total < _HALVES:
        return OverlapVerdict(pays=False, reason="there is nothing to split")
    times = table.times(plan, Use(graph=graph))
    names = [name for name in table.order if name != LAST and refusal(name, plan, facts) is None]
    able = {kind: us for kind, us in times.items() if kind[0] in names}
    whole = min((us for (_, overlapped), us in able.items() if not overlapped), default=None)
    halves = min((us for (_, overlapped), us in able.items() if overlapped), default=None)
    if whole is not None and halves is not None:
        return OverlapVerdict(halves < whole, f"measured: {halves:.1f} us a layer in halves, {whole:.1f} at once")
    large = f"a prefill of {_LARGE} rows a dp rank and more"
    if not isinstance(plan, TokenPlan) or plan.phase is not Phase.PREFILL or plan.total < _LARGE * len(plan.counts):
        return OverlapVerdict(pays=False, reason=f"not measured here: only {large} is split then")
    if "copy_engine" not in names:
        return OverlapVerdict(pays=False, reason="not measured here: only what can go by copy_engine is split then")
    return OverlapVerdict(pays=True, reason=f"not measured here: {large} is split then")
