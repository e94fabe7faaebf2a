"""The verbs in one process, on a list of every rank's tensors: the oracle that all claims are checked against.

Lists are ordered by world rank, ``(dp_rank * cp_size + cp_rank) * tp_size + tp_rank``. Sums are made in float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rocm_dp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_dp.plan import TokenPlan


def gather(locals_: Sequence[torch.Tensor], plan: TokenPlan, *, partial_over: int | None = None) -> torch.Tensor:
    """Return the global buffer [G, H] that every rank must get; padding rows are zero.

    ``partial_over`` None: the ranks of a dp rank must hold equal rows (ConfigError if not: then no result is
    right); else the attention tp size, over whose ranks the rows are summed.
    """
    replicas = len(locals_) // len(plan.counts)
    out = locals_[0].new_zeros(plan.rows, locals_[0].shape[1])
    for dp in range(len(plan.counts)):
        group = locals_[dp * replicas : (dp + 1) * replicas]
        if partial_over is not None:
            rows = torch.stack([part.double() for part in group[:partial_over]]).sum(0).to(out.dtype)
        else:
            rows = group[0]
            if any(not same_bits(rows, other) for other in group[1:]):
                raise ConfigError(f"the ranks of dp rank {dp} hold different rows")
        out[scatter_range(plan, dp)] = rows
    return out


def gather_many(per_rank: Sequence[Sequence[torch.Tensor]], plan: TokenPlan) -> list[torch.Tensor]:
    """Return the global buffer of each tensor; ``per_rank[r]`` are the tensors of rank ``r``."""
    return [gather(locals_, plan) for locals_ in zip(*per_rank, strict=True)]


def combine(partials: Sequence[torch.Tensor], plan: TokenPlan) -> list[torch.Tensor]:
    """Return, for each dp rank, the sum over all ranks of its real rows [counts[dp], H]."""
    total = torch.stack([partial.double() for partial in partials]).sum(0).to(partials[0].dtype)
    return scatter(total, plan)


def scatter(full: torch.Tensor, plan: TokenPlan) -> list[torch.Tensor]:
    """Return, for each dp rank, its real rows of ``full`` [G, H]."""
    return [full[scatter_range(plan, dp)] for dp in range(len(plan.counts))]


def scatter_range(plan: TokenPlan, dp_rank: int) -> slice:
    """Return where the real rows of ``dp_rank`` lie in the global buffer."""
    return slice(plan.starts[dp_rank], plan.starts[dp_rank] + plan.counts[dp_rank])


def sum_error(got: torch.Tensor, addends: Sequence[torch.Tensor]) -> float:
    """Return the largest error of ``got`` as a sum of ``addends``, over what rounding may cause: right if <= 1.

    The bound for ``n`` addends summed in any order with unit roundoff ``u`` is ``n * u * sum(|addend|)`` for each
    element (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2, to first order, plus one for
    the final rounding). Infinity for another shape, and for NaN or infinity in ``got`` where the sum has none.
    """
    stack = torch.stack([addend.double() for addend in addends])
    total = stack.sum(0)
    if got.shape != total.shape:
        return torch.inf
    if not got.numel():
        return 0.0
    unit = torch.finfo(got.dtype).eps / 2
    bound = len(addends) * unit * stack.abs().sum(0) + torch.finfo(got.dtype).smallest_normal
    error = torch.nan_to_num((got.double() - total).abs() / bound, nan=torch.inf, posinf=torch.inf)
    rounded = total.to(got.dtype)
    as_expected = ~rounded.isfinite() & ((got == rounded) | (got.isnan() & rounded.isnan()))
    return float(error.masked_fill(as_expected, 0.0).max())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two contiguous tensors agree in shape, dtype and every bit (NaN payloads and -0.0 too)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(
        *(tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in (a, b))
    )
