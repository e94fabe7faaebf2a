"""What a run is told; equal on all ranks. Plain values that travel to the ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rocm_dp.errors import ConfigError
from rocm_dp.layout import RankLayout

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """A run of ``verb`` (gather, combine or host) over ``cases``, the counts of all dp ranks.

    ``iters``: repeats that medians are of, after ``warmup`` calls. ``calls``: in one graph (gather and combine; 0:
    no graphs) or in one repeat (host). ``timeout``: seconds for the whole run.

    Raises ConfigError for values that can't be right.
    """

    verb: str
    ranks: int
    dp: int
    cases: tuple[tuple[int, ...], ...]
    transports: tuple[str, ...]
    cp: int = 1
    hidden: int = 256
    dtype: str = "bf16"
    iters: int = 50
    warmup: int = 10
    calls: int = 20
    check: bool = True
    unaligned: bool = False
    seed: int = 0
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        self.layout(0)
        for name, least in (("hidden", 1), ("iters", 1), ("warmup", 1), ("calls", int(self.verb == "host"))):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be among {', '.join(DTYPES)}, got {self.dtype!r}")
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"--timeout must be a number of seconds above 0, got {self.timeout}")

    def layout(self, rank: int) -> RankLayout:
        """Return where ``rank`` stands."""
        return RankLayout(rank, self.ranks, self.dp, self.cp)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.hidden * ITEMSIZE[self.dtype]
