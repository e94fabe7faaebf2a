"""What a user may choose, and the environment that SGLang's users choose it by."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_dp import rocm
from rocm_dp.options import Options

if TYPE_CHECKING:
    from rocm_dp.plan import TokenPlan

_NOT_ASKED = rocm.Workaround(on=False, reason="not asked")
_OPTIONS = Options()
_SGLANG_ROCM700 = "SGLANG_USE_ROCM700A"
_SGLANG_GATHERV = "SGLANG_DP_USE_GATHERV"
_SGLANG_FP8 = "SGLANG_ENABLE_DP_GATHER_FP8"


@dataclass(frozen=True, slots=True)
class Settings:
    """Choices of a DpAttention; equal on all ranks.

    ``gatherv``: tell SGLang that combines of varying sizes are wanted. ``fp8_gather``: bfloat16 rows travel as fp8
    with a scale for every 128 columns (lossy). ``hybrid_ssm``: prefill with an idle rank is padded to MAX_LEN.
    ``sum_len_in_graphs``: see ``rocm_dp.rocm``. ``max_rows``: the most rows of a global buffer that the exchange
    holds room for (None: it grows, and nothing of it is captured), ``max_local_rows``: of one dp rank in it; larger
    steps are summed in the caller's own buffer. ``options``: those of the TokenExchange.
    """

    gatherv: bool = False
    fp8_gather: bool = False
    hybrid_ssm: bool = False
    sum_len_in_graphs: rocm.Workaround = _NOT_ASKED
    max_rows: int | None = None
    max_local_rows: int | None = None
    options: Options = _OPTIONS

    @property
    def told(self) -> str:
        """What must be equal on all ranks, in words: all but the reason of the workaround and the options."""
        names = ("gatherv", "fp8_gather", "hybrid_ssm", "max_rows", "max_local_rows")
        own = ", ".join(f"{name}={getattr(self, name)}" for name in names)
        return f"{own}, sum_len_in_graphs={self.sum_len_in_graphs.on}"

    def fits(self, plan: TokenPlan) -> bool:
        """Return whether the exchange has room for a step."""
        within = self.max_rows is None or plan.rows <= self.max_rows
        return within and (self.max_local_rows is None or max(plan.sizes) <= self.max_local_rows)


def from_environment(
    *, hybrid_ssm: bool = False, max_rows: int | None = None, max_local_rows: int | None = None
) -> Settings:
    """Return the settings that SGLang's variables and ours ask for on this machine.

    ROCM_DP_SUM_LEN_IN_GRAPHS comes before SGLANG_USE_ROCM700A, which SGLang heeds on ROCm only. Raises ConfigError
    for a variable that is neither 0 nor 1.
    """
    versions = rocm.probe()
    name = rocm.OVERRIDE
    override = rocm.override_from(os.environ, name)
    if override is None and versions.torch_hip is not None:
        name = _SGLANG_ROCM700
        override = rocm.override_from(os.environ, name)
    gatherv = bool(rocm.override_from(os.environ, _SGLANG_GATHERV))
    return Settings(
        gatherv=gatherv,
        # In SGLang it is the wire of that path, and alone changes nothing.
        fp8_gather=gatherv and bool(rocm.override_from(os.environ, _SGLANG_FP8)),
        hybrid_ssm=hybrid_ssm,
        sum_len_in_graphs=rocm.sum_len_in_graphs(versions, override, override_name=name),
        max_rows=max_rows,
        max_local_rows=max_local_rows,
    )
