"""``aiter``: the equal-size collectives of AMD's aiter, which copies inputs to memory that all GPUs of a node map.

Its all-gather and reduce-scatter are taken, by the methods that copy in, always: its ``custom_*`` methods return
zeros while they warm up for a capture, and inputs that are registered in a capture have been read stale. Nothing of
this was run on AMD hardware: the tests have a stand-in with aiter's contracts.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from rocm_dp.errors import TransportRefusedError
from rocm_dp.memory import links
from rocm_dp.platform import environment
from rocm_dp.transports.all_gather import AllGather
from rocm_dp.transports.votes import vote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rocm_dp.groups import Groups
    from rocm_dp.layout import RankLayout

WORLDS = (2, 4, 8)  # aiter takes 6 too, and its all-gather and reduce-scatter then leave the output unwritten
MAX_BYTES = 64 << 20  # of the global buffer
ALIGN = 16  # bytes that a rank's share is a multiple of
_HOMES = ("aiter.dist.device_communicators.custom_all_reduce", "aiter.dist.custom_all_reduce")
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class Aiter(AllGather):
    """``all_gather`` with aiter's kernels; for the same plans. What is too large or unaligned takes the group's.

    That depends on the plan and the width alone, so it is alike on all ranks; when aiter itself refuses a call that
    should fit, TransportRefusedError is raised.
    """

    def __init__(self, layout: RankLayout, groups: Groups, communicator: Any) -> None:
        super().__init__(layout, groups)
        self._communicator, self._registered = communicator, False

    @contextmanager
    def registered_capture(self) -> Iterator[None]:
        """Let calls that are captured inside read their inputs where they lie, without the copy; opt-in.

        Every input must keep its address until the graph is gone. Check the graph with ``replay_refusal``.
        """
        self._registered = True
        try:
            with self._communicator.capture():
                yield
        finally:
            self._registered = False

    def _all_gather(self, out: torch.Tensor, own: torch.Tensor) -> None:
        if size_refusal(out.numel() * out.itemsize, self._layout.world_size):
            super()._all_gather(out, own)
            return
        mine = _words(own)
        if not self._communicator.should_custom_ag(mine):
            raise TransportRefusedError(f"aiter refuses to gather {mine.nbytes} bytes of each rank")
        if self._registered:
            self._communicator.all_gather_reg(mine, out=_words(out), dim=0)
        else:
            self._communicator.all_gather_unreg(mine, out=_words(out), dim=0)

    def _reduce_scatter(self, own: torch.Tensor, full: torch.Tensor) -> None:
        if size_refusal(full.numel() * full.itemsize, self._layout.world_size):
            super()._reduce_scatter(own, full)
            return
        if not self._communicator.should_custom_rs(full, 0):
            raise TransportRefusedError(f"aiter refuses to reduce {full.dtype} {tuple(full.shape)}")
        self._communicator.reduce_scatter(full, own, 0, registered=self._registered)


def size_refusal(nbytes: int, world: int) -> str:
    """Return why aiter can't move a global buffer of ``nbytes`` in equal shares; empty when it can. Pure."""
    if not nbytes:
        return "nothing to move"
    if nbytes > MAX_BYTES:
        return f"the global buffer has {nbytes} bytes, aiter takes {MAX_BYTES}"
    if nbytes % (world * ALIGN):
        return f"a share has {nbytes / world:g} bytes, aiter needs a multiple of {ALIGN}"
    return ""


def world_refusal(world: int) -> str:
    """Return why aiter is not used over ``world`` ranks; empty when it is."""
    return "" if world in WORLDS else f"aiter gathers and reduces right over {WORLDS} ranks, there are {world}"


def machine_refusal(device: torch.device) -> str:
    """Return why aiter can't be used on ``device``; empty when it can."""
    if torch.version.hip is None or device.type != "cuda":
        return f"aiter is for AMD GPUs, this is {device.type} on torch {torch.__version__}"
    return ""


def allocator_refusal(variables: Mapping[str, str]) -> str:
    """Return why memory of torch's allocator can't be exported; empty when it can."""
    for name in _ALLOCATOR_SETTINGS:
        if "expandable_segments:true" in variables.get(name, "").lower().replace(" ", ""):
            return f"{name} asks for expandable_segments, whose memory other processes can't map"
    return ""


def connect(groups: Groups, device: torch.device) -> tuple[Any, str]:
    """Return (aiter's communicator, "") when it passed its self-test, or (None, why not), alike on all ranks.

    Collective. Every rank votes before each step. aiter does not look at links itself, so they are checked here:
    every pair of GPUs must have xGMI.
    """
    made: list[Any] = []
    steps: tuple[Callable[[], str], ...] = (
        lambda: world_refusal(groups.layout.world_size) or machine_refusal(device),
        lambda: allocator_refusal(environment()) or _import_refusal(),
        lambda: links.refusal(groups, device),
        lambda: _construct(groups, device, made),
        lambda: _self_test(groups, device, made[0]),
    )
    for step in steps:
        try:
            reason = step()
        except Exception as error:  # whatever it is, it must not be met in service
            reason = f"{type(error).__name__}: {error}"
        if told := vote(groups, reason):
            return None, told
    return made[0], ""


def replay_refusal(
    groups: Groups,
    replay: Callable[[], None],
    given: torch.Tensor,
    result: torch.Tensor,
    eager: Callable[[], torch.Tensor],
    *,
    rounds: int = 4,
) -> str:
    """Return why a graph with registered inputs can't be trusted; empty when it can. Collective.

    Each round fills ``given``, the captured input, with other numbers, spoils ``result``, the captured output, and
    compares what a ``replay`` makes of them with ``eager()``, bit for bit.
    """
    for turn in range(rounds):
        _fill(given, turn * groups.layout.world_size + groups.layout.rank)
        wanted = eager().clone()
        result.view(torch.uint8).fill_(0xFF)
        replay()
        right = torch.equal(result.view(torch.uint8), wanted.view(torch.uint8))
        if told := vote(groups, "" if right else f"replay {turn} differs from the call with a copy"):
            return told
    return ""


def _import_refusal() -> str:
    if find_spec("aiter") is None:
        return "aiter is not installed"
    maker = _maker()
    if "enable_register_for_capturing" not in signature(maker).parameters:
        return "this aiter registers what it captures and can't be told not to"
    return ""


def _maker() -> Any:
    for home in _HOMES:
        try:
            return import_module(home).CustomAllreduce
        except ModuleNotFoundError as error:
            if error.name is None or not home.startswith(error.name):
                raise
    raise ModuleNotFoundError(f"none of {_HOMES} is there")


def _construct(groups: Groups, device: torch.device, made: list[Any]) -> str:
    # Its all-gather takes shares of up to max_size / (2 * world).
    communicator = _maker()(
        group=groups.cpu, device=device, max_size=2 * MAX_BYTES, enable_register_for_capturing=False
    )
    if communicator.disabled:
        return "aiter disabled its communicator"
    made.append(communicator)
    return ""


def _self_test(groups: Groups, device: torch.device, communicator: Any) -> str:
    """Compare every size of call with the process group's, bit for bit; sums of whole numbers are exact."""
    layout = groups.layout
    ours, theirs = Aiter(layout, groups, communicator), AllGather(layout, groups)
    for turn, (rows, width, dtype) in enumerate(
        [(1, 8, torch.bfloat16), (7, 512, torch.bfloat16), (64, 24, torch.float16), (33, 128, torch.float32)] * 2
    ):
        own, full = (
            torch.empty(size, width, dtype=dtype, device=device) for size in (rows, rows * layout.world_size)
        )
        spoiled = [torch.full_like(full, torch.nan), torch.full_like(full, torch.nan)]
        _fill(own, turn * layout.world_size + layout.rank)
        _fill(full, -turn * layout.world_size - layout.rank - 1)
        for transport, out in zip((ours, theirs), spoiled, strict=True):
            transport._all_gather(out, own)
        sums = [torch.full_like(own, torch.nan), torch.full_like(own, torch.nan)]
        for transport, out in zip((ours, theirs), sums, strict=True):
            transport._reduce_scatter(out, full)
        for what, pair in (("gather", spoiled), ("sum", sums)):
            if not torch.equal(*pair):
                return f"its self-test found a wrong {what} of {dtype} [{rows}, {width}]"
    return ""


def _fill(tensor: torch.Tensor, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 2**31)
    tensor.copy_(torch.randint(-8, 9, tensor.shape, generator=generator))


def _words(rows: torch.Tensor) -> torch.Tensor:
    """Return the memory of contiguous ``rows`` as float32 [n]: gathers move bits, and aiter knows floats."""
    data = rows.view(torch.uint8).view(-1)
    return (data if data.storage_offset() % 4 == 0 else data.clone()).view(torch.float32)
