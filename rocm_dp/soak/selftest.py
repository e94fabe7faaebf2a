"""The soak tested on itself: clean runs must pass, and every leak injected on purpose must be found and named."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rocm_dp.soak.inject import INJECTIONS, NEEDS_GPU
from rocm_dp.soak.run import soak

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rocm_dp.soak.config import SoakConfig
    from rocm_dp.soak.log import SoakLog
    from rocm_dp.soak.outcome import Outcome
    from rocm_dp.testing import RankPool

_SETTLING_STEPS = 1500


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the self-test; ``injected`` is None in a clean one."""

    injected: str | None
    seed: int
    outcome: Outcome

    @property
    def named(self) -> str:
        """What the run was found to leak; a run that failed without a cause says so."""
        return self.outcome.cause or ("" if self.outcome.passed else "failed")

    @property
    def right(self) -> bool:
        """Whether a clean run passed, or a leak was named, and nothing else was wrong."""
        return self.named == (self.injected or "") and not self.outcome.problems

    @property
    def plain(self) -> dict[str, object]:
        """Plain values, for JSON."""
        found = {"injected": self.injected, "seed": self.seed, "named": self.named, "right": self.right}
        return {**found, "headline": self.outcome.headline}


def injections(*, gpu: bool) -> tuple[list[str], dict[str, str]]:
    """Return the leaks that can be injected here, and why the others can't."""
    left_out = {} if gpu else NEEDS_GPU
    return [kind for kind in INJECTIONS if kind not in left_out], dict(left_out)


def self_test(
    pool: RankPool, config: SoakConfig, *, clean: int, watch: Callable[[SoakLog], object] = lambda _: None
) -> Iterator[Trial]:
    """Yield ``clean`` clean runs with seeds from ``config.seed`` on, then a run with each injection.

    The first soak is not judged: the memory of fresh ranks takes longer to settle than one trial may last.
    """
    soak(pool, replace(config, inject=None, steps=_SETTLING_STEPS), watch=watch)
    kinds, _ = injections(gpu=pool.backend == "nccl")
    runs: list[tuple[str | None, int]] = [(None, config.seed + number) for number in range(clean)]
    for kind, seed in runs + [(kind, config.seed) for kind in kinds]:
        _, outcome = soak(pool, replace(config, inject=kind, seed=seed), watch=watch)
        yield Trial(kind, seed, outcome)
