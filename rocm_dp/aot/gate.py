"""The gate: every kernel, compiled for an architecture, with what its machine code gets wrong."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton

from rocm_dp.aot import isa
from rocm_dp.aot.catalog import all_forms
from rocm_dp.aot.target import compiling_for
from rocm_dp.errors import ConfigError
from rocm_dp.files import write_atomically
from rocm_dp.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from rocm_dp.aot.catalog import Form

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Judged:
    """One form of a kernel as compiled for ``arch``: its code, its faults, and the names of what was made."""

    arch: str
    form: Form
    code: isa.Isa
    faults: tuple[str, ...]
    key: str
    digest: str


def forms_of(only: str | None) -> list[Form]:
    """Return every form, or those of the kernel ``only``; raise ConfigError when there is no such kernel."""
    forms = [form for form in all_forms() if only in (None, form.verb)]
    if not forms:
        names = sorted({form.verb for form in all_forms()})
        raise ConfigError(f"kernel must be one of {', '.join(names)}, got {only}")
    return forms


def judge(
    arches: Iterable[str],
    forms: Sequence[Form],
    *,
    cache: Path | None = None,
    on_done: Callable[[], object] = lambda: None,
) -> list[Judged]:
    """Compile each form for every architecture into ``cache`` (None: Triton's own) and judge the code.

    ``on_done`` is called after each. Raises ConfigError for an unknown architecture.
    """
    judged = []
    for arch in arches:
        with compiling_for(arch, cache):
            for form in forms:
                made = form.compile()
                assert made.metadata.target.arch == arch
                code = isa.parse(made.asm["amdgcn"], made.asm["ttir"])
                faults = tuple(
                    isa.faults(
                        code,
                        vec_bytes=form.vec_bytes,
                        only_rows=form.only_rows,
                        peers=form.peers,
                        lanes=form.lanes,
                    )
                )
                digest = hashlib.sha256(made.asm["hsaco"]).hexdigest()
                judged.append(Judged(arch, form, code, faults, made.hash, digest))
                on_done()
    return judged


def write_manifest(folder: Path, judged: Iterable[Judged]) -> None:
    """Write what the cache in ``folder`` holds beside it, as JSON."""
    kernels = [
        {
            "arch": one.arch,
            "kernel": one.form.verb,
            "rows": one.form.rows,
            "call": one.form.call,
            "over_2_gib": one.form.large,
            "key": one.key,
            "hsaco_sha256": one.digest,
            "vgprs": one.code.vgprs,
            "faults": list(one.faults),
        }
        for one in judged
    ]
    about = {"rocm_dp": __version__, "triton": triton.__version__, "kernels": kernels}
    write_atomically(folder / MANIFEST, json.dumps(about, indent=1) + "\n", mode=0o644)
