"""Which ROCm this process runs on, and the workaround that its HIP runtime may need.

``SUM_LEN in graphs``: on ROCm 7.0.0 to 7.2.0 a collective of torch.distributed dies inside a capture with
hipErrorCapturedEvent (907): the watchdog of torch queries an event that a capturing stream recorded, which the
runtime refuses (pytorch/pytorch#177309; a probe of nothing but that query fails on HIP 7.2.26015 and passes on
7.2.53211). So there captured steps are padded to SUM_LEN, whose gather an all-reduce outside torch.distributed, or
peer memory, can carry.
"""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from rocm_dp.errors import ConfigError
from rocm_dp.kernels.driver import loaded_library

if TYPE_CHECKING:
    from collections.abc import Mapping

Triple: TypeAlias = tuple[int, int, int]

OVERRIDE = "ROCM_DP_SUM_LEN_IN_GRAPHS"
COST = (
    "over all_reduce every row of a captured step crosses the links twice; over peer memory it costs nothing, and "
    "steps that are not captured are not changed"
)
_FIRST_BAD: Triple = (7, 0, 0)
_FIRST_GOOD_RELEASE: Triple = (7, 2, 1)
_LAST_BAD_BUILD: Triple = (7, 2, 26015)  # HIP of ROCm 7.2.0
_FIRST_GOOD_BUILD: Triple = (7, 2, 53211)  # HIP of ROCm 7.2.1, 7.2.3 and 7.2.4 alike
_BUILDS_FROM = 1000  # the third number of HIP is a build number, that of a release is small
_INFO_FILE = Path("/opt/rocm/.info/version")


@dataclass(frozen=True, slots=True)
class RocmVersions:
    """What is said of the version, None where nothing is.

    ``runtime``: the number of hipRuntimeGetVersion, of the library that this process has loaded (a wheel of torch
    may bring its own); ``torch_hip``: torch.version.hip, what torch was built with; ``release``: the ROCm info file
    of the machine or image.
    """

    runtime: int | None = None
    torch_hip: str | None = None
    release: str | None = None


@dataclass(frozen=True, slots=True)
class Workaround:
    """Whether SUM_LEN is used in graphs, and why or why not."""

    on: bool
    reason: str

    @property
    def text(self) -> str:
        """What a person should read: whether it is on, why, and what it costs."""
        return f"on, {self.reason}: {COST}" if self.on else f"off, {self.reason}"


def probe(info_file: Path = _INFO_FILE) -> RocmVersions:
    """Return what this process and this machine say; nothing on a build of torch without HIP."""
    hip = torch.version.hip
    if hip is None:
        return RocmVersions()
    release = None
    with suppress(OSError):
        release = info_file.read_text().strip() or None
    return RocmVersions(_runtime_number(), hip, release)


def sum_len_in_graphs(
    versions: RocmVersions, override: bool | None = None, *, override_name: str = OVERRIDE
) -> Workaround:
    """Say whether captured steps need SUM_LEN. Pure: feed ``StepRules.sum_len_in_graphs`` with ``on``.

    The loaded runtime decides, then what torch was built with, then the info file. A build between the last that
    is known to be bad and the first that is known to be good is judged by the info file, or taken for bad.
    """
    found = _judge(versions)
    if override is None:
        return found
    alone = "on" if found.on else "off"
    return Workaround(override, f"{override_name}={int(override)}; without it {alone}: {found.reason}")


def workaround(variables: Mapping[str, str]) -> Workaround:
    """Say it of this process and machine; ``variables`` may override it."""
    return sum_len_in_graphs(probe(), override_from(variables))


def override_from(environment: Mapping[str, str], name: str = OVERRIDE) -> bool | None:
    """Return what variable ``name`` says: 1 on, 0 off, None when it is unset or empty; else ConfigError."""
    value = environment.get(name, "").strip().lower()
    known = {"": None, "1": True, "true": True, "0": False, "false": False}
    if value not in known:
        raise ConfigError(f"{name} must be 0 or 1, got {environment[name]!r}")
    return known[value]


def hip_of(number: int) -> Triple:
    """Return (major, minor, build) of a number of hipRuntimeGetVersion.

    >>> hip_of(70226015)
    (7, 2, 26015)
    """
    return number // 10_000_000, number // 100_000 % 100, number % 100_000


def triple_of(text: str | None) -> Triple | None:
    """Return the first three numbers of a version text, None when it has no two.

    >>> triple_of("7.2.26015-fc0010cf6a"), triple_of("6.4")
    ((7, 2, 26015), (6, 4, 0))
    """
    found = re.match(r"\s*(\d+)\.(\d+)(?:\.(\d+))?", text or "")
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


def _judge(versions: RocmVersions) -> Workaround:
    release = triple_of(versions.release)
    witnesses = (
        ("the HIP runtime", hip_of(versions.runtime) if versions.runtime else None),
        ("torch.version.hip", triple_of(versions.torch_hip)),
        ("the ROCm info file", release),
    )
    for who, version in witnesses:
        if version is None:
            continue
        said = f"{who} says {_text(version)}"
        if version < _FIRST_BAD:
            return Workaround(on=False, reason=f"{said}, before {_text(_FIRST_BAD)}")
        is_build = version[2] >= _BUILDS_FROM
        good = _FIRST_GOOD_BUILD if is_build else _FIRST_GOOD_RELEASE
        if version >= good:
            return Workaround(on=False, reason=f"{said}, not before {_text(good)}")
        if is_build and version > _LAST_BAD_BUILD and release is not None and release[:2] == version[:2]:
            on = release < _FIRST_GOOD_RELEASE
            return Workaround(on, f"{said}, a build not known here; the ROCm info file says {_text(release)}")
        return Workaround(on=True, reason=f"{said}, in [{_text(_FIRST_BAD)}, {_text(good)})")
    return Workaround(on=False, reason="this is not ROCm")


def _runtime_number() -> int | None:
    number = ctypes.c_int()
    try:
        library = loaded_library("libamdhip64")
        failed = library.hipRuntimeGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return None if failed else number.value


def _text(version: Triple) -> str:
    return ".".join(map(str, version))
