"""What a soak is told; equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_dp.errors import ConfigError
from rocm_dp.layout import RankLayout

if TYPE_CHECKING:
    from rocm_dp.workload.traces import Trace

REQUIRED = ("host", "shm", "objects", "own")
SAMPLES = 80  # of a run whose length in steps is known
_FIRST_INTERVAL = 5  # steps, of a run whose length is not


@dataclass(frozen=True, slots=True)
class SoakConfig:
    """One soak. It ends after ``steps`` or ``minutes``, whichever comes first; one of them may be None.

    ``tokens``: most rows of a dp rank. ``plans``: how many different plans the random program uses (0: a new one
    each step, for runs of thousands of steps: what an exchange keeps of each fills up first). ``trace``: take the
    counts from its steps. ``check_every``: steps between checks against the oracle. ``inject``: leak this on the
    last rank, on purpose. ``required``: the samplers without which the soak fails. ``seed_system``: work as the
    system did that this library replaces.
    """

    ranks: int
    dp: int
    steps: int | None = 1000
    minutes: float | None = None
    seed: int = 0
    hidden: int = 64
    dtype: str = "bfloat16"
    tokens: int = 64
    plans: int = 16
    check_every: int = 10
    sample_every: int | None = None
    inject: str | None = None
    trace: Trace | None = None
    required: tuple[str, ...] = REQUIRED
    seed_system: bool = False

    def __post_init__(self) -> None:
        RankLayout(0, self.ranks, self.dp)
        if self.steps is None and self.minutes is None:
            raise ConfigError("a soak needs steps or minutes, got neither")
        for name in ("steps", "hidden", "tokens", "check_every", "sample_every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be an int of at least 1, got {value!r}")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"minutes must be above 0, got {self.minutes}")
        if type(self.plans) is not int or self.plans < 0:
            raise ConfigError(f"plans must be an int of at least 0, got {self.plans!r}")

    @property
    def align(self) -> int:
        """What each dp rank's rows are rounded up to, so that its ranks can share them: how many it has."""
        return self.ranks // self.dp

    @property
    def local_rows(self) -> int:
        """The most rows that a dp rank has in a global buffer."""
        return -(-self.tokens // self.align) * self.align

    @property
    def interval(self) -> int:
        """Steps from one sample to the next, at first."""
        if self.sample_every is not None:
            return self.sample_every
        return _FIRST_INTERVAL if self.steps is None else max(1, self.steps // SAMPLES)
