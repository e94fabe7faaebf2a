"""The preloaded counter of HSA signals: built on demand, read through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

from rocm_dp.errors import ConfigError
from rocm_dp.soak.sample import AbsentError

MOST_SIGNALS = 4096  # KFD_SIGNAL_EVENT_LIMIT: signal events of a process
_SOURCE = "signal_counter.c"
_FIELDS = ("live", "peak", "created", "destroyed")
_COMPILERS = ("cc", "gcc", "clang")


def build_counter(cache: Path) -> Path:
    """Return libhsa_signal_counter.so in ``cache``, compiled now unless it is there.

    Its name holds a hash of the source, and it appears there whole or not at all, so ranks and jobs may build at
    once. Raises ConfigError without a C compiler, or with what the compiler said.
    """
    source = resources.files("rocm_dp.soak").joinpath(_SOURCE).read_bytes()
    library = cache / f"libhsa_signal_counter-{hashlib.sha256(source).hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise ConfigError(f"counting signals needs a C compiler, none of {', '.join(_COMPILERS)} is on the PATH")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        made = Path(folder, library.name)
        (Path(folder) / _SOURCE).write_bytes(source)
        command = [compiler, "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(made)]
        done = subprocess.run(
            [*command, str(Path(folder) / _SOURCE), "-ldl"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ConfigError(f"{compiler} can't build {_SOURCE}: {done.stderr.strip()}")
        made.rename(library)
    return library


class SignalSampler:
    """``hsa.live``, ``hsa.peak``, ``hsa.created``, ``hsa.destroyed``: HSA signals of this process.

    Absent unless the counter was preloaded. Once it is, a read that finds that no signal was ever created is an
    error: then the runtime's calls do not pass through the counter, and 0 would be a lie.
    """

    name = "hsa"

    def __init__(self) -> None:
        try:
            self._read = ctypes.CDLL(None).rocm_dp_hsa_signals
        except AttributeError:
            raise AbsentError("the counter is not preloaded (rocm-dp soak --count-signals)") from None
        self._read.restype, self._read.argtypes = None, [ctypes.POINTER(ctypes.c_int64)]

    def read(self) -> dict[str, float]:
        """Ask the counter."""
        counts = (ctypes.c_int64 * len(_FIELDS))()
        self._read(counts)
        found = dict(zip(_FIELDS, counts, strict=True))
        if not found["created"]:
            raise AbsentError("the counter is preloaded, but no call that creates a signal has passed through it")
        return {f"hsa.{name}": float(value) for name, value in found.items()}
