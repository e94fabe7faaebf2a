"""What one rank does: every verb of every case over every transport, each result against the oracle.

Every rank can make the tensors of all ranks, so it needs nobody to know what is right. L local rows, G global rows,
H width.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch

from rocm_dp.errors import ConfigError
from rocm_dp.exchange import TokenExchange
from rocm_dp.groups import Groups
from rocm_dp.layout import RankLayout
from rocm_dp.options import Options
from rocm_dp.routing import NAMES, Table
from rocm_dp.testing import note, rank_device
from rocm_dp.validate.cases import field_cases
from rocm_dp.validate.graphs import MOST_ROWS, check_replays
from rocm_dp.validate.verbs import Verbs
from rocm_dp.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

OWN_CHOICE = "own choice"
_DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)
_MOST_FAILURES = 10  # of one rank over one transport: the rest says no more


@dataclass(frozen=True, slots=True)
class ValidateConfig:
    """A run; equal on all ranks. ``transports`` are forced one after the other, after the library's own choice.

    ``timeout``: seconds after which a rank that does not come is taken for lost.
    """

    ranks: int
    dp: int
    cp: int = 1
    hidden: int = 72
    transports: tuple[str, ...] = NAMES
    timeout: float = 120.0

    def __post_init__(self) -> None:
        self.layout(0)
        if self.transports:
            Table(self.transports)
        if self.hidden < 1:
            raise ConfigError(f"hidden must be at least 1, got {self.hidden}")

    def layout(self, rank: int) -> RankLayout:
        """Return where ``rank`` stands."""
        return RankLayout(rank, self.ranks, self.dp, self.cp)


@dataclass(slots=True)
class RankResult:
    """What one rank found: checks by transport, why a transport carried nothing, what was wrong, and on what."""

    rank: int
    about: dict[str, str]
    checks: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def run_rank(rank: int, config: ValidateConfig) -> RankResult:
    """Validate on this rank of a RankPool; rank 0 sends (done, of) as notes."""
    return validate(rank, config, rank_device(), note if rank == 0 else lambda _: None)


def validate(
    rank: int, config: ValidateConfig, device: torch.device, tell: Callable[[tuple[int, int]], object]
) -> RankResult:
    """Validate on this rank of torch.distributed's default group; ``tell`` is called with (done, of)."""
    layout, result = config.layout(rank), RankResult(rank, _about(device))
    runs = [(name, dtype) for name in (None, *config.transports) for dtype in _DTYPES]
    with (
        Groups.create(layout, timeout=timedelta(seconds=config.timeout)) as groups,
        torch.inference_mode(),
    ):
        for done, (name, dtype) in enumerate(runs):
            tell((done, len(runs)))
            options = Options(transport=name, timeout=config.timeout, poison=True, confirm_calls=name is None)
            make = partial(
                TokenExchange, layout, groups, device=device, hidden=config.hidden, dtype=dtype, options=options
            )
            label = name or OWN_CHOICE
            with make() as exchange:
                _check_all(exchange, label, result)
            with make(max_rows=MOST_ROWS * config.dp, max_local_rows=MOST_ROWS) as exchange:
                for wrong in check_replays(exchange):
                    _note(result, label, f"{wrong}, {dtype}" if wrong else "")
            if label in result.checks:
                result.refused.pop(label, None)
        tell((len(runs), len(runs)))
    return result


def _check_all(exchange: TokenExchange, label: str, result: RankResult) -> None:
    """Check every case that the transport does not refuse; a refusal is the same on every rank."""
    layout = exchange.layout
    verbs = Verbs(exchange)
    for case in field_cases(layout.dp_size):
        for plan in case.plans(layout.replicas):
            verdict = next((one for one in exchange.explain(plan) if one.chosen), None)
            if verdict is None:
                result.refused.setdefault(label, exchange.explain(plan)[0].reason)
                continue
            for verb, wrong in verbs.check(plan):
                _note(result, label, f"{verb} {wrong}: {case.kind}, {plan}, {exchange.dtype}" if wrong else "")


def _note(result: RankResult, label: str, wrong: str) -> None:
    result.checks[label] = result.checks.get(label, 0) + 1
    where = f"rank {result.rank}, {label}: "
    if wrong and sum(failure.startswith(where) for failure in result.failures) < _MOST_FAILURES:
        result.failures.append(where + wrong)


def _about(device: torch.device) -> dict[str, str]:
    return {
        "rocm_dp": __version__,
        "torch": torch.__version__,
        "HIP": torch.version.hip or "",
        "CUDA": torch.version.cuda or "",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}",
        "host": platform.node(),
    }
