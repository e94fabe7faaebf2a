"""Every check in the order of the report, and what they say of one machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_dp.doctor import hardware, host, nvidia, settings, software
from rocm_dp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rocm_dp.doctor.checks import Check, Finding, Severity
    from rocm_dp.doctor.machine import Machine

CHECKS: tuple[Check, ...] = (
    *hardware.CHECKS,
    *nvidia.CHECKS,
    *settings.CHECKS,
    *host.CHECKS,
    *software.CHECKS,
)


@dataclass(frozen=True, slots=True)
class Row:
    """A finding, and the check that made it."""

    check: Check
    finding: Finding

    @property
    def severity(self) -> Severity:
        """How bad it is."""
        return self.finding.severity

    def as_dict(self) -> dict[str, str]:
        """Return the row as plain values."""
        return {
            "check": self.check.name,
            "severity": self.severity.value,
            "seen": self.finding.seen,
            "why": self.check.why,
            "advice": self.finding.advice,
        }


def diagnose(machine: Machine, only: Sequence[str] = ()) -> list[Row]:
    """Return what every check that applies finds; ``only``: the names of those to make.

    Raises ConfigError for a name that no check has.
    """
    unknown = set(only) - {check.name for check in CHECKS}
    if unknown:
        raise ConfigError(f"no check is named {', '.join(sorted(unknown))}; there are {', '.join(sorted(names()))}")
    chosen = [check for check in CHECKS if not only or check.name in only]
    return [Row(check, finding) for check in chosen if check.applies(machine) for finding in check.look(machine)]


def names() -> list[str]:
    """Return the name of every check."""
    return [check.name for check in CHECKS]
