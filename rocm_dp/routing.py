"""Which transport carries a call, and why. Pure: the same inputs give the same answer on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_dp.errors import ConfigError, TransportRefusedError
from rocm_dp.plan import TokenPlan

if TYPE_CHECKING:
    from rocm_dp.graphs import GraphPlan

NAMES = ("peer", "all_gather", "all_gather_v", "all_reduce")
NEED_PROOF = ("peer",)  # trusted only after they passed a self-test on this very machine


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
class Table:
    """Transports in order of preference; the first that does not refuse is chosen.

    The built-in order: kernels over peer memory where they passed their self-test. Otherwise equal sizes take the
    equal-size collective; failing that only the real rows are moved, and an all-reduce, which moves every row of
    the buffer twice, comes last.
    """

    order: tuple[str, ...] = NAMES

    def __post_init__(self) -> None:
        unknown = set(self.order) - set(NAMES)
        if unknown or not self.order:
            raise ConfigError(f"transports must be among {NAMES}, got {self.order}")


@dataclass(frozen=True, slots=True)
class TransportVerdict:
    """What ``explain`` says of one transport: whether it is chosen, and why or why not."""

    name: str
    chosen: bool
    reason: str


def refusal(name: str, plan: TokenPlan | GraphPlan, facts: Facts) -> str | None:
    """Return why transport ``name`` can't carry this plan, or None when it can."""
    if name in NEED_PROOF:
        if name in facts.qualified:
            return None
        return dict(facts.unqualified).get(name, "has not passed its self-test here")
    if not isinstance(plan, TokenPlan):
        return "needs counts on the host"
    if name == "all_gather":
        if len(set(plan.sizes)) > 1:
            return f"needs equal sizes, the dp ranks have {plan.sizes}"
        if plan.sizes[0] % facts.replicas:
            return f"needs sizes divisible by the {facts.replicas} ranks of a dp rank, got {plan.sizes[0]}"
    return None


def choose(plan: TokenPlan | GraphPlan, facts: Facts, table: Table) -> tuple[TransportVerdict, ...]:
    """Judge every transport of ``table`` for this plan, in order of preference; at most one is chosen."""
    verdicts: list[TransportVerdict] = []
    chosen: str | None = None
    for name in table.order:
        no = refusal(name, plan, facts)
        if no is not None:
            verdicts.append(TransportVerdict(name, chosen=False, reason=no))
        elif chosen is None:
            chosen = name
            verdicts.append(TransportVerdict(name, chosen=True, reason="first in the table that can"))
        else:
            verdicts.append(TransportVerdict(name, chosen=False, reason=f"could, but {chosen} comes first"))
    return tuple(verdicts)


def chosen_name(verdicts: tuple[TransportVerdict, ...]) -> str:
    """Return the chosen transport's name; raise TransportRefusedError with every reason when none was."""
    for verdict in verdicts:
        if verdict.chosen:
            return verdict.name
    raise TransportRefusedError("; ".join(f"{verdict.name} {verdict.reason}" for verdict in verdicts))
