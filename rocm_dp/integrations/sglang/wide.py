"""A TokenExchange with the collectives that SGLang's layer needs beside the verbs, in order with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_dp.exchange import TokenExchange
from rocm_dp.plan import PaddingMode, TokenPlan
from rocm_dp.transports import collectives

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class LayerExchange(TokenExchange):
    """Adds a sum over all ranks in place and a gather of differing shares over attention tp."""

    def sum_over_all(self, x: torch.Tensor) -> None:
        """Sum ``x``, contiguous, over all ranks in place."""
        self._run("world_all_reduce", lambda: collectives.all_reduce(x, self.groups.world))

    def tp_all_gather_v(self, outs: Sequence[torch.Tensor], mine: torch.Tensor) -> None:
        """Fill ``outs[t]`` [any rows, width] with ``mine`` of attention-tp rank t."""
        self._run("tp_all_gather_v", lambda: collectives.all_gather_v(outs, mine, self.groups.tp))

    @property
    def over_peers(self) -> bool:
        """Whether peer memory carries every plan, so that calls can be captured on any ROCm."""
        plan = TokenPlan((1,) * self.layout.dp_size, PaddingMode.MAX_LEN)
        return any(verdict.chosen and verdict.name == "peer" for verdict in self.explain(plan))
