"""What the ranks at hand would do with a few plans; nothing is decided here, ``TokenExchange.explain`` is asked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from rocm_dp.exchange import TokenExchange
from rocm_dp.groups import Groups
from rocm_dp.layout import RankLayout
from rocm_dp.plan import PaddingMode, Phase, TokenPlan
from rocm_dp.testing import rank_device

_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class Explained:
    """One plan, the transport that carries it ("": none), and what was said of every other one."""

    plan: str
    rows: int
    chosen: str
    refused: dict[str, str]

    def as_dict(self) -> dict[str, object]:
        """Return it as plain values."""
        return asdict(self)


def explain_rank(rank: int, hidden: int) -> list[Explained]:
    """Open an exchange on this rank of a RankPool and ask it about each plan; the same on every rank."""
    layout = RankLayout(rank, dist.get_world_size(), dist.get_world_size())
    with (
        Groups.create(layout, timeout=_TIMEOUT) as groups,
        TokenExchange(layout, groups, device=rank_device(), hidden=hidden, dtype=torch.bfloat16) as exchange,
    ):
        return [_explained(exchange, what, plan) for what, plan in _plans(layout.dp_size)]


def _plans(dp_size: int) -> tuple[tuple[str, TokenPlan], ...]:
    uneven = tuple(2048 if dp % 2 else 1024 for dp in range(dp_size))
    busy = (512, *([0] * (dp_size - 1)))
    return (
        ("decode, 32 rows each", TokenPlan((32,) * dp_size, PaddingMode.MAX_LEN, Phase.DECODE)),
        ("prefill, 1024 and 2048 rows", TokenPlan(uneven, PaddingMode.SUM_LEN)),
        ("prefill, one rank busy", TokenPlan(busy, PaddingMode.SUM_LEN)),
    )


def _explained(exchange: TokenExchange, what: str, plan: TokenPlan) -> Explained:
    verdicts = exchange.explain(plan)
    chosen = next((verdict.name for verdict in verdicts if verdict.chosen), "")
    return Explained(what, plan.rows, chosen, {one.name: one.reason for one in verdicts if not one.chosen})
