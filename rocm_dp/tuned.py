"""The table that ``rocm-dp tune`` measured on this machine: kept in a file, the same on all ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rocm_dp.errors import ConfigError
from rocm_dp.files import write_atomically
from rocm_dp.measured import MeasuredTable
from rocm_dp.plan import digest64
from rocm_dp.platform import cache_folder
from rocm_dp.version import __version__

if TYPE_CHECKING:
    from rocm_dp.groups import Groups
    from rocm_dp.layout import RankLayout

MINE = "tuned"  # as a path: the file of this machine, if there is one
_MOST_BYTES = 2**20  # of a file: far more than a table needs


def path_for(layout: RankLayout, device: torch.device, hidden: int, dtype: torch.dtype) -> Path:
    """Return where the table of this machine, layout and kind of rows is kept."""
    facts: list[object] = [__version__, torch.__version__, torch.version.hip, torch.version.cuda]
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        facts += [gpu.name, gpu.multi_processor_count, gpu.total_memory]
    facts += [device.type, layout.world_size, layout.dp_size, layout.cp_size, hidden, dtype]
    name = digest64("\n".join(map(str, facts)).encode()) % 2**64
    return cache_folder() / "tuned" / f"{name:016x}.json"


def save(table: MeasuredTable, path: Path) -> None:
    """Write ``table`` to ``path``, whole or not at all, for the user's eyes only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, table.to_json() + "\n")


def agreed_table(
    groups: Groups, where: str | None, *, device: torch.device, hidden: int, dtype: torch.dtype
) -> MeasuredTable:
    """Return the table that rank 0 finds at ``where``, on every rank; collective.

    ``where``: a path, MINE, or None for no table. Raises ConfigError on every rank when a path was given at which
    there is no table; what can't be read of MINE is warned of and left alone.
    """
    if where is None:
        return MeasuredTable()
    data, wrong = b"", ""
    if groups.layout.rank == 0:
        try:
            path = path_for(groups.layout, device, hidden, dtype) if where == MINE else Path(where)
            data = _read(path, optional=where == MINE)
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            wrong = f"{where if where != MINE else 'the table of this machine'}: {error}"
    # Nobody asked for that of the machine: what can't be read is not there.
    text = groups.control.from_rank_0(data, wrong if where != MINE else "")
    if wrong and where == MINE:
        # Told last: where warnings are errors, this rank alone raises.
        warnings.warn(f"{wrong}; going by built-in rules", stacklevel=2)
    return MeasuredTable.from_json(text.decode()) if text else MeasuredTable()


def _read(path: Path, *, optional: bool) -> bytes:
    if optional and not path.exists():
        return b""
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"a measured table must have at most {_MOST_BYTES} bytes, it has more")
    try:
        MeasuredTable.from_json(data.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"not a measured table: {error}") from error
    return data
