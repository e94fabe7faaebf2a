"""What a check is, and what it says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rocm_dp.doctor.machine import Machine


class Severity(Enum):
    """How bad it is. ERROR and WARNING are problems, NOTE and FINE are not."""

    ERROR = "error"
    """Wrong results, a crash or a hang are to be expected."""
    WARNING = "warning"
    """It works, but slower than it could, or not for ever."""
    NOTE = "note"
    """Worth knowing before something is measured or changed."""
    FINE = "fine"
    """Looked at, and as it should be."""

    @property
    def is_problem(self) -> bool:
        """Whether a machine with this is not fit for service."""
        return self in (Severity.ERROR, Severity.WARNING)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check saw, and what to do about it (nothing when it is fine)."""

    severity: Severity
    seen: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to look at: ``why`` it matters, on which machines it ``applies``, and how to ``look``.

    ``look`` is pure: a description in, at least one finding out.
    """

    name: str
    why: str
    applies: Callable[[Machine], bool]
    look: Callable[[Machine], Iterator[Finding]]


def fine(seen: str) -> Finding:
    """Return that all is well."""
    return Finding(Severity.FINE, seen)


def note(seen: str, advice: str = "") -> Finding:
    """Return something to know."""
    return Finding(Severity.NOTE, seen, advice)


def warning(seen: str, advice: str) -> Finding:
    """Return something that costs."""
    return Finding(Severity.WARNING, seen, advice)


def error(seen: str, advice: str) -> Finding:
    """Return something that breaks."""
    return Finding(Severity.ERROR, seen, advice)
