"""Files that somebody else may have written, or may be reading: bounded reads, atomic writes."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import TextIO

from rocm_dp.errors import ConfigError

PRIVATE = 0o600


def read_bounded(path: Path, most: int) -> str:
    """Return the UTF-8 text of a regular file of at most ``most`` bytes.

    Raises ConfigError for a longer one, for what is not UTF-8 and for what is no regular file (a pipe, a device),
    and OSError for a symbolic link, a missing file or one that may not be read.
    """
    # Non-blocking: the open of a pipe that nobody writes to would wait for ever.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ConfigError(f"{path} must be a regular file")
        data = file.read(most + 1)
    if len(data) > most:
        raise ConfigError(f"{path} must have at most {most:,} bytes, has more")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be UTF-8, byte {error.start} is not") from error


def write_atomically(path: Path, text: str, *, mode: int = PRIVATE) -> None:
    """Write ``text`` so that a reader sees the old file or all of the new one, never one more open than ``mode``.

    A symbolic link at ``path`` is replaced, never followed. Raises OSError, and ConfigError where something is that
    is no file (a pipe, a terminal: others need it); leaves no half file behind.
    """
    _check_may_replace(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(handle, mode)
            file.write(text)
            file.flush()
            os.fsync(handle)
        os.replace(name, path)  # noqa: PTH105 - both are names already
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def open_private(path: Path) -> TextIO:
    """Open a file for its owner's eyes, to be written and read line by line; what it held is gone.

    Raises OSError for a symbolic link, and ConfigError where something is that is no file.
    """
    _check_may_replace(path)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE)
    os.fchmod(handle, PRIVATE)
    return os.fdopen(handle, "w", encoding="utf-8")


def _check_may_replace(path: Path) -> None:
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} must be a file, or not be there")
