"""Every error that rocm_dp raises on purpose.

::

    RocmDpError
    ├── ConfigError (ValueError)        a layout, a plan, an option or a call that can't be right
    ├── TensorError (ValueError)        a tensor whose shape, dtype, device or strides don't fit the plan
    │   └── DtypeError (TypeError)      a sum was asked of a dtype that has none here (fp8, integers)
    ├── TraceError (ValueError)         a malformed line in a request trace
    ├── RankMismatchError (RuntimeError)  ranks disagree, or one did not come
    ├── RankFailedError (RuntimeError)  a rank's process died without an answer
    ├── TransportRefusedError (RuntimeError)  no transport, or not the forced one, can carry this call
    ├── PeerRefusedError (RuntimeError)  memory can't be shared between these ranks
    ├── PeerTimeoutError (RuntimeError)  ranks did not come to a call over peer memory in time
    ├── SlotBusyError (RuntimeError)    a (verb, batch) was used again before its Pending was waited for
    ├── StaleViewError (RuntimeError)   a Pending was waited for after its buffer had been used again
    ├── EventPoolExhausted (RuntimeError)  more events asked for than the pool may hold
    ├── CapacityError (RuntimeError)    a plan needs more rows than were reserved
    └── ClosedError (RuntimeError)      the object was closed
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class RocmDpError(Exception):
    """Base of every error that rocm_dp raises on purpose."""


class ConfigError(RocmDpError, ValueError):
    """A layout, a plan, an option or a call that can't be right, whatever the other ranks do."""


class TensorError(RocmDpError, ValueError):
    """A tensor whose shape, dtype, device or strides don't fit the plan."""


class DtypeError(TensorError, TypeError):
    """A sum was asked of a dtype that is only moved here, never added (fp8, integers, bool)."""


class TraceError(RocmDpError, ValueError):
    """A malformed line in a request trace: ``file``, ``line`` (1-based) and ``reason``."""

    def __init__(self, file: Path | str, line: int, reason: str) -> None:
        super().__init__(f"{file}, line {line}: {reason}")
        self.file, self.line, self.reason = str(file), line, reason


class RankMismatchError(RocmDpError, RuntimeError):
    """Ranks disagree, or one did not come. ``values`` maps each rank to what it said."""

    def __init__(self, message: str, values: Mapping[int, object] | None = None) -> None:
        super().__init__(message)
        self.values: dict[int, object] = dict(values or {})


class RankFailedError(RocmDpError, RuntimeError):
    """The process of ``rank`` died without an answer. ``exitcode`` as in multiprocessing (-9: SIGKILL)."""

    def __init__(self, rank: int, exitcode: int | None) -> None:
        super().__init__(f"rank {rank} died without an answer (exit code {exitcode})")
        self.rank, self.exitcode = rank, exitcode


class TransportRefusedError(RocmDpError, RuntimeError):
    """No transport, or not the forced one, can carry this call; the message says why."""


class PeerRefusedError(RocmDpError, RuntimeError):
    """Memory can't be shared between these ranks; the message says why, for each of them."""


class PeerTimeoutError(RocmDpError, RuntimeError):
    """Ranks did not come to a call over peer memory in time; its result is not to be used, the exchange closes.

    ``verb`` and ``batch`` of the first such call, the ``epoch`` of its channel, the ``missing`` ranks.
    """

    def __init__(
        self, message: str, *, verb: str = "", batch: int = 0, epoch: int = 0, missing: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.verb, self.batch, self.epoch, self.missing = verb, batch, epoch, missing


class SlotBusyError(RocmDpError, RuntimeError):
    """A (verb, batch) was used again before the ``Pending`` of its last use was waited for."""


class StaleViewError(RocmDpError, RuntimeError):
    """A ``Pending`` was waited for after the buffer it stands for had been used again."""


class EventPoolExhausted(RocmDpError, RuntimeError):  # noqa: N818 - the public name in the design
    """More events asked for than the pool may hold; the message names who holds what."""


class CapacityError(RocmDpError, RuntimeError):
    """A plan needs more rows than were reserved, or a buffer would grow where it must not."""


class ClosedError(RocmDpError, RuntimeError):
    """The object was closed and can't be used."""
