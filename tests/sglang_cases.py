"""What the ranks run for SGLang's drop-in, and its oracle: the layer's algorithms by description, in one process.

All values are small whole numbers, so that every sum is exact in every order and results compare bit for bit.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass, make_dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from exchange_cases import Grid
from rocm_dp.kernels import rows as row_kernels
from sglang_contract import recorded

from rocm_dp import Groups, Options, reference
from rocm_dp.errors import DtypeError, RankMismatchError
from rocm_dp.integrations import sglang
from rocm_dp.integrations.sglang import DpAttention, DpPaddingMode, Settings
from rocm_dp.testing import rank_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

H = 8
LATEST = list(recorded())[-1]


def batch_class(name: str, release: str = LATEST) -> Any:
    """A class with exactly the fields that the release's has, all None at first; no other can be set."""
    fields = [(field, Any, None) for field in recorded()[release]["batches"][name]]
    return make_dataclass(name, fields, slots=True)


def forward_batch(counts: Sequence[int], mode: DpPaddingMode | None, device: torch.device | str = "cpu") -> Any:
    """A ForwardBatch of padded ``counts``, as SGLang prepares it for a step."""
    return batch_class("ForwardBatch")(
        global_num_tokens_cpu=list(counts),
        global_num_tokens_gpu=torch.tensor(counts, dtype=torch.int64, device=device),
        global_dp_buffer_len=sum(counts),
        dp_padding_mode=mode,
    )


def logits_metadata(counts: Sequence[int], slot: int, *, on_host: bool) -> Any:
    """A LogitsMetadata of the rows that need logits, its place worked out already, as SGLang does."""
    on_device = torch.tensor(counts, dtype=torch.int64, device=rank_device())
    return batch_class("LogitsMetadata")(
        global_num_tokens_for_logprob_cpu=list(counts) if on_host else None,
        global_num_tokens_for_logprob_gpu=on_device,
        dp_local_start_pos=on_device[:slot].sum(),
        dp_local_num_tokens=on_device[slot],
        dp_padding_mode=DpPaddingMode.SUM_LEN,
    )


@dataclass(frozen=True)
class Step:
    """One step: rows of each dp rank as the engine pads them, in a buffer that may be larger."""

    grid: Grid
    counts: tuple[int, ...]
    mode: DpPaddingMode | None
    seed: int
    dtype: torch.dtype = torch.bfloat16
    width: int = H
    spare: int = 0
    local_spare: int = 0
    on_host: bool = True

    @property
    def rows(self) -> int:
        return sum(self.counts) + self.spare

    def batch(self) -> Any:
        batch = forward_batch(self.counts, self.mode, rank_device())
        if not self.on_host:
            batch.global_num_tokens_cpu = None
        return batch

    def local(self, rank: int, *, copies: bool) -> torch.Tensor:
        """The rows of a rank; those of one attention-tp group are copies, or addends. cp ranks hold copies."""
        at = self.grid.layout(rank)
        part = 0 if copies else at.tp_rank + 1
        return whole(
            self.counts[at.dp_rank] + self.local_spare, self.width, self.dtype, self.seed, at.dp_rank, part
        )

    def partial(self, rank: int) -> torch.Tensor:
        """What the experts of a rank put out for all rows."""
        return whole(self.rows, self.width, self.dtype, self.seed + 1, rank, 0)


def whole(rows: int, width: int, dtype: torch.dtype, *seeds: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(seeds) % 2**31)
    values = torch.randint(-4, 5, (rows, width), generator=generator)
    return values.to(dtype)


def gathered(step: Step, *, partial: bool) -> torch.Tensor:
    """The description of a sum: each dp rank's rows are placed in zeros, once or as addends, and all are added."""
    out = torch.zeros(step.rows, step.width, dtype=torch.float64)
    for rank in range(step.grid.world):
        at = step.grid.layout(rank)
        if at.cp_rank or (at.tp_rank and not partial):
            continue
        start, count = sum(step.counts[: at.dp_rank]), step.counts[at.dp_rank]
        out[start : start + count] += step.local(rank, copies=not partial)[:count].double()
    return out.to(step.dtype)


def stacked(step: Step, *, partial: bool) -> torch.Tensor:
    """The description of equal blocks: attention tp sums and cuts its rows, the cuts of all ranks are stacked."""
    cuts = []
    for rank in range(step.grid.world):
        at = step.grid.layout(rank)
        tp = at.tp_ranks(at.dp_rank, at.cp_rank)
        addends = [step.local(r, copies=not partial).double() * (partial or r == tp[0]) for r in tp]
        cuts.append(torch.stack(addends).sum(0).tensor_split(at.tp_size)[at.tp_rank])
    return torch.cat(cuts).to(step.dtype)


def scattered(step: Step, full: torch.Tensor, rank: int, local_rows: int) -> torch.Tensor:
    """The description: zeros, then this dp rank's rows from the top."""
    dp = step.grid.layout(rank).dp_rank
    start, count = sum(step.counts[:dp]), min(step.counts[dp], local_rows)
    out = full.new_zeros(local_rows, full.shape[1])
    out[:count] = full[start : start + count]
    return out


def combined(step: Step, rank: int) -> torch.Tensor:
    """The description: the sum of all ranks' outputs, this dp rank's rows of it."""
    total = torch.stack([step.partial(r).double() for r in range(step.grid.world)]).sum(0).to(step.dtype)
    return scattered(step, total, rank, step.counts[step.grid.layout(rank).dp_rank])


def random_steps(grid: Grid, seed: int, number: int) -> list[Step]:
    """Prefill, decode, idle ranks, buffers with spare rows; MAX_LEN, SUM_LEN and none."""
    chooser, steps = random.Random(seed), []
    for index in range(number):
        mode = chooser.choice([DpPaddingMode.MAX_LEN, DpPaddingMode.SUM_LEN, DpPaddingMode.SUM_LEN, None])
        counts = [chooser.choice([0, 0, 1, 2, 3, 7, 12]) for _ in range(grid.dp)]
        if mode is DpPaddingMode.MAX_LEN:
            counts = [max(counts)] * grid.dp
        packed = mode is not DpPaddingMode.MAX_LEN
        steps.append(
            Step(
                grid,
                tuple(counts),
                mode,
                seed * 1000 + index,
                spare=chooser.choice([0, 3]) if packed else 0,
                local_spare=chooser.choice([0, 2]) if packed else 0,
                on_host=chooser.random() < 0.8,
            )
        )
    return steps


@contextmanager
def a_layer(rank: int, grid: Grid, *, dtype: torch.dtype = torch.bfloat16, **chosen: Any) -> Iterator[DpAttention]:
    layout = grid.layout(rank)
    settings = Settings(**{"options": Options(timeout=30.0, poison=True), **chosen})
    with (
        Groups.create(layout) as groups,
        sglang.initialize(layout, groups, device=rank_device(), hidden=H, dtype=dtype, settings=settings) as layer,
    ):
        yield layer


def dirty(rows: int, step: Step) -> torch.Tensor:
    """A buffer as an allocator hands it out: NaN where nothing is written."""
    raw = torch.full((rows * step.width * step.dtype.itemsize,), 0xFF, dtype=torch.uint8)
    return raw.view(step.dtype).view(rows, step.width).to(rank_device())


def check_equal(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    # -0.0 and 0.0 are one whole number.
    assert torch.equal(got.cpu().double(), want.double()), f"{what}: got\n{got}\nwanted\n{want}"


def check_step(layer: DpAttention, step: Step) -> None:
    rank, device = layer.layout.rank, layer.get_dp_device()
    counts = list(step.counts)
    local_rows = step.counts[layer.layout.dp_rank]
    max_len = step.mode is DpPaddingMode.MAX_LEN
    layer.set_dp_buffer_len(step.rows, local_rows, max_len, counts if step.on_host else None)
    for partial, gather in ((False, layer.dp_gather_replicate), (True, layer.dp_gather_partial)):
        local, full = step.local(rank, copies=not partial).to(device), dirty(step.rows, step)
        before = local.clone()
        gather(full, local, step.batch())
        check_equal(full, gathered(step, partial=partial), f"{gather.__name__} of {step}")
        assert reference.same_bits(local, before), f"{gather.__name__} wrote its input: {step}"
    full = step.partial(rank).to(device)
    out = dirty(local_rows + step.local_spare, step)
    layer.dp_scatter(out, full, step.batch())
    check_equal(out, scattered(step, full.cpu(), rank, out.shape[0]), f"dp_scatter of {step}")
    if not step.spare and (step.on_host or len(set(step.counts)) == 1):
        out = dirty(local_rows, step)
        layer.dp_reduce_scatter_tensor(out, step.partial(rank).to(device))
        check_equal(out, combined(step, rank), f"dp_reduce_scatter_tensor of {step}")
        key = step.seed % 2
        layer.dp_reduce_scatterv_async(out.fill_(7), step.partial(rank).to(device), counts, ("combine", key)).wait()
        check_equal(out, combined(step, rank), f"dp_reduce_scatterv_async of {step}")
    full = dirty(step.rows, step)
    layer.dp_gather_partial_async(full, step.local(rank, copies=False).to(device), step.batch()).wait()
    check_equal(full, gathered(step, partial=True), f"dp_gather_partial_async of {step}")


def random_layouts(
    rank: int, grid: Grid, seed: int, number: int, max_rows: int | None, transport: str | None = None
) -> int:
    options = Options(timeout=30.0, poison=True, transport=transport)
    with a_layer(rank, grid, max_rows=max_rows, options=options) as layer:
        steps = random_steps(grid, seed, number)
        for step in steps:
            check_step(layer, step)
            check_logits(layer, step)
        return len(steps)


def replayed(rank: int, grid: Grid, mode: DpPaddingMode, replays: int) -> None:
    """A captured gather and reduce-scatter of a padded batch, replayed on the rows of many steps."""
    with a_layer(rank, grid, max_rows=64, options=Options(timeout=30.0)) as layer:
        device, counts = layer.get_dp_device(), (6,) * grid.dp
        batch = forward_batch(counts, mode, device)
        layer.set_dp_buffer_len(sum(counts), 6, mode.is_max_len(), list(counts))
        local = torch.zeros(6, H, dtype=torch.bfloat16, device=device)
        full, own = (torch.zeros(rows, H, dtype=torch.bfloat16, device=device) for rows in (sum(counts), 6))

        def work() -> None:
            layer.dp_gather_partial(full, local, batch)
            layer.dp_reduce_scatter_tensor(own, full)

        work()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        for seed in range(replays):
            step = Step(grid, counts, mode, seed)
            local.copy_(step.local(rank, copies=False))
            full.fill_(torch.nan)
            own.fill_(torch.nan)
            graph.replay()
            want = gathered(step, partial=True)
            check_equal(full, want, f"replayed gather of {step}")
            check_equal(own, scattered(step, want * grid.world, rank, 6), f"replayed sum of {step}")


def check_logits(layer: DpAttention, step: Step) -> None:
    """The rows that need logits, gathered by their own counts, and their logits, of another width, scattered."""
    rank, device = layer.layout.rank, layer.get_dp_device()
    packed = replace(step, mode=DpPaddingMode.SUM_LEN, spare=0, local_spare=0)
    metadata = logits_metadata(packed.counts, layer.layout.dp_rank, on_host=step.on_host)
    full = dirty(packed.rows, packed)
    layer.dp_gather_replicate(full, packed.local(rank, copies=True).to(device), metadata)
    check_equal(full, gathered(packed, partial=False), f"logits of {step}")
    wide = whole(packed.rows, 3 * H, torch.float32, step.seed).to(device)
    out = torch.full((packed.counts[layer.layout.dp_rank], 3 * H), torch.nan, device=device)
    layer.dp_scatter(out, wide, metadata)
    check_equal(out, scattered(packed, wide.cpu(), rank, out.shape[0]), f"logits back of {step}")


def other_rows(rank: int, grid: Grid) -> None:
    """Token ids (1-D), fp8 and wider rows, and sums of rows that are not the exchange's own."""
    counts = tuple((3 * dp) % 4 for dp in range(grid.dp))
    with a_layer(rank, grid) as layer:
        dp, device = layer.layout.dp_rank, layer.get_dp_device()
        for dtype, shape in (
            (torch.int32, ()),
            (torch.int64, (2, 3)),
            (torch.float8_e4m3fn, (5,)),
            (torch.bool, ()),
        ):
            parts = [
                whole(count, max(1, torch.Size(shape).numel()), torch.int64, index).abs().remainder(2).to(dtype)
                for index, count in enumerate(counts)
            ]
            full = torch.ones((sum(counts), *shape), dtype=torch.int64, device=device).to(dtype)
            mine = parts[dp].view(counts[dp], *shape).to(device)
            layer.dp_gather_replicate(full, mine, forward_batch(counts, DpPaddingMode.SUM_LEN, rank_device()))
            assert reference.same_bits(full.cpu(), torch.cat(parts).view(full.shape)), (dtype, shape)
        for dtype, width in (
            (torch.float32, H),
            (torch.bfloat16, 3),
            (torch.float64, H),
            (torch.int32, H),
            (torch.int64, 1),
        ):
            step = Step(grid, counts, DpPaddingMode.SUM_LEN, 5, dtype=dtype, width=width)
            full = dirty(step.rows, step)
            layer.dp_gather_partial(full, step.local(rank, copies=False).to(device), step.batch())
            check_equal(full, gathered(step, partial=True), f"{step}")
            layer.set_dp_buffer_len(step.rows, counts[dp], False, list(counts))
            out = dirty(counts[dp], step)
            layer.dp_reduce_scatter_tensor(out, step.partial(rank).to(device))
            check_equal(out, combined(step, rank), f"{step}")
        for dtype in (torch.float8_e4m3fn, torch.bool):
            full, mine = (torch.zeros(rows, H, device=device).to(dtype) for rows in (sum(counts), counts[dp]))
            with pytest.raises(DtypeError, match=r"dp_reduce_scatter_tensor adds rows and takes .* int64, got"):
                layer.dp_reduce_scatter_tensor(mine, full)


def cp_shards(rank: int, grid: Grid) -> None:
    """Each cp rank holds a shard of its dp rank's rows: gathered back to back, scattered to its holder."""
    counts = tuple(5 + dp for dp in range(grid.dp))
    shards = {dp: [counts[dp] - 2 * (grid.cp - 1), *[2] * (grid.cp - 1)] for dp in range(grid.dp)}
    with a_layer(rank, grid) as layer:
        at, device = layer.layout, layer.get_dp_device()
        parts = {
            (dp, cp): whole(shards[dp][cp], H, torch.bfloat16, dp, cp) for dp in shards for cp in range(grid.cp)
        }
        want = torch.cat([parts[dp, cp] for dp in shards for cp in range(grid.cp)])
        mine = torch.cat([parts[at.dp_rank, at.cp_rank], torch.full((1, H), torch.nan, dtype=torch.bfloat16)])
        for gather, factor in ((layer.dp_gather_replicate, 1), (layer.dp_gather_partial, at.tp_size)):
            full = torch.full((sum(counts), H), torch.nan, dtype=torch.bfloat16, device=device)
            batch = forward_batch(counts, DpPaddingMode.SUM_LEN, rank_device())
            gather(full, mine.to(device), batch, cp_shard_counts=shards[at.dp_rank])
            check_equal(full, want * factor, gather.__name__)
        back = torch.full_like(mine, torch.nan).to(device)
        layer.dp_scatter(back, want.to(device), batch, cp_shard_counts=shards[at.dp_rank])
        check_equal(back, torch.cat([parts[at.dp_rank, at.cp_rank], torch.zeros(1, H)]), "dp_scatter")
        # MAX_LEN with a block for every cp rank, as releases before shards have it.
        blocks = [whole(2, H, torch.bfloat16, dp, cp, 9) for dp in range(grid.dp) for cp in range(grid.cp)]
        full = torch.full((2 * grid.dp * grid.cp, H), torch.nan, dtype=torch.bfloat16, device=device)
        own = blocks[at.dp_rank * grid.cp + at.cp_rank].to(device)
        layer.dp_gather_replicate(full, own, forward_batch([2] * grid.dp, DpPaddingMode.MAX_LEN, device))
        check_equal(full, torch.cat(blocks), "MAX_LEN with cp")


def group_functions(rank: int, grid: Grid) -> None:
    with a_layer(rank, grid) as layer:
        at, device = layer.layout, layer.get_dp_device()

        def of(other: int, rows: int, seed: int = 0) -> torch.Tensor:
            return whole(rows, H, torch.bfloat16, other, seed)

        tp, cp = at.tp_ranks(at.dp_rank, at.cp_rank), at.cp_ranks(at.dp_rank, at.tp_rank)
        moe = at.moe_dp_ranks()
        for ranks, own, scatter in (
            (tp, at.tp_rank, layer.attn_tp_reduce_scatter_tensor),
            (cp, at.cp_rank, layer.attn_cp_reduce_scatter_tensor),
        ):
            full = of(rank, 2 * len(ranks)).to(device)
            total = torch.stack([of(r, 2 * len(ranks)).double() for r in ranks]).sum(0)
            part = full[2 * own : 2 * own + 2]
            assert scatter(part, full) is part
            check_equal(part, total[2 * own : 2 * own + 2], scatter.__name__)
        for ranks, stack in (
            (tp, layer.attn_tp_all_gather_into_tensor),
            (cp, layer.attn_cp_all_gather_into_tensor),
            (moe, layer.moe_cp_all_gather_into_tensor),
        ):
            out = torch.full((len(ranks), 3, H), torch.nan, dtype=torch.bfloat16, device=device)
            stack(out, of(rank, 3).to(device))
            check_equal(out, torch.stack([of(r, 3) for r in ranks]), stack.__name__)
        total = torch.stack([of(r, 3).double() for r in tp]).sum(0)
        check_equal(layer.attn_tp_all_reduce(of(rank, 3).to(device)), total, "attn_tp_all_reduce")
        # A vocabulary that attention tp doesn't divide, into views with strides, as the logits are gathered.
        sizes = [3 - (index > 0) for index in range(len(tp))]
        logits = torch.full((sum(sizes), 4), torch.nan, device=device).T
        outs = list(torch.split(logits, sizes, dim=-1))
        mine = whole(4, sizes[at.tp_rank], torch.float32, rank, 3).to(device)
        layer.attn_tp_all_gather(outs, mine)
        want = [whole(4, size, torch.float32, r, 3) for r, size in zip(tp, sizes, strict=True)]
        check_equal(logits, torch.cat(want, dim=1), "attn_tp_all_gather")
        assert (layer.get_moe_cp_rank(), layer.get_moe_cp_size()) == (moe.index(rank), len(moe))
        assert layer.is_enable_moe_cp_allgather() is (grid.cp > 1)


def fp8_gather(rank: int, grid: Grid) -> None:
    """Errors within half a step of fp8 (2^-4 of the largest of 128), zeros exact; MAX_LEN is not lossy."""
    layout, width = grid.layout(rank), 256
    counts = tuple(3 - dp for dp in range(grid.dp))
    settings = Settings(fp8_gather=True)
    locals_ = [
        torch.randn(count, width, generator=torch.Generator().manual_seed(dp)).bfloat16()
        for dp, count in enumerate(counts)
    ]
    locals_[0][0, :128] = 0
    with (
        Groups.create(layout) as groups,
        sglang.initialize(
            layout, groups, device=rank_device(), hidden=width, dtype=torch.bfloat16, settings=settings
        ) as layer,
    ):
        full = torch.full((sum(counts), width), torch.nan, dtype=torch.bfloat16, device=rank_device())
        mine = locals_[layout.dp_rank].to(rank_device())
        layer.dp_gather_replicate(full, mine, forward_batch(counts, DpPaddingMode.SUM_LEN, rank_device()))
        want = torch.cat(locals_)
        error = (full.cpu().float() - want.float()).view(-1, 2, 128).abs().amax(-1)
        assert bool((error <= want.float().view(-1, 2, 128).abs().amax(-1) * 2**-4).all())
        assert not torch.equal(full.cpu(), want), "nothing was quantised"
        assert not full[0, :128].any()
        equal = torch.full((4 * grid.dp, width), torch.nan, dtype=torch.bfloat16, device=rank_device())
        same = want[:1].expand(4, width).contiguous().to(rank_device())
        layer.dp_gather_replicate(equal, same, forward_batch([4] * grid.dp, DpPaddingMode.MAX_LEN, rank_device()))
        assert torch.equal(equal, same.repeat(grid.dp, 1))


def two_in_one_process(rank: int) -> None:
    """Two layers of different layouts: what one is told, the other doesn't hear."""
    with a_layer(rank, Grid(4, 4)) as first, a_layer(rank, Grid(4, 2), max_rows=8) as second:
        first.set_dp_buffer_len(5, 3, True, [3, 3])
        first.set_is_extend_in_batch(True)
        first.get_tbo_persistent_buffer("x", 2, 3, torch.float32, "cpu")
        with first.disable_dp_size():
            assert (first.get_attention_dp_size(), second.get_attention_dp_size()) == (1, 2)
        assert (second.get_global_dp_buffer_len(), second.get_dp_global_num_tokens()) == (0, None)
        assert not second.get_is_extend_in_batch()
        assert not second.is_dp_max_padding()
        assert second.overlap.buffers == {}
        assert first.tbo_event(("gather", 0)) is not second.tbo_event(("gather", 0))
        for layer, grid in ((first, Grid(4, 4)), (second, Grid(4, 2))):
            for step in random_steps(grid, 3, 4):
                check_step(layer, step)
    assert first.overlap.events == {}


def nothing_is_made_again(rank: int, grid: Grid) -> None:
    """After a warm-up of both batches, layers of steps make no buffer, event or slot."""
    with a_layer(rank, grid, max_rows=128) as layer:
        steps = [step for step in random_steps(grid, 11, 40) if step.on_host and not step.spare]

        def run(step: Step, sub: int) -> None:
            full = layer.get_tbo_persistent_buffer(("global", sub), step.rows, H, step.dtype, layer.get_dp_device())
            local = step.local(rank, copies=False).to(layer.get_dp_device())
            layer.dp_gather_partial_async(full, local, step.batch(), ("gather", sub)).wait()
            check_equal(full, gathered(step, partial=True), "async gather")

        biggest = max(steps, key=lambda step: step.rows)
        for sub in (0, 1):
            run(biggest, sub)
        before = layer.exchange.stats()
        kept = {key: buffer.data_ptr() for key, buffer in layer.overlap.buffers.items()}
        events = dict(layer.overlap.events)
        for index, step in enumerate(steps):
            run(step, index % 2)
        after = layer.exchange.stats()
        assert (after.buffers_made, after.slots, after.events_made) == (
            before.buffers_made,
            before.slots,
            before.events_made,
        )
        assert kept == {key: buffer.data_ptr() for key, buffer in layer.overlap.buffers.items()}
        assert events == layer.overlap.events


def different_settings(rank: int) -> str:
    """One rank's environment asks for fp8: every rank is told whose."""
    try:
        with a_layer(rank, Grid(4, 4), fp8_gather=rank == 2):
            return "nothing was raised"
    except RankMismatchError as error:
        return str(error)


FAULTS = ("rows moved by one", "padding unwritten", "summed twice", "tail of a scatter unwritten", "input written")


def broken_on_purpose(rank: int, fault: str) -> None:
    """Break the layer in one way; the checks of a step must fail on every rank."""
    grid = Grid(4, 2)
    step = Step(grid, (3, 2), DpPaddingMode.SUM_LEN, 1, spare=2 * ("padding" in fault), local_spare=1)
    with a_layer(rank, grid) as layer:
        exchange, read = layer.exchange, row_kernels.read_rows
        gather, combine, run = exchange.gather, exchange.combine, layer._gather_by_plan
        breaks: dict[str, Any] = {
            "rows moved by one": (exchange, "gather", lambda *a, **k: gather(*a, **k).roll(1, 0)),
            "padding unwritten": (layer, "_gather_by_plan", lambda full, *a, **k: run(full[:5], *a, **k)),
            "summed twice": (exchange, "combine", lambda *a, **k: combine(*a, **k) * 2),
            "tail of a scatter unwritten": (row_kernels, "read_rows", lambda dst, *a, **k: read(dst[:-1], *a, **k)),
            "input written": (exchange, "gather", lambda local, *a, **k: gather(local.add_(1), *a, **k).sub(1)),
        }
        assert set(breaks) == set(FAULTS)
        with patch.object(*breaks[fault]), pytest.raises(AssertionError):
            check_step(layer, step)
        check_step(layer, step)
