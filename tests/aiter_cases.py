"""What the ranks run for the ``aiter`` transport, over a stand-in with aiter's contracts."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from exchange_cases import Grid, any_bits, numbers

from rocm_dp import Groups, PaddingMode, TokenPlan, reference
from rocm_dp.errors import TransportRefusedError
from rocm_dp.transports import aiter  # noqa: A004 - the package, not the builtin
from rocm_dp.transports.all_gather import AllGather

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STANDINS = str(Path(__file__).parent / "standins")
HOME = "aiter.dist.device_communicators.custom_all_reduce"
CPU = torch.device("cpu")


@contextmanager
def standing_in(rank: int, grid: Grid) -> Iterator[tuple[Groups, Any]]:
    """The groups, and the stand-in's module; this machine passes for one with AMD GPUs."""
    for name in [name for name in sys.modules if name.split(".")[0] == "aiter"]:
        del sys.modules[name]
    with (
        patch.object(sys, "path", [STANDINS, *sys.path]),
        patch.object(aiter, "machine_refusal", lambda device: ""),
        Groups.create(grid.layout(rank)) as groups,
    ):
        yield groups, import_module(HOME)


def plans(grid: Grid) -> list[TokenPlan]:
    replicas = grid.world // grid.dp
    every = [
        (0,) * grid.dp,
        (1,) * grid.dp,
        tuple(3 + 2 * dp for dp in range(grid.dp)),
        (40,) + (0,) * (grid.dp - 1),
    ]
    return [TokenPlan(counts, PaddingMode.MAX_LEN, align=replicas) for counts in every]


def every_plan(rank: int, grid: Grid) -> None:
    """Gathers bit for bit, of any dtype, and sums within rounding; aiter's kernels wherever they can."""
    with standing_in(rank, grid) as (groups, _):
        communicator, reason = aiter.connect(groups, CPU)
        assert reason == "", reason
        layout, transport = groups.layout, aiter.Aiter(groups.layout, groups, communicator)
        for plan in plans(grid):
            for dtype, width in (
                (torch.bfloat16, 64),
                (torch.float8_e4m3fn, 48),
                (torch.int64, 2),
                (torch.bool, 16),
                (torch.bfloat16, 3),
            ):
                communicator.calls.clear()
                locals_ = [
                    any_bits(plan.counts[at.dp_rank], width, dtype, at.dp_rank)
                    for at in map(grid.layout, range(grid.world))
                ]
                out = any_bits(plan.rows, width, dtype, 9)
                transport.gather(out, locals_[rank], plan, partial=False)
                assert reference.same_bits(out, reference.gather(locals_, plan)), (plan, dtype)
                fits = not aiter.size_refusal(out.numel() * out.itemsize, grid.world)
                assert communicator.calls == ["all_gather_unreg"] * fits
            for width in (64, 3):
                communicator.calls.clear()
                partials = [numbers(plan.rows, width, torch.bfloat16, seed) for seed in range(grid.world)]
                rows, first = transport.combine_rows(plan)
                out = torch.full((rows, width), torch.nan, dtype=torch.bfloat16)
                transport.combine(out, partials[rank], plan)
                count = plan.counts[layout.dp_rank]
                own = reference.scatter_range(plan, layout.dp_rank)
                assert reference.sum_error(out[first : first + count], [p[own] for p in partials]) <= 1
                fits = not aiter.size_refusal(plan.rows * width * 2, grid.world)
                assert communicator.calls == ["reduce_scatter"] * fits


def constructed_as_asked(rank: int) -> None:
    """On the gloo group, without registration in captures, with room for twice the largest buffer."""
    with standing_in(rank, Grid(4, 4)) as (groups, module):
        communicator, _ = aiter.connect(groups, CPU)
        assert communicator.group is groups.cpu
        assert not communicator.enable_register_for_capturing
        assert communicator.max_size == 2 * aiter.MAX_BYTES
        assert communicator.should_custom_ag(torch.empty(aiter.MAX_BYTES // 4, dtype=torch.uint8))
        assert module.CustomAllreduce is type(communicator)


def refusals(rank: int) -> None:
    """Each has its reason, the same on every rank, though one rank alone may have it."""
    with standing_in(rank, Grid(4, 4)) as (groups, module):
        kind = module.CustomAllreduce

        def said() -> str:
            communicator, reason = aiter.connect(groups, CPU)
            assert (communicator is None) is bool(reason)
            return reason

        with patch.object(aiter, "WORLDS", (2, 8)):
            assert said() == "aiter gathers and reduces right over (2, 8) ranks, there are 4"
        with patch.object(aiter, "machine_refusal", lambda device: "no GPU" if rank == 2 else ""):
            assert said() == "rank 2: no GPU"
        settings = {"PYTORCH_HIP_ALLOC_CONF": "garbage_collection_threshold:0.9, expandable_segments: True"}
        with patch.object(aiter, "environment", lambda: settings):
            assert said().startswith("PYTORCH_HIP_ALLOC_CONF asks for expandable_segments")
        with patch.object(aiter, "find_spec", lambda name: None if rank else "there"):
            assert said() == "; ".join(f"rank {r}: aiter is not installed" for r in (1, 2, 3))
        with patch("rocm_dp.memory.links.refusal", lambda *_: "the link is not xGMI (HSA link type 2)"):
            assert said() == "the link is not xGMI (HSA link type 2)"
        with patch.object(kind, "__init__", lambda self, group, device, max_size: None):
            assert said() == "this aiter registers what it captures and can't be told not to"

        def unhappy(self: Any, group: Any, device: Any, max_size: int, enable_register_for_capturing: bool) -> None:
            self.disabled = True

        with patch.object(kind, "__init__", unhappy):
            assert said() == "aiter disabled its communicator"
        with patch.object(module, "SILENT_WORLDS", {4}):
            assert said() == "its self-test found a wrong gather of torch.bfloat16 [1, 8]"
        with patch.object(kind, "reduce_scatter", lambda self, inp, out, dim, registered: out.zero_()):
            assert said().startswith("its self-test found a wrong sum of torch.bfloat16")
        assert said() == ""


def a_call_that_aiter_alone_refuses(rank: int) -> None:
    """A misfit is an error on the ranks that see it, never another path."""
    with standing_in(rank, Grid(4, 4)) as (groups, module):
        communicator, _ = aiter.connect(groups, CPU)
        transport = aiter.Aiter(groups.layout, groups, communicator)
        [plan] = [plan for plan in plans(Grid(4, 4)) if plan.counts == (1,) * 4]
        full = torch.zeros(4, 64)
        calls: dict[str, Callable[[], None]] = {
            "ag": lambda: transport.gather(full, torch.ones(1, 64), plan, partial=False),
            "rs": lambda: transport.combine(torch.zeros(1, 64), full, plan),
        }
        for verb, call in calls.items():
            with (
                patch.object(module.CustomAllreduce, f"should_custom_{verb}", lambda *_: False),
                pytest.raises(TransportRefusedError, match="aiter refuses to"),
            ):
                call()


def registered_captures(rank: int) -> None:
    """Opt-in, and only inside; a replay that reads stale inputs is seen on every rank."""
    with standing_in(rank, Grid(4, 4)) as (groups, _):
        communicator, _ = aiter.connect(groups, CPU)
        transport = aiter.Aiter(groups.layout, groups, communicator)
        plan = TokenPlan((2,) * 4, PaddingMode.MAX_LEN)
        given, result = torch.zeros(2, 64), torch.zeros(8, 64)

        def call() -> None:
            transport.gather(result, given, plan, partial=False)

        communicator.calls.clear()
        with transport.registered_capture():
            call()
        call()
        assert communicator.calls == ["all_gather_reg", "all_gather_unreg"]

        def eager() -> torch.Tensor:
            out = torch.empty_like(result)
            AllGather(groups.layout, groups).gather(out, given, plan, partial=False)
            return out

        assert aiter.replay_refusal(groups, call, given, result, eager) == ""
        stale = result.clone()

        def replay_of_old_inputs() -> None:
            call()
            if rank == 1:
                result.copy_(stale)

        told = aiter.replay_refusal(groups, replay_of_old_inputs, given, result, eager)
        assert told == "rank 1: replay 0 differs from the call with a copy"
