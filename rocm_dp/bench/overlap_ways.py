"""The contenders of one case: our transports, each by an exchange, and the library's own way."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rocm_dp.bench import library
from rocm_dp.bench.contenders import AUTO, Refused, plan_for, refusal
from rocm_dp.bench.forward import Forward
from rocm_dp.bench.library import Site
from rocm_dp.bench.overlap_comm import ExchangeComm, HalfInputs, HandComm
from rocm_dp.bench.overlap_layers import Half

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from rocm_dp.bench.inputs import Inputs
    from rocm_dp.bench.overlap_layers import Weights
    from rocm_dp.bench.rank import Ready
    from rocm_dp.exchange import TokenExchange
    from rocm_dp.plan import TokenPlan

GROUPED, PADDED = "torch: grouped", "torch: padded"


@dataclass(frozen=True, slots=True)
class Case:
    """The inputs of both halves and of the whole on this rank, and the ``depth`` layers that they go through."""

    inputs: tuple[Inputs, Inputs, Inputs]
    weights: Weights
    depth: int

    def halves(self, plans: Sequence[TokenPlan]) -> list[Half]:
        """Make the buffers of both halves and of the whole."""
        intermediate = self.weights.attention[0].shape[1]
        return [Half(inputs, plan, intermediate) for inputs, plan in zip(self.inputs, plans, strict=True)]


@dataclass(frozen=True, slots=True)
class Way:
    """A contender; ``make`` allocates all that its forward needs, or says why it can't be."""

    name: str
    ours: bool
    make: Callable[[], Forward | Refused]


def ways(
    case: Case,
    exchanges: Mapping[str, TokenExchange | Refused],
    ready: Ready,
    stream: torch.cuda.Stream | None,
) -> list[Way]:
    """Return every contender of ``case``; ``stream``: where the library's calls overlap; None on the CPU."""
    return [
        *(Way(name, True, partial(our_way, name, exchange, case)) for name, exchange in exchanges.items()),
        Way(GROUPED, False, partial(_grouped, case, ready, stream)),
        Way(PADDED, False, partial(_padded, case, ready, stream)),
    ]


def our_way(name: str, exchange: TokenExchange | Refused, case: Case) -> Forward | Refused:
    """Return the forward through ``exchange``, whose one transport is ``name`` (AUTO: any), or why it can't be."""
    if isinstance(exchange, Refused):
        return exchange
    plans = [plan_for(name, inputs) for inputs in case.inputs]
    reasons = [reason for plan in plans if (reason := refusal(exchange, plan)) is not None]
    if reasons:
        return Refused(name, reasons[0], ours=True)
    pays = None
    if name == AUTO:
        pays = exchange.overlap_verdict(plans[-1]).pays, exchange.overlap_verdict(plans[-1], graph=True).pays
    comm = ExchangeComm(exchange, plans)
    return Forward(name, True, case.halves(plans), case.weights, case.depth, comm, pays)


def _grouped(case: Case, ready: Ready, stream: torch.cuda.Stream | None) -> Forward:
    halves = case.halves([inputs.sum_len() for inputs in case.inputs])
    comm = HandComm(_sites(halves, ready), library.gather_list, library.combine_list, stream)
    return Forward(GROUPED, False, halves, case.weights, case.depth, comm)


def _padded(case: Case, ready: Ready, stream: torch.cuda.Stream | None) -> Forward:
    halves = case.halves([inputs.max_len() for inputs in case.inputs])
    comm = HandComm(_sites(halves, ready), library.gather_padded, library.combine_padded, stream)
    return Forward(PADDED, False, halves, case.weights, case.depth, comm)


def _sites(halves: Sequence[Half], ready: Ready) -> list[Site]:
    bound = [HalfInputs(h.inputs.config, h.inputs.layout, h.inputs.device, h.inputs.counts, h) for h in halves]
    return [Site(inputs, ready.groups.world, ready.fellows) for inputs in bound]
