"""Descriptions kept in a folder, to be judged where the machine is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocm_dp.doctor.machine import Machine, from_json, to_json
from rocm_dp.errors import ConfigError
from rocm_dp.files import read_bounded, write_atomically

if TYPE_CHECKING:
    from pathlib import Path

NAME = "machine.json"
MOST_BYTES = 4 << 20  # a node of 64 partitions takes about 1 MiB
_FOLDER_MODE = 0o700


@dataclass(frozen=True, slots=True)
class RecordedMachine:
    """The description in a folder that ``record`` wrote; one file of its own, so that no path in it is followed."""

    folder: Path

    def describe(self) -> Machine:
        """Return it; raise OSError when it is not there, ConfigError when it is not as it was recorded."""
        return from_json(read_bounded(self.folder / NAME, MOST_BYTES))


def record(machine: Machine, folder: Path) -> Path:
    """Write a description for its owner's eyes into ``folder``, made if need be; return the file."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--record needs a folder, {folder} is none")
    folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
    write_atomically(folder / NAME, to_json(machine))
    return folder / NAME
