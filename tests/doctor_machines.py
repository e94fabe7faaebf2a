"""Recorded machines for the doctor's tests: whole ones, and others that say in what they differ from those."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocm_dp.doctor.machine import Machine, from_json

FOLDER = Path(__file__).resolve().parent / "machines"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


@dataclass(frozen=True)
class Recorded:
    """A machine, and the checks that must say more than 'fine' of it, with the worst that each says."""

    text: str
    expect: dict[str, str]

    @property
    def machine(self) -> Machine:
        return from_json(self.text)


def load(name: str) -> Recorded:
    found = json.loads((FOLDER / f"{name}.json").read_text())
    return Recorded(json.dumps(_description(found)), found["expect"])


def _description(found: dict[str, Any]) -> dict[str, Any]:
    if "machine" in found:
        return dict(found["machine"])
    whole = _description(json.loads((FOLDER / f"{found['like']}.json").read_text()))
    for part, change in found["change"].items():
        if isinstance(change, dict):
            merged = {**whole[part], **change}
            whole[part] = {key: value for key, value in merged.items() if value is not None}
        else:
            whole[part] = change
    return whole
