"""The machine code for gfx942 and gfx950 is what the library promises, and the gate that says so can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import bad_kernels
import pytest
import torch
from rocm_dp.kernels import rows, rows_triton
from rocm_dp.kernels.launch import Launcher

from rocm_dp.aot import isa
from rocm_dp.aot.catalog import ROWS, VERBS, Form, row_forms
from rocm_dp.aot.gate import judge
from rocm_dp.aot.target import ARCHES, Pointer, compiling_for
from rocm_dp.cli import main
from rocm_dp.errors import ConfigError
from rocm_dp.testing import RankPool

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """A cache of Triton's own for the test."""
    with patch.dict("os.environ", {"TRITON_CACHE_DIR": str(tmp_path / "triton")}):
        yield tmp_path / "triton"


def judged_here(rank: int, folder: str) -> dict[str, Any]:
    """Judge one architecture; each rank takes its own."""
    found = judge([ARCHES[rank]], cache=Path(folder) / ARCHES[rank])
    return {
        "arch": {one.arch for one in found},
        "verbs": {one.form.verb.split(",")[0] for one in found},
        "faults": [(one.form.verb, one.form.rows, one.faults) for one in found if one.faults],
        "forms": len(found),
        "keys": len({one.key for one in found}),
        "narrowest_of_aligned": min(
            min(w for _, w in one.code.accesses) for one in found if one.form.vec_bytes == 16
        ),
        "least_waves": min(one.code.occupancy for one in found if one.form.vec_bytes == 16),
    }


def test_no_kernel_has_a_fault_on_either_architecture(tmp_path: Path) -> None:
    with RankPool(len(ARCHES), backend="gloo", timeout=280.0) as pool:
        answers = pool.run(judged_here, str(tmp_path))
    for arch, found in zip(ARCHES, answers, strict=True):
        assert found["arch"] == {arch}
        assert found["verbs"] == {*VERBS, "compact_rows", "expand_rows"}
        assert found["faults"] == []
        assert found["forms"] == len(list(row_forms()))
        # Forms whose rows differ only in what a launch passes as a number share their code.
        assert found["keys"] > len(ROWS)
        assert found["narrowest_of_aligned"] >= 4
        assert found["least_waves"] >= 3


def code_of(form: Form) -> isa.Isa:
    with compiling_for("gfx942"):
        return isa.parse(form.compile().asm["amdgcn"])


def form_of(kernel: Any, args: tuple[Any, ...], **constants: Any) -> Form:
    return Form("control", "", kernel, args, constants, 16, large=True)


@pytest.mark.usefixtures("cache")
def test_a_kernel_that_spills_is_caught() -> None:
    pointer = Pointer(torch.float32)
    code = code_of(form_of(bad_kernels.spills, (pointer, pointer), BLOCK=65536))
    said = "; ".join(isa.faults(code, vec_bytes=16))
    assert "spills" in said
    assert "scratch" in said


@pytest.mark.usefixtures("cache")
def test_a_kernel_with_32_bit_addresses_is_caught() -> None:
    pointer = Pointer(torch.int32, large=True)
    code = code_of(form_of(bad_kernels.narrow_addresses, (pointer, pointer, 3, 9), WIDTH=4096, BLOCK=1024))
    assert "has no 64-bit product or sum for its addresses" in isa.faults(code, vec_bytes=16)


@pytest.mark.usefixtures("cache")
def test_a_misaligned_pointer_is_caught() -> None:
    [aligned] = [f for f in row_forms() if (f.verb, f.rows, f.large) == ("place_rows", "[7168] bf16", False)]
    assert isa.faults(code_of(aligned), vec_bytes=16) == []
    off = replace(aligned, args=(Pointer(torch.int32, aligned=False), *aligned.args[1:]))
    assert isa.faults(code_of(off), vec_bytes=16) == ["stores rows 4 bytes at a time where 16 are possible"]


def test_wave32_and_missing_metadata_are_caught() -> None:
    text = "\n".join(
        f"    .{name}: {value}"
        for name, value in {
            "vgpr_count": 33,
            "sgpr_count": 12,
            "vgpr_spill_count": 0,
            "sgpr_spill_count": 0,
            "private_segment_fixed_size": 0,
            "group_segment_fixed_size": 0,
            "wavefront_size": 32,
        }.items()
    )
    assert "wave32, not wave64" in isa.faults(isa.parse(text), vec_bytes=16)
    with pytest.raises(ValueError, match="no metadata field vgpr_count"):
        isa.parse(text.replace("vgpr_count", "registers"))


@pytest.mark.parametrize(("vgprs", "waves"), [(1, 8), (64, 8), (65, 7), (128, 4), (129, 3), (256, 2), (512, 1)])
def test_occupancy_is_what_512_registers_a_lane_leave_room_for(vgprs: int, waves: int) -> None:
    code = isa.Isa(vgprs, 0, 0, 0, 0, 0, 64, Counter(), wide_addresses=True)
    assert code.occupancy == waves


class Recorder:
    """Stands where a kernel is launched, and keeps what it was launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constants: self.launches.append((args, constants))


def test_the_catalog_compiles_what_the_library_launches() -> None:
    """Every form of the catalog is met by a call of the library, argument for argument."""
    recorder, forms = Recorder(), {(f.verb, f.rows): f for f in row_forms() if not f.large}
    dtypes = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}
    launched = {}
    with (
        patch.object(rows, "_by_triton", lambda tensor: True),
        patch.object(rows_triton, "launch_move_rows", Launcher(recorder, moved=2)),
        patch.object(rows_triton, "launch_repack_rows", Launcher(recorder, moved=2)),
        patch.object(torch.version, "hip", "7.2"),
    ):
        for (name, itemsize, width), world in product(ROWS, (2, 4, 8)):
            dtype = dtypes.get(name) or getattr(torch, name)
            dst, src = torch.zeros(512 * world, width, dtype=dtype), torch.zeros(4096, width, dtype=dtype)
            number, status = torch.tensor(1, dtype=torch.int32), rows.new_status("cpu")
            for verb in VERBS:
                getattr(rows, verb)(dst, src, start=number, count=number, status=status)
                launched[verb, f"[{width}] {name}"] = recorder.launches.pop()
            counts = torch.ones(world, dtype=torch.int32)
            rows.expand_rows(dst, src, counts=counts, status=status)
            launched[f"expand_rows, {world} ranks", f"[{width}] {name}"] = recorder.launches.pop()
            rows.compact_rows(src, dst, counts=counts, status=status)
            launched[f"compact_rows, {world} ranks", f"[{width}] {name}"] = recorder.launches.pop()
            assert itemsize == dtype.itemsize
    assert launched.keys() == forms.keys()
    for key, (args, constants) in launched.items():
        form = forms[key]
        assert {**form.constants, "num_warps": rows._THREADS // 64} == constants
        kinds = [arg.dtype if isinstance(arg, (torch.Tensor, Pointer)) else type(arg) for arg in args]
        assert kinds == [arg.dtype if isinstance(arg, Pointer) else type(arg) for arg in form.args]


def test_saved_kernels_are_a_warm_cache_with_a_manifest(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "rocm_dp",
        "kernels",
        "--arch",
        "gfx950",
        "--markdown",
        "--save",
        str(tmp_path),
    ]
    first = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert first.returncode == 0, first.stderr
    assert "| gfx950 | place_rows" in first.stdout
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert len(manifest["kernels"]) == len(list(row_forms()))
    assert {kernel["arch"] for kernel in manifest["kernels"]} == {"gfx950"}
    saved = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.hsaco")}
    assert len(saved) == len({kernel["key"] for kernel in manifest["kernels"]})
    again = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.hsaco")} == saved


def test_an_unknown_architecture_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--arch", "gfx90a"]) == 2
    assert "arch must be one of gfx942, gfx950, got gfx90a" in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(ConfigError), compiling_for("sm_90"):
        pass
