"""A machine as plain data, enough to judge it somewhere else: what was read, and nothing that was concluded."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from rocm_dp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = 1
_WHOLE = re.compile(r"[0-9]{1,20}")  # no file of the kernel holds a longer one, and a very long one is an error


def whole_number(text: str) -> int | None:
    """Return the whole number that a text is; None when it is none."""
    return int(text) if _WHOLE.fullmatch(text) else None


@dataclass(frozen=True, slots=True)
class Package:
    """An installed Python distribution and the folder it lies in; one name may be there twice."""

    name: str
    version: str
    place: str


@dataclass(frozen=True, slots=True)
class Device:
    """A device node: its group, and whether this process may read and write it."""

    gid: int
    usable: bool


@dataclass(frozen=True, slots=True)
class Machine:
    """What was read of one machine by one process.

    ``files``: text by path, as far as it was there and readable; ``folders``: the names in a folder; ``devices``
    under /dev; ``env``; ``commands``: what a command line printed; ``packages``; ``modules``: every place that an
    import could take a module from, the first one first; ``libraries``: shared libraries, each with the file it
    leads to; ``lock_ages``: seconds since aiter's compile locks were taken; ``shm_bytes`` of /dev/shm (-1: none).
    """

    files: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    devices: Mapping[str, Device] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[Package, ...] = ()
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)
    lock_ages: Mapping[str, int] = field(default_factory=dict)
    shm_bytes: int = -1

    def text(self, path: str) -> str:
        """Return the text of a file without the white space around it; empty when it is not there."""
        return self.files.get(path, "").strip()

    def number(self, path: str) -> int | None:
        """Return the number that a file holds; None when it holds none."""
        return whole_number(self.text(path))

    def properties(self, path: str) -> dict[str, int]:
        """Return the ``name value`` or ``name: value`` lines of a file whose values are whole numbers."""
        pairs = (line.replace(":", " ").split() for line in self.text(path).splitlines())
        found = {pair[0]: whole_number(pair[1]) for pair in pairs if len(pair) == 2}
        return {name: value for name, value in found.items() if value is not None}

    def line_of(self, path: str, name: str) -> str:
        """Return what follows ``name`` in the line of a file that starts with it; empty when none does."""
        for line in self.text(path).splitlines():
            if line.startswith(name):
                return line[len(name) :].strip(": \t")
        return ""

    def versions(self, name: str) -> list[str]:
        """Return the version of every distribution of this name."""
        return [package.version for package in self.packages if package.name == name]


class Source(Protocol):
    """Where a description comes from: the machine we run on, or a recording of another."""

    def describe(self) -> Machine:
        """Return the description; raise ConfigError or OSError when there is none to be had."""


def to_json(machine: Machine) -> str:
    """Return a description as JSON."""
    return json.dumps({"format": FORMAT, **asdict(machine)}, indent=1) + "\n"


def from_json(text: str) -> Machine:
    """Return the description that ``to_json`` wrote; what was left out is empty.

    Raises ConfigError for anything else, naming the part that is wrong.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"a machine description must be JSON: {error}") from error
    if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
        raise ConfigError(f"a machine description must be an object of format {FORMAT}")
    unknown = found.keys() - {one.name for one in fields(Machine)}
    if unknown:
        raise ConfigError(f"a machine description has no part named {', '.join(sorted(unknown))}")
    try:
        return Machine(**{name: _part(name, value) for name, value in found.items()})
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"a machine description is not as it is recorded: {error}") from error


def _part(name: str, value: Any) -> Any:
    if name == "shm_bytes":
        return _typed(name, value, int)
    if name == "packages":
        return tuple(Package(**{key: _typed(name, text, str) for key, text in one.items()}) for one in value)
    if name == "devices":
        return {path: Device(_typed(name, one["gid"], int), one["usable"] is True) for path, one in value.items()}
    if name in ("folders", "modules"):
        return {path: tuple(_typed(name, each, str) for each in names) for path, names in value.items()}
    kind = int if name == "lock_ages" else str
    return {key: _typed(name, one, kind) for key, one in value.items()}


def _typed(name: str, value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ConfigError(f"{name} of a machine description must hold {kind.__name__}, got {value!r}")
    return value
