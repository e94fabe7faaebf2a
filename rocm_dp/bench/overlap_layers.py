"""Synthetic layers: what computes while rows are under way. L local rows, G global rows, H hidden, K intermediate.

Attention is [L, H] x [H, K], [L, K] x [K, H] on a rank's own rows, the experts are the same on the gathered ones;
what comes back is added to the rows. Weights are normal numbers over the square root of what they sum over, and
each of D layers adds 1/D of what came back: rows stay near 1 at any depth, and an error in any layer is felt.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_dp.bench.inputs import Inputs
    from rocm_dp.plan import TokenPlan

_WHOLE = 128  # inputs are whole numbers up to here


class Compute(Protocol):
    """The stages of a forward; ``half`` 0 or 1, or 2 for a batch that is not split."""

    def begin(self) -> None:
        """Put the rows back to the start."""

    def attention(self, half: int, own: torch.Tensor | None) -> torch.Tensor:
        """Add ``own`` [L, H], what the last layer's combine returned, and return what is to be gathered [L, H]."""

    def experts(self, half: int, gathered: torch.Tensor) -> torch.Tensor:
        """Return this rank's addend [G, H] of all rows from the ``gathered`` ones [G, H]."""

    def finish(self, half: int, own: torch.Tensor) -> None:
        """Add what the last combine returned."""


@dataclass(frozen=True, slots=True)
class Weights:
    """[H, K] and [K, H] of attention, and of the experts, which differ from rank to rank."""

    attention: tuple[torch.Tensor, torch.Tensor]
    experts: tuple[torch.Tensor, torch.Tensor]


def make_weights(inputs: Inputs, intermediate: int) -> Weights:
    """Make the weights of a rank; attention's are those of its dp rank."""
    layout, hidden = inputs.layout, inputs.config.hidden
    generator = torch.Generator(inputs.device)

    def reseed(what: str) -> None:
        generator.manual_seed(Random(f"{inputs.config.seed}, {what}").getrandbits(63))

    def normal(rows: int, columns: int, fan_in: int) -> torch.Tensor:
        numbers = torch.randn(rows, columns, generator=generator, device=inputs.device)
        return numbers.div_(fan_in**0.5).to(inputs.dtype)

    reseed(f"attention of dp rank {layout.dp_rank}")
    attention = normal(hidden, intermediate, hidden), normal(intermediate, hidden, intermediate)
    reseed(f"experts of rank {layout.rank}")
    # The addends of all ranks are summed.
    summed = intermediate * layout.world_size
    return Weights(attention, (normal(hidden, intermediate, hidden), normal(intermediate, hidden, summed)))


class Half:
    """The buffers of one half of a batch on this rank, all made here.

    ``local`` [L, H] is what is gathered, ``partial`` [G, H] what is combined; ``gathered`` and ``own`` stand in for
    what these give where nothing moves. All hold rows as real ones from the start.
    """

    def __init__(self, inputs: Inputs, plan: TokenPlan, intermediate: int) -> None:
        self.inputs, self.plan = inputs, plan
        self.start = inputs.local() / _WHOLE
        self.hidden, self.local = self.start.clone(), self.start.clone()
        self.partial = inputs.partial(plan) / _WHOLE
        self.gathered, self.own = inputs.gathered(plan) / _WHOLE, inputs.combined() / _WHOLE
        room = torch.empty(len(self.start) + plan.rows, intermediate, dtype=inputs.dtype, device=inputs.device)
        self.local_mid, self.partial_mid = room[: len(self.start)], room[len(self.start) :]

    def poison(self) -> None:
        """Fill with NaN all that a forward writes."""
        for tensor in (self.hidden, self.local, self.partial, self.local_mid, self.partial_mid):
            tensor.fill_(float("nan"))


class Layers:
    """The stages of ``depth`` layers, computed."""

    def __init__(self, halves: Sequence[Half], weights: Weights, depth: int) -> None:
        self._halves, self._weights, self._part = halves, weights, 1.0 / depth

    def begin(self) -> None:
        """Put the rows back to the start."""
        for half in self._halves:
            half.hidden.copy_(half.start)

    def attention(self, half: int, own: torch.Tensor | None) -> torch.Tensor:
        """Add ``own`` and multiply twice."""
        this, (up, down) = self._halves[half], self._weights.attention
        if own is not None:
            this.hidden.add_(own, alpha=self._part)
        torch.mm(this.hidden, up, out=this.local_mid)
        return torch.mm(this.local_mid, down, out=this.local)

    def experts(self, half: int, gathered: torch.Tensor) -> torch.Tensor:
        """Multiply twice."""
        this, (up, down) = self._halves[half], self._weights.experts
        torch.mm(gathered, up, out=this.partial_mid)
        return torch.mm(this.partial_mid, down, out=this.partial)

    def finish(self, half: int, own: torch.Tensor) -> None:
        """Add ``own``."""
        self._halves[half].hidden.add_(own, alpha=self._part)


class NoCompute:
    """The same stages when nothing is computed: what there is goes out."""

    def __init__(self, halves: Sequence[Half]) -> None:
        self._halves = halves

    def begin(self) -> None:
        """Do nothing."""

    def attention(self, half: int, own: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG002 - the protocol's
        """Return the last local rows."""
        return self._halves[half].local

    def experts(self, half: int, gathered: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - the protocol's
        """Return the last addend."""
        return self._halves[half].partial

    def finish(self, half: int, own: torch.Tensor) -> None:
        """Do nothing."""
