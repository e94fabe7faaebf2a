"""A small but real stack of data-parallel attention and MoE layers, on nothing but the exchange's verbs.

Shapes: L local rows, G global rows, H hidden, D head width. Each layer::

    local rows [L, H] -> attention over the own requests' KV cache -> gather [G, H]
      -> router, top-k of the own experts on all rows -> combine [L, H]

Attention heads are sharded over attention tp, experts over all ranks. Weights come from a seed, the same on
every rank, so that a rank needs no checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from rocm_dp.errors import ConfigError
from rocm_dp.plan import split_rows

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from rocm_dp.layout import RankLayout
    from rocm_dp.plan import TokenPlan
    from rocm_dp.workload.scheduler import Work


class InFlight(Protocol):
    """What the model uses of a Pending."""

    def wait(self) -> torch.Tensor:
        """See Pending."""


class Verbs(Protocol):
    """What the model uses of a TokenExchange."""

    layout: RankLayout
    device: torch.device
    hidden: int
    dtype: torch.dtype

    def gather_async(
        self, local: torch.Tensor, plan: TokenPlan, *, partial: bool = False, batch: int = 0
    ) -> InFlight:
        """See TokenExchange."""

    def combine_async(self, partial: torch.Tensor, plan: TokenPlan, *, batch: int = 0) -> InFlight:
        """See TokenExchange."""

    def scatter(self, full: torch.Tensor, plan: TokenPlan) -> torch.Tensor:
        """See TokenExchange."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the stack. ``heads`` must divide hidden and be divisible by the attention tp size."""

    layers: int = 2
    heads: int = 8
    experts: int = 16
    top_k: int = 2
    ffn: int = 128
    seed: int = 0

    def check(self, hidden: int, tp_size: int) -> None:
        """Raise ConfigError unless the sizes fit each other."""
        for name in ("layers", "heads", "experts", "top_k", "ffn"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if hidden % self.heads or self.heads % tp_size:
            raise ConfigError(
                f"heads {self.heads} must divide hidden {hidden} and be divisible by the tp size {tp_size}"
            )
        if self.top_k > self.experts:
            raise ConfigError(f"top_k {self.top_k} must not exceed experts {self.experts}")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's shard: qkv [H, 3, heads, D] and out [heads * D, H] of the own heads, the own experts."""

    qkv: torch.Tensor
    out: torch.Tensor
    router: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class MoEModel:
    """The stack on one rank. ``forward`` is a generator: it yields wherever the other batch may compute."""

    def __init__(self, exchange: Verbs, config: ModelConfig = ModelConfig()) -> None:
        layout = exchange.layout
        config.check(exchange.hidden, layout.tp_size)
        self.config, self._exchange, self._layout = config, exchange, layout
        self._own_experts = range(*split_rows(config.experts, layout.world_size)[layout.rank])
        self._layers = [self._weights(layer) for layer in range(config.layers)]
        # request -> per layer [2, capacity, own heads, D]
        self._cache: dict[int, list[torch.Tensor]] = {}

    def admit(self, request: int, tokens: int) -> None:
        """Make room in the KV cache for the ``tokens`` tokens that ``request`` will ever have."""
        heads = self.config.heads // self._layout.tp_size
        shape = (2, tokens, heads, self._exchange.hidden // self.config.heads)
        options = {"dtype": self._exchange.dtype, "device": self._exchange.device}
        self._cache[request] = [torch.empty(shape, **options) for _ in self._layers]  # type: ignore[call-overload]

    def retire(self, requests: Iterable[int]) -> None:
        """Free the KV cache of finished requests; those of other ranks are ignored."""
        for request in requests:
            self._cache.pop(request, None)

    def embed(self, work: Sequence[Work]) -> torch.Tensor:
        """Return the input rows [L, H] of ``work``, drawn from the request and the position alone."""
        tokens = [
            item.request * 7919 + position
            for item in work
            for position in range(item.start, item.start + item.tokens)
        ]
        phases = torch.arange(1, self._exchange.hidden + 1, dtype=torch.float32)
        angles = torch.tensor(tokens, dtype=torch.float32)[:, None] * 0.37 + phases[None, :] * 1.13
        return torch.sin(angles * phases[None, :].sqrt()).to(self._exchange.dtype).to(self._exchange.device)

    def forward(
        self, rows: torch.Tensor, work: Sequence[Work], plan: TokenPlan, *, batch: int = 0
    ) -> Generator[None, None, torch.Tensor]:
        """Run all layers on ``rows`` [L, H] of ``work``; return [L, H]."""
        for layer, weights in enumerate(self._layers):
            addend = self._attention(rows, work, layer, weights)
            summed = self._layout.tp_size > 1
            # One tp rank adds the residual, so that the gather's sum over attention tp holds it once.
            if self._layout.tp_rank == 0 or not summed:
                addend = addend + rows
            pending = self._exchange.gather_async(addend, plan, partial=summed, batch=batch)
            yield
            everyone = pending.wait()
            rows = self._exchange.scatter(everyone, plan).clone()
            pending = self._exchange.combine_async(self._experts(everyone, weights), plan, batch=batch)
            yield
            rows = rows + pending.wait()
        return rows

    def _attention(
        self, rows: torch.Tensor, work: Sequence[Work], layer: int, weights: LayerWeights
    ) -> torch.Tensor:
        q, k, v = torch.einsum("lh,hpnd->plnd", _norm(rows), weights.qkv).unbind()
        attended = torch.empty_like(q)
        first = 0
        for item in work:
            mine = slice(first, first + item.tokens)
            first, end = first + item.tokens, item.start + item.tokens
            cache = self._cache[item.request][layer]
            cache[0, item.start : end], cache[1, item.start : end] = k[mine], v[mine]
            at = torch.arange(end, device=rows.device)
            seen = at[None, :] <= at[item.start :, None]
            keys, values = cache[:, :end].transpose(1, 2)
            attended[mine] = F.scaled_dot_product_attention(
                q[mine].transpose(0, 1), keys, values, attn_mask=seen
            ).transpose(0, 1)
        return attended.flatten(1) @ weights.out

    def _experts(self, everyone: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        """Return what the own experts add to every row: [G, H]."""
        normed = _norm(everyone)
        scores, chosen = (normed.float() @ weights.router).softmax(-1).topk(self.config.top_k)
        out = torch.zeros_like(everyone)
        for index, expert in enumerate(self._own_experts):
            row, place = (chosen == expert).nonzero(as_tuple=True)
            hidden = F.silu(normed[row] @ weights.up[index]) @ weights.down[index]
            out.index_add_(0, row, hidden * scores[row, place, None].to(hidden.dtype))
        return out

    def _weights(self, layer: int) -> LayerWeights:
        config, hidden, layout = self.config, self._exchange.hidden, self._layout
        generator = torch.Generator().manual_seed(config.seed * 1009 + layer)
        width, heads = hidden // config.heads, config.heads // layout.tp_size
        own = slice(layout.tp_rank * heads, (layout.tp_rank + 1) * heads)
        experts = slice(self._own_experts.start, self._own_experts.stop)

        def draw(*shape: int, fan_in: int) -> torch.Tensor:
            weights: torch.Tensor = torch.randn(*shape, generator=generator) * fan_in**-0.5
            return weights

        qkv = draw(hidden, 3, config.heads, width, fan_in=hidden)[:, :, own]
        out = draw(config.heads, width, hidden, fan_in=hidden)[own].flatten(0, 1)
        router = draw(hidden, config.experts, fan_in=hidden)
        up = draw(config.experts, hidden, config.ffn, fan_in=hidden)[experts]
        down = draw(config.experts, config.ffn, hidden, fan_in=config.ffn)[experts]
        to = {"dtype": self._exchange.dtype, "device": self._exchange.device}
        return LayerWeights(
            qkv.to(**to),  # type: ignore[call-overload]
            out.to(**to),  # type: ignore[call-overload]
            router.to(self._exchange.device),
            up.to(**to),  # type: ignore[call-overload]
            down.to(**to),  # type: ignore[call-overload]
        )


def split_work(work: Sequence[Work], tokens: int) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Cut ``work`` after its first ``tokens`` tokens; a chunk across the cut is cut in two."""
    first: list[Work] = []
    second: list[Work] = []
    for item in work:
        taken = min(item.tokens, tokens)
        tokens -= taken
        if taken:
            first.append(type(item)(item.request, item.start, taken))
        if taken < item.tokens:
            second.append(type(item)(item.request, item.start + taken, item.tokens - taken))
    return tuple(first), tuple(second)


def _norm(rows: torch.Tensor) -> torch.Tensor:
    wide = rows.float()
    normed: torch.Tensor = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return normed.to(rows.dtype)
