"""What is measured: calls by one signature, ours and the library's, and our transports among them."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rocm_dp.errors import PeerRefusedError, TransportRefusedError
from rocm_dp.exchange import TokenExchange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rocm_dp.bench.inputs import Inputs
    from rocm_dp.groups import Groups
    from rocm_dp.options import Options
    from rocm_dp.plan import TokenPlan

AUTO = "auto"  # an exchange that is left to itself
_LONGEST_REASON = 2048  # bytes, the same on every rank
_PADDED = "all_gather"  # the transport that takes plans of equal sizes only


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do the verb: ``call`` returns its result, laid out as ``plan`` says.

    ``written``: what a call must write all of, for paths that can't be told to poison it. ``spends_input``: a call
    changes its input, so that only the first is right.
    """

    name: str
    plan: TokenPlan
    call: Callable[[], torch.Tensor]
    written: tuple[torch.Tensor, ...] = ()
    spends_input: bool = False
    ours: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """A contender that can't run a case, and why."""

    name: str
    reason: str
    ours: bool = False


def agreed(reason: str | None, cpu: dist.ProcessGroup) -> str | None:
    """Return the first rank's reason not to go on, the same on every rank; collective."""
    # Not all_gather_object: that runs what arrives.
    said = "" if reason is None else reason or "no reason given"
    fixed = said.encode()[:_LONGEST_REASON].ljust(_LONGEST_REASON, b"\0")
    mine = torch.frombuffer(bytearray(fixed), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in range(cpu.size())]
    dist.all_gather(every, mine, group=cpu)
    told = (bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in every)
    return next((text for text in told if text), None)


@contextmanager
def open_exchanges(
    cases: Sequence[Inputs], groups: Groups, options: Sequence[Options], *, batches: int = 1
) -> Iterator[dict[str, TokenExchange | Refused]]:
    """Open one exchange for each of ``options``, large enough for all cases; by the name of its transport, or AUTO.

    ``batches`` of each are reserved. A transport that can't be used here is Refused on every rank. Collective.
    """
    with ExitStack() as stack:
        found: dict[str, TokenExchange | Refused] = {}
        for one in options:
            name, reason = one.transport or AUTO, None
            try:
                found[name] = stack.enter_context(_open(cases, groups, one, batches))
            except (TransportRefusedError, PeerRefusedError) as error:
                reason = str(error)
            reason = agreed(reason, groups.cpu)
            if reason is not None:
                found[name] = Refused(name, reason, ours=True)
        yield found


def _open(cases: Sequence[Inputs], groups: Groups, options: Options, batches: int) -> TokenExchange:
    plans = [plan_for(options.transport or AUTO, case) for case in cases]
    first = cases[0]
    exchange = TokenExchange(
        first.layout,
        groups,
        device=first.device,
        hidden=first.config.hidden,
        dtype=first.dtype,
        max_rows=max(plan.rows for plan in plans),
        max_local_rows=max(max(plan.sizes) for plan in plans),
        options=options,
    )
    try:
        exchange.reserve(batches=batches)
    except (TransportRefusedError, PeerRefusedError):
        exchange.close()
        raise
    return exchange


def plan_for(transport: str, inputs: Inputs) -> TokenPlan:
    """Return the plan that ``transport`` is measured with."""
    return inputs.max_len() if transport == _PADDED else inputs.sum_len()


def refusal(exchange: TokenExchange, plan: TokenPlan) -> str | None:
    """Return why the exchange's one transport won't carry ``plan``, or None when it will."""
    verdicts = exchange.explain(plan)
    if any(verdict.chosen for verdict in verdicts):
        return None
    return "; ".join(verdict.reason for verdict in verdicts)


def our_contender(verb: str, name: str, exchange: TokenExchange | Refused, inputs: Inputs) -> Contender | Refused:
    """Return the call of ``verb`` through one exchange, or why it can't be."""
    if isinstance(exchange, Refused):
        return exchange
    plan = plan_for(name, inputs)
    reason = refusal(exchange, plan)
    if reason is not None:
        return Refused(name, reason, ours=True)
    if verb == "gather":
        local, gather = inputs.local(), exchange.gather
        return Contender(name, plan, lambda: gather(local, plan), ours=True)
    partial, combine = inputs.partial(plan), exchange.combine
    return Contender(name, plan, lambda: combine(partial, plan), ours=True)
