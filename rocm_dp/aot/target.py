"""Compile as if a GPU of some architecture were here: Triton's own launch path, without the launch.

A kernel that is compiled so has the same key in Triton's cache as one that is launched on such a GPU by the same
build of Triton with the same settings.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from rocm_dp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ARCHES = ("gfx942", "gfx950")
WAVE = 64


class _AbsentGpu:
    """What Triton asks of its driver when it compiles."""

    def __init__(self, arch: str) -> None:
        self._arch = arch

    def get_current_target(self) -> Any:
        return GPUTarget("hip", self._arch, WAVE)

    def get_current_device(self) -> str:
        # Triton keeps compiled kernels by device: this one is no real GPU of this process.
        return f"absent {self._arch}"

    def get_current_stream(self, device: str) -> int:  # noqa: ARG002 - the driver's interface
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda")


@dataclass(frozen=True, slots=True)
class Pointer:
    """Stands for a tensor of ``dtype``: ``aligned`` to 16 bytes or not, ``large``: of more than 2 GiB."""

    dtype: torch.dtype
    aligned: bool = True
    large: bool = False

    def data_ptr(self) -> int:
        """Return an address that is aligned or not."""
        return 16 if self.aligned else 1

    def ptr_range(self) -> int:
        """Return how many bytes may be addressed: up to 2 GiB Triton uses 32-bit offsets on AMD."""
        return 2**40 if self.large else 2**20


@contextmanager
def compiling_for(arch: str, cache: Path | None = None) -> Iterator[None]:
    """Let Triton compile for ``arch``, into the folder ``cache`` (None: its usual one).

    Raises ConfigError for another architecture, and when Triton interprets its kernels.
    """
    if arch not in ARCHES:
        raise ConfigError(f"arch must be one of {', '.join(ARCHES)}, got {arch}")
    if triton.knobs.runtime.interpret:
        raise ConfigError("kernels can't be compiled while TRITON_INTERPRET is set")
    before = driver._active
    driver.set_active(_AbsentGpu(arch))
    try:
        with triton.knobs.cache.scope():
            if cache is not None:
                triton.knobs.cache.dir = str(cache.resolve())
            yield
    finally:
        driver._active = before
