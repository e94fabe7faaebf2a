"""What the ranks run for ``install``: a stand-in SGLang in place of the real one."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from sglang_cases import H, forward_batch, logits_metadata, whole

from rocm_dp import Groups, RankLayout, rocm
from rocm_dp.errors import RankMismatchError
from rocm_dp.integrations import sglang
from rocm_dp.integrations.sglang import DpPaddingMode, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

STANDINS = str(Path(__file__).parent / "standins")
COUNTS = (3, 1)


def engine() -> SimpleNamespace:
    """The stand-in's modules, new and with nothing called."""
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]
    with patch.object(sys, "path", [STANDINS, *sys.path]):
        names = ("distributed.parallel_state", "layers.dp_attention", "layers.communicator")
        parallel, layer, caller = (import_module(f"sglang.srt.{name}") for name in names)
    return SimpleNamespace(parallel=parallel, layer=layer, caller=caller)


def made_groups(layout: RankLayout, parallel: Any) -> Iterator[Groups]:
    with Groups.create(layout) as groups:
        for name, group in (
            ("tp", groups.world),
            ("attn_tp", groups.tp),
            ("attn_cp", groups.cp),
            ("moe_dp", groups.moe_dp),
        ):
            parallel.GROUPS[name] = SimpleNamespace(
                device_group=group, cpu_group=groups.cpu, world_size=group.size(), rank_in_group=group.rank()
            )
        yield groups


def names_of(modules: SimpleNamespace) -> dict[str, dict[str, object]]:
    return {name: dict(vars(module)) for name, module in vars(modules).items()}


def one_layer(modules: SimpleNamespace, rank: int) -> list[str]:
    """Run a layer by the caller's own imports; return which of SGLang's functions ran."""
    layout = RankLayout(rank, 4, 2)
    local = whole(COUNTS[layout.dp_rank], H, torch.bfloat16, layout.dp_rank, layout.tp_rank)
    batch = forward_batch(COUNTS, DpPaddingMode.SUM_LEN)
    modules.layer.CALLED.clear()
    modules.layer.set_dp_buffer_len(sum(COUNTS), local.shape[0], False, list(COUNTS))
    assert [sum(COUNTS), local.shape[0], False, list(COUNTS)] == modules.layer.SIZES
    summed, own = modules.caller.experts_of(local, sum(COUNTS), batch)
    called: list[str] = list(modules.layer.CALLED)
    if not called:
        rows = whole(COUNTS[layout.dp_rank], H, torch.bfloat16, layout.dp_rank, 0)
        rows = rows + whole(COUNTS[layout.dp_rank], H, torch.bfloat16, layout.dp_rank, 1)
        assert torch.equal(own, rows)
        assert torch.equal(summed, 4 * rows)
    return called


def installed_and_back(rank: int) -> None:
    modules = engine()
    layout = RankLayout(rank, 4, 2)
    before = names_of(modules)
    theirs = ["dp_gather_partial", "dp_reduce_scatter_tensor", "dp_scatter"]
    on = rocm.Workaround(on=True, reason="asked")
    for groups in made_groups(layout, modules.parallel):
        installation = sglang.install(Settings(sum_len_in_graphs=on))
        assert sglang.install() is installation
        with patch.object(sys, "path", [STANDINS, *sys.path]):
            late = import_module("sglang.srt.layers.late")
        assert late.dp_scatter is modules.caller.dp_scatter is not before["caller"]["dp_scatter"]
        assert modules.layer.dp_scatter._torchdynamo_disable, "it would be compiled for every count"
        with pytest.warns(UserWarning, match=r"initialised before install\(\): rocm_dp moves none"):
            assert one_layer(modules, rank) == theirs, "before SGLang initialises, its own functions run"
        assert one_layer(modules, rank) == theirs, "said once"
        modules.layer.initialize_dp_attention(SimpleNamespace(), SimpleNamespace())
        state = installation.state
        assert state is not None
        assert (state.layout, state.get_dp_hidden_size()) == (layout, H)
        assert state.exchange.groups is not groups, "communicators of our own"
        assert one_layer(modules, rank) == []
        assert state.get_dp_global_num_tokens() == list(COUNTS)
        modules.layer.set_is_extend_in_batch(True)
        assert state.get_is_extend_in_batch()
        assert modules.layer.CALLED == ["set_is_extend_in_batch"]
        assert modules.layer.DpPaddingMode.get_default_mode_in_cuda_graph() is modules.layer.DpPaddingMode.SUM_LEN
        with patch.object(type(state), "capturing", lambda _: True):
            assert one_layer(modules, rank) == theirs, "without peer memory a capture is SGLang's"
        only_on_device = logits_metadata(COUNTS, layout.dp_rank, on_host=False)
        with (
            patch.object(type(state), "capturing", lambda _: True),
            patch.object(type(state.exchange), "over_peers", True),
        ):
            modules.layer.CALLED.clear()
            rows, local = torch.zeros(sum(COUNTS), H), torch.ones(COUNTS[layout.dp_rank], H)
            modules.layer.dp_gather_replicate(rows, local, only_on_device)
            assert modules.layer.CALLED == ["dp_gather_replicate"], "what peers can't carry is left to SGLang"
        modules.layer.world_dp_gather_enabled = lambda: True
        assert one_layer(modules, rank) == theirs, "after elastic growth SGLang's own group is another"
        del modules.layer.world_dp_gather_enabled
        sglang.uninstall()
        sglang.uninstall()
        assert installation.state is None
        assert state.exchange.groups.closed
        assert not groups.closed
        assert late.dp_scatter is before["caller"]["dp_scatter"]
        assert one_layer(modules, rank) == theirs
        assert modules.layer.DpPaddingMode.get_default_mode_in_cuda_graph() is modules.layer.DpPaddingMode.MAX_LEN
        dist.barrier()
    assert names_of(modules) == before


def one_dp_rank_is_left_alone(rank: int) -> None:
    modules = engine()
    for _ in made_groups(RankLayout(rank, 4), modules.parallel):
        installation = sglang.install(Settings())
        modules.layer.initialize_dp_attention(SimpleNamespace(), SimpleNamespace())
        assert installation.state is None
        sglang.uninstall()


def nothing_is_left_of_a_failed_start(rank: int) -> None:
    """A rank has other settings: all are told, and no group of ours stays behind; the next start is right."""
    modules = engine()
    layout = RankLayout(rank, 4, 2)
    before = names_of(modules)
    for _ in made_groups(layout, modules.parallel):
        known = len(dist.distributed_c10d._world.pg_map)
        sglang.install(Settings(fp8_gather=rank == 2))
        with pytest.raises(RankMismatchError, match="ranks disagree on settings"):
            modules.layer.initialize_dp_attention(SimpleNamespace(), SimpleNamespace())
        assert len(dist.distributed_c10d._world.pg_map) == known
        sglang.uninstall()
        assert names_of(modules) == before
        sglang.install(Settings())
        modules.layer.initialize_dp_attention(SimpleNamespace(), SimpleNamespace())
        assert len(dist.distributed_c10d._world.pg_map) > known
        assert one_layer(modules, rank) == []
        sglang.uninstall()
        assert len(dist.distributed_c10d._world.pg_map) == known
        dist.barrier()


def borrowed_groups(rank: int) -> None:
    """Where SGLang's tp group is a part of the world, as with pipeline stages, its groups are borrowed."""
    modules = engine()
    stages = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    cpus = [dist.new_group(ranks, backend="gloo") for ranks in ([0, 1], [2, 3])]
    alone = [dist.new_group([r]) for r in range(4)]
    stage, own = rank // 2, rank % 2
    for name, group, size, at in (
        ("tp", stages[stage], 2, own),
        ("attn_tp", alone[rank], 1, 0),
        ("attn_cp", alone[rank], 1, 0),
        ("moe_dp", alone[rank], 1, 0),
    ):
        modules.parallel.GROUPS[name] = SimpleNamespace(
            device_group=group, cpu_group=cpus[stage], world_size=size, rank_in_group=at
        )
    installation = sglang.install(Settings())
    modules.layer.initialize_dp_attention(SimpleNamespace(), SimpleNamespace())
    state = installation.state
    assert state is not None
    assert state.exchange.groups.world is stages[stage]
    full = torch.full((3, H), torch.nan, dtype=torch.bfloat16)
    local = whole(1 + own, H, torch.bfloat16, stage, own)
    modules.layer.dp_gather_replicate(full, local, forward_batch((1, 2), DpPaddingMode.SUM_LEN))
    assert torch.equal(full, torch.cat([whole(1 + at, H, torch.bfloat16, stage, at) for at in (0, 1)]))
    sglang.uninstall()
    dist.barrier()
