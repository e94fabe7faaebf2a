"""One plan on all ranks, or a named error: the votes of a step in one packed collective."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex

from rocm_dp.control import Op, check_same
from rocm_dp.errors import ConfigError, RankMismatchError
from rocm_dp.plan import MAX_ROWS, PaddingMode, Phase, TokenPlan, choose_padding, digest64

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rocm_dp.groups import Groups
    from rocm_dp.layout import RankLayout

_NOT_AN_INT = -(2**63)
# What every rank must say alike; the rest of a packet are votes.
_SHARED = ("dp_size", "align", "max_count", "padding", "hybrid_ssm", "sum_len_in_graphs", "collectives")


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks agreed on for one step: ``plan``, and whether all overlap and all replay a graph."""

    plan: TokenPlan
    overlap: bool
    graph: bool


@dataclass(frozen=True, slots=True)
class StepRules:
    """How a step's plan is made from the votes; must be equal on all ranks.

    ``padding``: force a mode (None: ``choose_padding`` decides, with ``hybrid_ssm`` and ``sum_len_in_graphs``).
    ``align``: rows are rounded up to it (None: the ranks that share a dp rank's rows, so that each can carry an
    equal share). ``max_count``: the most rows that one dp rank may bring. Raises ConfigError out of range.
    """

    padding: PaddingMode | None = None
    align: int | None = None
    max_count: int = MAX_ROWS
    hybrid_ssm: bool = False
    sum_len_in_graphs: bool = False

    def __post_init__(self) -> None:
        if self.padding is not None and not isinstance(self.padding, PaddingMode):
            raise ConfigError(f"padding must be a PaddingMode or None, got {self.padding!r}")
        for name in ("align", "max_count"):
            value = getattr(self, name)
            optional = name == "align" and value is None
            if not optional and (type(value) is not int or not 1 <= value <= MAX_ROWS):
                raise ConfigError(f"{name} must be an int in [1, {MAX_ROWS}], got {value!r}")


DEFAULT_RULES = StepRules()


def agree(
    count: int,
    *,
    phase: Phase,
    can_overlap: bool,
    can_graph: bool,
    groups: Groups,
    layout: RankLayout,
    want_overlap: bool | None = None,
    collectives: Sequence[str] = (),
    rules: StepRules = DEFAULT_RULES,
) -> Agreement:
    """Agree on one step; every rank calls it, idle ones with ``count=0`` and ``Phase.IDLE``.

    One collective on the cpu group. The step overlaps when any rank wants to (``want_overlap``; None: as
    ``can_overlap``), all can, and all busy ranks are in the same phase; it replays a graph when all can. Its
    phase is PREFILL when any rank prefills, else DECODE when any decodes, else IDLE. ``collectives`` names, in
    order, the calls that this step will issue: ranks whose lists differ would hang later and are told now.

    Raises RankMismatchError on every rank, with each rank's value, when a count is out of range, an idle rank
    has rows, ranks of one dp rank bring different counts or phases, ranks differ in ``rules`` or
    ``collectives``, one calls something else, or one does not come within the cpu group's timeout.
    """
    groups.check_open()
    if layout != groups.layout:
        raise ConfigError(f"the groups are those of {groups.layout}, the layout is {layout}")
    votes = groups.control.call(
        Op.AGREE,
        {
            "count": _as_word(count),
            "phase": phase.value if isinstance(phase, Phase) else 0,
            "can_overlap": bool(can_overlap),
            "want_overlap": bool(can_overlap if want_overlap is None else want_overlap),
            "can_graph": bool(can_graph),
            "dp_size": layout.dp_size,
            "align": layout.replicas if rules.align is None else rules.align,
            "max_count": rules.max_count,
            "padding": rules.padding.value if rules.padding else 0,
            "hybrid_ssm": bool(rules.hybrid_ssm),
            "sum_len_in_graphs": bool(rules.sum_len_in_graphs),
            "collectives": digest64("\n".join(map(str, collectives)).encode()),
        },
    )
    return tally(votes)


def tally(votes: Sequence[Mapping[str, int]]) -> Agreement:
    """Turn the votes of all ranks, by rank, into the agreement. Pure: the same on every rank.

    Raises RankMismatchError as ``agree`` does.
    """
    for name in _SHARED:
        check_same(name, {rank: vote[name] for rank, vote in enumerate(votes)})
    for rank, vote in enumerate(votes):
        _check_vote(rank, vote, {r: v["count"] for r, v in enumerate(votes)})
    first = votes[0]
    replicas = len(votes) // first["dp_size"]
    for start in range(0, len(votes), replicas):
        for name in ("count", "phase"):
            group = {rank: votes[rank][name] for rank in range(start, start + replicas)}
            check_same(f"the {name} of dp rank {start // replicas}", group)
    counts = tuple(vote["count"] for vote in votes[::replicas])
    busy = {Phase(vote["phase"]) for vote in votes} - {Phase.IDLE}
    phase = next((p for p in (Phase.PREFILL, Phase.DECODE) if p in busy), Phase.IDLE)
    graph = all(vote["can_graph"] for vote in votes)
    padding = choose_padding(
        counts,
        phase=phase,
        capturing=graph,
        hybrid_ssm=bool(first["hybrid_ssm"]),
        sum_len_in_graphs=bool(first["sum_len_in_graphs"]),
    )
    overlap = (
        any(vote["want_overlap"] for vote in votes)
        and all(vote["can_overlap"] for vote in votes)
        and len(busy) == 1
    )
    forced = PaddingMode(first["padding"]) if first["padding"] else padding
    return Agreement(TokenPlan(counts, forced, phase, first["align"]), overlap, graph)


def confirm(plan: TokenPlan, *, groups: Groups) -> None:
    """Check that every rank holds this very plan, for plans that were not made by ``agree``. Collective.

    Raises RankMismatchError on every rank, with each rank's digest, when they differ.
    """
    groups.check_open()
    groups.control.call_equal(Op.CONFIRM, {"digest": plan.digest}, shown={"digest": plan})


def _as_word(count: object) -> int:
    # A bad count is told to all ranks: raising here alone would leave the others waiting.
    if isinstance(count, bool) or not isinstance(count, SupportsIndex):
        return _NOT_AN_INT
    return max(-(2**62), min(2**62, operator.index(count)))


def _check_vote(rank: int, vote: Mapping[str, int], counts: Mapping[int, int]) -> None:
    count, phases = vote["count"], [phase.value for phase in Phase]
    if count == _NOT_AN_INT:
        problem = "is not an int"
    elif not 0 <= count <= vote["max_count"]:
        problem = f"is {count}, outside [0, {vote['max_count']}]"
    elif vote["phase"] not in phases:
        problem = "came with something that is not a Phase"
    elif vote["phase"] == Phase.IDLE.value and count:
        problem = f"is {count} in phase IDLE"
    else:
        return
    said = {r: "not an int" if c == _NOT_AN_INT else c for r, c in counts.items()}
    every = ", ".join(f"rank {r}: {c}" for r, c in said.items())
    raise RankMismatchError(f"the count of rank {rank} {problem}; counts by rank: {every}", said)
