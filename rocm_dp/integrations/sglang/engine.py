"""What a running SGLang knows: its groups, its buffers and its limits, read after it has made them."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rocm_dp.groups import Groups
from rocm_dp.integrations.sglang.layer import initialize
from rocm_dp.integrations.sglang.settings import from_environment
from rocm_dp.layout import RankLayout

if TYPE_CHECKING:
    from types import ModuleType

    from rocm_dp.integrations.sglang.layer import DpAttention
    from rocm_dp.integrations.sglang.settings import Settings

LAYER = "sglang.srt.layers.dp_attention"
_CONTEXT = "sglang.srt.runtime_context"
_PARALLEL = "sglang.srt.distributed.parallel_state"
_PREFILL_ROWS = 16384  # of one dp rank, where SGLang sets no limit


def state_of(layer: ModuleType, server_args: Any, settings: Settings | None) -> DpAttention | None:
    """Make the state from a running SGLang; collective. None when it has one dp rank: then nothing is gathered.

    Its groups are closed by whoever ends it, and here when it can't be made.

    ``settings`` None: those of the environment, with room for the steps that ``server_args`` allow.
    """
    layout = layout_of(import_module(_PARALLEL))
    if layout.dp_size == 1:
        return None
    if settings is None:
        local_rows = rows_of_a_rank(limits_of(server_args))
        settings = from_environment(max_rows=layout.dp_size * local_rows, max_local_rows=local_rows)
    device = torch.device(layer.get_dp_device())
    groups = groups_of(import_module(_PARALLEL), layout)
    try:
        make_communicators(groups, device)
        return initialize(
            layout,
            groups,
            device=device,
            hidden=layer.get_dp_hidden_size(),
            dtype=layer.get_dp_dtype(),
            settings=settings,
        )
    except BaseException:
        groups.close()
        raise


def layout_of(parallel: ModuleType) -> RankLayout:
    """Return this rank's place by the groups that SGLang has made."""
    world, moe = parallel.get_tp_group(), parallel.get_moe_dp_group()
    cp_size, tp_size = parallel.get_attn_cp_group().world_size, parallel.get_attn_tp_group().world_size
    # With fewer MoE copies than cp ranks SGLang's MoE group is the cp group itself.
    shared = cp_size > 1 and moe.device_group is parallel.get_attn_cp_group().device_group
    return RankLayout(
        world.rank_in_group,
        world.world_size,
        dp_size=world.world_size // (cp_size * tp_size),
        cp_size=cp_size,
        moe_dp_size=1 if shared else moe.world_size,
    )


def groups_of(parallel: ModuleType, layout: RankLayout) -> Groups:
    """Return groups of our own where SGLang's tp group is the world, else SGLang's.

    A communicator must not be used from two streams, and SGLang uses its own while ours work aside.
    """
    if layout.world_size == dist.get_world_size():
        return Groups.create(layout)
    world = parallel.get_tp_group()
    return Groups.borrow(
        layout,
        world=world.device_group,
        tp=parallel.get_attn_tp_group().device_group,
        cp=parallel.get_attn_cp_group().device_group,
        moe_dp=parallel.get_moe_dp_group().device_group,
        cpu=world.cpu_group,
    )


def make_communicators(groups: Groups, device: torch.device) -> None:
    """Use every group once: a communicator that is made on its first use must not be made inside a capture."""
    distinct = {id(group): group for group in (groups.world, groups.tp, groups.cp, groups.moe_dp)}
    for group in distinct.values():
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def limits_of(server_args: Any) -> SimpleNamespace:
    """Return the limits of a step as SGLang resolved them: a chunk is divided among the dp ranks, for one.

    0.5.23 leaves ``server_args`` as the user gave them and keeps what it resolved beside them.
    """
    schedule = graph = spec = server_args
    with suppress(ModuleNotFoundError, AttributeError):
        context = import_module(_CONTEXT)
        schedule, graph, spec = context.get_schedule(), context.get_exec().graph, context.get_spec()
    decode = getattr(getattr(graph, "cuda_graph_config", None), "decode", None)
    return SimpleNamespace(
        chunk=getattr(schedule, "chunked_prefill_size", None),
        prefill=getattr(schedule, "max_prefill_tokens", None),
        captured=getattr(decode, "max_bs", None),
        draft=getattr(spec, "speculative_num_draft_tokens", None),
    )


def rows_of_a_rank(limits: SimpleNamespace) -> int:
    """Return the most rows that one dp rank brings: a chunk of prefill, or the largest captured batch."""
    chunk = limits.chunk or 0
    if chunk < 1:
        chunk = limits.prefill or _PREFILL_ROWS
    return int(max(chunk, (limits.captured or 1) * (limits.draft or 1)))
