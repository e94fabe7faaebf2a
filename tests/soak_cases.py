"""What the soak's tests run on ranks, and how they read what came of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import patch

from exchange_cases import Grid, an_exchange

from rocm_dp import TokenExchange
from rocm_dp.errors import ConfigError
from rocm_dp.soak import rank as soak_rank
from rocm_dp.soak.config import SoakConfig
from rocm_dp.soak.inject import NEEDS_GPU, inject
from rocm_dp.soak.log import SoakLog, about
from rocm_dp.soak.outcome import Outcome, conclude

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from rocm_dp.testing import RankPool

SMALL = SoakConfig(ranks=2, dp=2, steps=240, sample_every=6)


def soaked(
    pool: RankPool, config: SoakConfig, case: Callable[..., None] = soak_rank.run_rank
) -> tuple[SoakLog, Outcome]:
    """Run ``case`` as the soak's ranks; an error of a rank is raised here."""
    log = SoakLog(about(config))
    pool.run(case, config, on_note=log.add)
    return log, conclude(log, ranks=config.ranks, required=config.required)


def with_wrong_results(rank: int, config: SoakConfig) -> None:
    """Rank 1's gathers are wrong in one element."""
    honest = TokenExchange.gather

    def gather(self: TokenExchange, *args: object, **kwargs: object) -> torch.Tensor:
        got = honest(self, *args, **kwargs)  # type: ignore[arg-type]
        if rank == 1 and got.numel():
            got.view(-1)[0] += 1
        return got

    with patch.object(TokenExchange, "gather", gather):
        soak_rank.run_rank(rank, config)


def without_objects(rank: int, config: SoakConfig) -> None:
    """Rank 1's sampler of objects fails half-way."""
    from rocm_dp.soak.objects import ObjectSampler

    honest, reads = ObjectSampler.read, [0]

    def read(self: ObjectSampler) -> dict[str, float]:
        reads[0] += 1
        if rank == 1 and reads[0] == 40:
            raise MemoryError("no room to count")
        return honest(self)

    with patch.object(ObjectSampler, "read", read):
        soak_rank.run_rank(rank, config)


def without_the_exchange_sampler(rank: int, config: SoakConfig) -> None:
    """Rank 0 has no sampler of its exchange."""
    from rocm_dp.soak.device import ExchangeSampler

    def read(self: ExchangeSampler) -> dict[str, float]:
        raise OSError("not today")

    if rank == 0:
        with patch.object(ExchangeSampler, "read", read):
            soak_rank.run_rank(rank, config)
    else:
        soak_rank.run_rank(rank, config)


def refusals(rank: int) -> list[str]:
    """What is said of each thing that needs a GPU."""
    said = []
    with an_exchange(rank, Grid(2, 2)) as exchange:
        for kind in NEEDS_GPU:
            try:
                inject(kind, exchange)
            except ConfigError as error:
                said.append(str(error))
    try:
        soak_rank.run_rank(rank, replace(SMALL, seed_system=True))
    except ConfigError as error:
        said.append(str(error))
    return said
