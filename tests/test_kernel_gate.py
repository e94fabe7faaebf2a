"""The machine code for gfx942 and gfx950 is what the library promises, and the gate that says so can fail."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import bad_kernels
import pytest
import torch
import triton
from rocm_dp.kernels import (
    combine_triton,
    copied_triton,
    gather_triton,
    peer,
    peer_triton,
    pull_triton,
    rows,
    rows_triton,
)
from rocm_dp.kernels.launch import Launcher

from rocm_dp import PaddingMode, RankLayout, TokenPlan
from rocm_dp.aot import isa
from rocm_dp.aot.catalog import ROWS, VERBS, Form, all_forms, peer_forms, row_forms
from rocm_dp.aot.gate import judge
from rocm_dp.aot.target import ARCHES, Pointer, compiling_for
from rocm_dp.cli import main
from rocm_dp.errors import ConfigError
from rocm_dp.testing import RankPool
from rocm_dp.transports import collectives
from rocm_dp.transports.all_gather import AllGather
from rocm_dp.transports.all_reduce import AllReduce

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """A cache of Triton's own for the test."""
    with patch.dict("os.environ", {"TRITON_CACHE_DIR": str(tmp_path / "triton")}):
        yield tmp_path / "triton"


def judged_here(rank: int, folder: str, share: int) -> dict[str, Any]:
    """Judge one architecture, each rank its own; of the row kernels one form in ``share``, each rank others."""
    forms = [*list(row_forms())[rank % share :: share], *peer_forms()]
    found = judge([ARCHES[rank]], forms, cache=Path(folder) / ARCHES[rank])
    return {
        "verbs": {one.form.verb for one in found},
        "faults": [(one.form.verb, one.form.rows, one.faults) for one in found if one.faults],
        "forms": {name_of(one.form) for one in found},
        "keys": len({one.key for one in found}),
        "narrowest_of_aligned": min(
            min(w for _, w in one.code.accesses) for one in found if one.form.vec_bytes == 16
        ),
        "least_waves": min(one.code.occupancy for one in found if one.form.vec_bytes == 16 and not one.form.peers),
        # A compute unit has four SIMDs; a grid of the peer kernels asks for one block on each unit at most.
        "least_blocks": min(one.code.occupancy * 4 * 64 // one.form.threads for one in found if one.form.peers),
    }


def name_of(form: Form) -> tuple[object, ...]:
    return form.verb, form.rows, form.call, form.large, form.only_rows


# In halves each form is compiled for one of the architectures; each verb, call and width for both, not with buffers
# on either side of 2 GiB.
@pytest.mark.parametrize("share", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_no_kernel_has_a_fault_on_either_architecture(tmp_path: Path, share: int) -> None:
    with RankPool(len(ARCHES), backend="gloo", timeout=280.0) as pool:
        answers = pool.run(judged_here, str(tmp_path), share)
    every = {name_of(form) for form in all_forms()}
    assert set().union(*(found["forms"] for found in answers)) == every
    for found in answers:
        over_peers = {"gather_rows", "combine_rows", "pull_rows", "open_slot", "meet", "sum_rows"}
        assert found["verbs"] == {*VERBS, "compact_rows", "expand_rows", *over_peers}
        assert found["faults"] == []
        if share == 1:
            assert found["forms"] == every
        assert {name[:3] for name in found["forms"]} == {name[:3] for name in every}
        # Forms whose rows differ only in what a launch passes as a number share their code.
        assert found["keys"] > len(ROWS)
        assert found["narrowest_of_aligned"] >= 4
        assert found["least_waves"] >= 3
        assert found["least_blocks"] >= 1


def code_of(form: Form) -> isa.Isa:
    with compiling_for("gfx942"):
        made = form.compile()
    return isa.parse(made.asm["amdgcn"], made.asm["ttir"])


def form_of(kernel: Any, args: tuple[Any, ...], **constants: Any) -> Form:
    return Form("control", "", "", kernel, args, constants, 16, large=True)


@pytest.mark.usefixtures("cache")
def test_a_kernel_that_spills_is_caught() -> None:
    pointer = Pointer(torch.float32)
    code = code_of(form_of(bad_kernels.spills, (pointer, pointer), BLOCK=16384))
    said = "; ".join(isa.faults(code, vec_bytes=16))
    assert "spills" in said
    assert "scratch" in said


@pytest.mark.usefixtures("cache")
def test_a_kernel_with_32_bit_addresses_is_caught() -> None:
    pointer = Pointer(torch.int32, large=True)
    code = code_of(form_of(bad_kernels.narrow_product, (pointer, pointer, 3, 9), WIDTH=4096, BLOCK=1024))
    assert "makes 1 addresses in 32 bits" in isa.faults(code, vec_bytes=16)
    code = code_of(form_of(bad_kernels.narrow_step, (pointer, pointer, 3), BLOCK=1024))
    assert "makes 1 addresses in 32 bits" in isa.faults(code, vec_bytes=16)


@pytest.mark.usefixtures("cache")
def test_a_misaligned_pointer_is_caught() -> None:
    [aligned] = [
        f
        for f in row_forms()
        if (f.verb, f.rows, f.large, f.only_rows) == ("place_rows", "[7168] bf16", False, True)
    ]
    assert isa.faults(code_of(aligned), vec_bytes=16, only_rows=True) == []
    off = replace(aligned, args=(Pointer(torch.int32, aligned=False), *aligned.args[1:]))
    said = "stores rows 4 bytes at a time where 16 are possible"
    assert isa.faults(code_of(off), vec_bytes=16, only_rows=True) == [said]
    assert isa.faults(code_of(off), vec_bytes=16) == [said]


@pytest.mark.usefixtures("cache")
def test_a_hand_over_that_stays_within_one_gpu_is_caught() -> None:
    """The gather hands over at system scope; the same atomics at device scope reach no other GPU."""
    form = next(form for form in peer_forms() if form.peers == 8)
    code = code_of(form)
    assert isa.faults(code, vec_bytes=16, peers=8, lanes=form.lanes) == []
    assert min(code.system_releases, code.system_acquires) >= 2
    pointer = Pointer(torch.int64)
    near = code_of(form_of(bad_kernels.near_flags, (pointer, pointer), BLOCK=256))
    assert "has 0 releases and 0 acquires of system scope for 1 peers" in isa.faults(near, vec_bytes=16, peers=1)


@pytest.mark.usefixtures("cache")
def test_rows_that_are_pushed_in_pieces_are_caught() -> None:
    party = peer.Party(0, 2, 0, 2, 2, 1)
    narrow = peer.gather_constants(party, (2,), on_device=False)
    form = Form("", "", "", gather_triton.gather_rows, peer.NUMBERS["gather_rows"], narrow, 16, False, 2)
    assert "stores rows 2 bytes at a time where 16 are possible" in isa.faults(code_of(form), vec_bytes=16, peers=2)


def test_every_kernel_of_the_folder_is_in_the_catalog() -> None:
    # Those move no rows: they write the counts of a graph's plan, time a look at a flag, end all waits.
    judged = {form.kernel.__name__ for form in all_forms()} | {"write_counts", "look", "give_up"}
    launched = set()
    for module in (rows_triton, peer_triton, gather_triton, combine_triton, copied_triton, pull_triton):
        tree = ast.parse(Path(str(module.__file__)).read_text())
        for name in (node.name for node in tree.body if isinstance(node, ast.FunctionDef)):
            # What other kernels call has no numbers of a launch, so nothing exempt from specialisation.
            if isinstance(made := getattr(module, name), triton.JITFunction):
                launched |= {name} if any(param.do_not_specialize for param in made.params) else set()
    assert judged == launched
    files = {path.stem for path in Path(rows_triton.__file__).parent.glob("*_triton.py")}
    assert files == {
        *("rows_triton", "peer_triton", "gather_triton", "combine_triton", "copied_triton", "pull_triton")
    }


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
    assert "wave32, not wave64" in isa.faults(isa.parse(text, ""), vec_bytes=16)
    strange = isa.parse("\tbuffer_load_lds_dwordx4 v1\n" + text, "")
    assert "has 1 memory accesses of a kind that is not known here" in isa.faults(strange, vec_bytes=16)
    with pytest.raises(ValueError, match="no metadata field vgpr_count"):
        isa.parse(text.replace("vgpr_count", "registers"), "")


@pytest.mark.parametrize(("vgprs", "waves"), [(1, 8), (64, 8), (65, 7), (128, 4), (129, 3), (256, 2), (512, 1)])
def test_occupancy_is_what_512_registers_a_lane_leave_room_for(vgprs: int, waves: int) -> None:
    code = isa.Isa(vgprs, 0, 0, 0, 0, 0, 64, Counter(), 0, 0, 0, 0)
    assert code.occupancy == waves


class Recorder:
    """Stands where a kernel is launched, and keeps what it was launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constants: self.launches.append((args, constants))


def launches_of(call: Callable[[], object]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What ``call`` would launch on an AMD GPU."""
    recorder = Recorder()
    with (
        patch.object(rows, "_by_triton", lambda tensor: True),
        patch.object(rows_triton, "launch_move_rows", Launcher(recorder, moved=2)),
        patch.object(rows_triton, "launch_repack_rows", Launcher(recorder, moved=2)),
        patch.object(torch.version, "hip", "7.2"),
    ):
        call()
    return recorder.launches


def met(launch: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Form]:
    """The forms of the catalog that this launch is, argument for argument."""

    def kinds(args: tuple[Any, ...]) -> list[object]:
        return [arg.dtype if isinstance(arg, (torch.Tensor, Pointer)) else type(arg) for arg in args]

    args, constants = launch
    return [
        form
        for form in row_forms()
        if not form.large
        and {**form.constants, "num_warps": rows._THREADS // 64} == constants
        and kinds(form.args) == kinds(args)
    ]


def test_every_form_of_the_catalog_is_launched_by_a_call_of_the_library() -> None:
    dtypes = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int32": torch.int32}
    unmet = {(f.verb, f.rows, f.call) for f in row_forms()}
    for (name, _, width), world, on_device, report in product(ROWS, (2, 4, 8), (True, False), (True, False)):
        dst, src = (torch.empty(n, width, dtype=dtypes[name]) for n in (512 * world, 4096))
        number: Any = torch.tensor(1, dtype=torch.int32) if on_device else 1
        status = rows.new_status("cpu") if report else None
        counts = torch.ones(world, dtype=torch.int32)
        calls: list[Callable[[], object]] = [
            partial(getattr(rows, verb), dst, src, start=number, count=number, status=status) for verb in VERBS
        ]
        calls.append(partial(rows.expand_rows, dst, src, counts=counts, status=status))
        calls.append(partial(rows.compact_rows, src, dst, counts=counts, status=status))
        for call in calls:
            for launch in launches_of(call):
                unmet -= {(form.verb, form.rows, form.call) for form in met(launch)}
    assert unmet == set()


def test_what_the_transports_launch_is_in_the_catalog() -> None:
    """The launches of a padded gather and of an all-reduce, as the transports make them."""
    layout = RankLayout(0, 2, 2)
    plan, local = TokenPlan((3, 5), PaddingMode.MAX_LEN), torch.zeros(3, 7168, dtype=torch.bfloat16)
    out = torch.zeros(plan.rows, 7168, dtype=torch.bfloat16)
    groups: Any = SimpleNamespace(world=None, tp=None, cp=None)
    for transport in (AllGather(layout, groups), AllReduce(layout, groups)):
        with (
            patch.object(collectives, "all_gather", lambda *_: None),
            patch.object(collectives, "all_reduce", lambda *_: None),
        ):
            [launch] = launches_of(partial(transport.gather, out, local, plan, partial=False))
        [form] = met(launch)
        assert (form.verb, form.only_rows) == ("place_rows", True)


def test_saved_kernels_are_a_warm_cache_with_a_manifest(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rocm_dp", "kernels", "--arch", "gfx950", "--markdown"]
    command += ["--only", "place_rows", "--save", str(tmp_path)]
    first = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert first.returncode == 0, first.stderr
    assert "| gfx950 | place_rows" in first.stdout
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert len(manifest["kernels"]) == len([form for form in row_forms() if form.verb == "place_rows"])
    assert {kernel["arch"] for kernel in manifest["kernels"]} == {"gfx950"}
    saved = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.hsaco")}
    assert len(saved) == len({kernel["key"] for kernel in manifest["kernels"]})
    again = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.hsaco")} == saved


def test_an_unknown_architecture_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--only", "move_mountains"]) == 2
    assert "got move_mountains" in capsys.readouterr().err.replace("\n", " ")
    assert main(["kernels", "--arch", "gfx90a"]) == 2
    assert "arch must be one of gfx942, gfx950, got gfx90a" in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(ConfigError), compiling_for("sm_90"):
        pass
