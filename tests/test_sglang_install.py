"""``install`` in a running SGLang, of which a stand-in has the names; ``uninstall`` leaves nothing behind."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import sglang_install_cases as cases

from rocm_dp import rocm
from rocm_dp.errors import ConfigError
from rocm_dp.integrations import sglang
from rocm_dp.integrations.sglang import engine, settings

if sys.version_info >= (3, 11):
    import tomllib  # novermin
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rocm_dp.testing import RankPool

    Ranks = Callable[[int], RankPool]


@pytest.fixture(autouse=True)
def _no_engine_left() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


def test_installed_functions_serve_every_import_and_uninstall_restores_every_name(ranks: Ranks) -> None:
    ranks(4).run(cases.installed_and_back)


def test_one_dp_rank_is_left_to_sglang(ranks: Ranks) -> None:
    ranks(4).run(cases.one_dp_rank_is_left_alone)


def test_a_failed_start_leaves_no_group_behind_and_the_next_is_right(ranks: Ranks) -> None:
    ranks(4).run(cases.nothing_is_left_of_a_failed_start)


def test_groups_smaller_than_the_world_are_borrowed(ranks: Ranks) -> None:
    ranks(4).run(cases.borrowed_groups)


def test_without_sglang_install_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="needs SGLang, and sglang is not installed"):
        sglang.install()
    sglang.uninstall()


def test_the_plugin_does_nothing_unless_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = cases.engine()
    before = cases.names_of(modules)
    sglang.plugin()
    monkeypatch.setenv("ROCM_DP_SGLANG", "0")
    sglang.plugin()
    assert cases.names_of(modules) == before
    monkeypatch.setenv("ROCM_DP_SGLANG", "1")
    sglang.plugin()
    assert modules.caller.dp_scatter is not before["caller"]["dp_scatter"]
    sglang.uninstall()
    assert cases.names_of(modules) == before


def test_the_package_names_the_plugin_that_sglang_looks_for() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text("utf-8"))["project"]
    [(name, value)] = project["entry-points"]["sglang.srt.plugins"].items()
    assert metadata.EntryPoint(name, value, "sglang.srt.plugins").load() is sglang.plugin


def given(captured: int | None = None, **given: int | None) -> SimpleNamespace:
    """Limits where 0.5.15 has them, all in the server's arguments."""
    return SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(max_bs=captured)), **given)


@pytest.mark.parametrize(
    ("args", "rows"),
    [
        (given(512, chunked_prefill_size=4096, max_prefill_tokens=9), 4096),
        (given(chunked_prefill_size=-1, max_prefill_tokens=8192), 8192),
        (SimpleNamespace(chunked_prefill_size=None), 16384),
        (None, 16384),
        (given(160, chunked_prefill_size=64), 160),
        (given(160, chunked_prefill_size=64, speculative_num_draft_tokens=4), 640),
    ],
)
def test_room_is_made_for_the_steps_that_the_server_allows(args: object, rows: int) -> None:
    assert engine.rows_of_a_rank(engine.limits_of(args)) == rows


def test_limits_are_those_that_sglang_resolved_where_it_keeps_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.engine()
    context = ModuleType("sglang.srt.runtime_context")
    resolved = given(32, chunked_prefill_size=1024, speculative_num_draft_tokens=None)
    context.get_schedule = context.get_spec = lambda: resolved  # type: ignore[attr-defined]
    context.get_exec = lambda: SimpleNamespace(graph=resolved)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, context.__name__, context)
    assert engine.rows_of_a_rank(engine.limits_of(given(chunked_prefill_size=8192))) == 1024


@pytest.mark.parametrize("name", ["dp_scatter", "set_dp_buffer_len", "DpPaddingMode"])
def test_a_layer_without_a_function_that_is_needed_is_left_as_it_is(name: str) -> None:
    modules = cases.engine()
    delattr(modules.layer, name)
    before = cases.names_of(modules)
    with pytest.raises(ConfigError, match=f"dp_attention of this SGLang has no {name}"):
        sglang.install()
    assert cases.names_of(modules) == before
    sglang.uninstall()


def test_settings_come_from_sglangs_variables_and_ours_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROCM_DP_SUM_LEN_IN_GRAPHS", "SGLANG_USE_ROCM700A"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SGLANG_DP_USE_GATHERV", "true")
    monkeypatch.setenv("SGLANG_ENABLE_DP_GATHER_FP8", "1")
    chosen = settings.from_environment(max_rows=8)
    assert (chosen.gatherv, chosen.fp8_gather, chosen.max_rows) == (True, True, 8)
    monkeypatch.delenv("SGLANG_DP_USE_GATHERV")
    assert not settings.from_environment().fp8_gather, "the wire of the gatherv path, which is off"
    monkeypatch.setenv("SGLANG_USE_ROCM700A", "1")
    assert not settings.from_environment().sum_len_in_graphs.on, "SGLang heeds it on ROCm only"
    monkeypatch.setattr("rocm_dp.rocm.probe", lambda: rocm.RocmVersions(torch_hip="7.2.53211"))
    asked = settings.from_environment().sum_len_in_graphs
    assert (asked.on, asked.reason.split(";")[0]) == (True, "SGLANG_USE_ROCM700A=1")
    monkeypatch.setenv("ROCM_DP_SUM_LEN_IN_GRAPHS", "0")
    asked = settings.from_environment().sum_len_in_graphs
    assert (asked.on, asked.reason.split(";")[0]) == (False, "ROCM_DP_SUM_LEN_IN_GRAPHS=0")
