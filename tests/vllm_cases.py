"""What the ranks run for vLLM's collectives; every rank can build the tensors of all ranks, so it can check."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rocm_dp import Groups, Options, RankLayout
from rocm_dp.errors import ConfigError, TensorError
from rocm_dp.integrations.vllm import All2AllManager, VariableRows
from rocm_dp.testing import rank_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SIZES = ((3, 0, 2, 1), (1, 5, 0, 0), (0, 0, 0, 5), (2, 2, 2, 2), (0, 0, 0, 0))


def sizes_for(world: int) -> list[list[int]]:
    return [list(sizes[:world]) for sizes in SIZES]


@contextmanager
def some_rows(rank: int, world: int, max_rows: int | None = None) -> Iterator[VariableRows]:
    layout = RankLayout(rank, world, world)
    options = Options(timeout=30.0, poison=True)
    with (
        Groups.create(layout) as groups,
        VariableRows(layout, groups, device=rank_device(), max_rows=max_rows, options=options) as rows,
    ):
        yield rows


def part(rank: int, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randint(-4, 5, tuple(shape), generator=generator).to(dtype).to(rank_device())


def shape_with(rest: Sequence[int], dim: int, size: int) -> list[int]:
    at = dim % (len(rest) + 1)
    return [*rest[:at], size, *rest[at:]]


def gathers(rank: int, world: int) -> None:
    """Any shape along any dim, positive or negative; without sizes all bring the same."""
    with some_rows(rank, world) as rows:
        for rest, sizes in product([(), (5,), (3, 2), (2, 3, 4)], sizes_for(world)):
            for dim in range(-1 - len(rest), 1 + len(rest)):
                parts = [part(r, shape_with(rest, dim, size)) for r, size in enumerate(sizes)]
                got = rows.all_gatherv(parts[rank], dim, sizes)
                assert torch.equal(got, torch.cat(parts, dim)), (rest, dim, sizes)
                if len(set(sizes)) == 1:
                    assert torch.equal(rows.all_gatherv(parts[rank], dim), torch.cat(parts, dim))


def gathers_columns(rank: int, world: int) -> None:
    """A column of a wider tensor; of a single token it counts as contiguous, with the stride of its rows."""
    with some_rows(rank, world) as rows:
        for sizes in sizes_for(world):
            columns = [part(r, (size, 8))[:, 0] for r, size in enumerate(sizes)]
            assert torch.equal(rows.all_gatherv(columns[rank], 0, sizes), torch.cat(columns)), sizes


def gathers_lists(rank: int, world: int) -> None:
    """Tensors of differing width and dtype in one message; earlier results stay as they were."""
    kinds = (((6,), torch.bfloat16), ((4, 2), torch.float8_e4m3fn), ((), torch.int64), ((3,), torch.bool))
    with some_rows(rank, world) as rows:
        earlier = rows.all_gatherv(part(rank, (rank, 6)), 0, list(range(world)))
        for sizes in sizes_for(world):
            every = [
                [part(r, (size, *rest), torch.int64).abs().remainder(2).to(dtype) for r, size in enumerate(sizes)]
                for rest, dtype in kinds
            ]
            got = rows.all_gatherv([parts[rank] for parts in every], sizes=sizes)
            for whole, parts in zip(got, every, strict=True):
                want = torch.cat(parts)
                assert (whole.dtype, whole.shape) == (want.dtype, want.shape)
                assert torch.equal(whole.double(), want.double())
        assert torch.equal(earlier, torch.cat([part(r, (r, 6)) for r in range(world)]))


def reduces(rank: int, world: int) -> None:
    """The part of a dim that is this rank's, for dims above 1 too."""
    with some_rows(rank, world) as rows:
        for rest, sizes in product([(5,), (3, 2), (2, 3, 4)], sizes_for(world)):
            for dim in range(-1 - len(rest), 1 + len(rest)):
                fulls = [part(r, shape_with(rest, dim, sum(sizes))) for r in range(world)]
                total = torch.stack([full.double() for full in fulls]).sum(0).bfloat16()
                want = torch.split(total, sizes, dim)[rank]
                got = rows.reduce_scatterv(fulls[rank], dim, sizes)
                assert got.is_contiguous()
                assert torch.equal(got, want), (rest, dim, sizes)
                if len(set(sizes)) == 1:
                    assert torch.equal(rows.reduce_scatterv(fulls[rank], dim), want)
        full = part(rank, (5, 2 * world))
        want = torch.stack([part(r, (5, 2 * world)) for r in range(world)]).double().sum(0)
        assert torch.equal(rows.reduce_scatterv(full).double(), want[:, 2 * rank : 2 * rank + 2]), "the last dim"


def refusals(rank: int, world: int) -> None:
    with some_rows(rank, world) as rows:
        with pytest.raises(TensorError, match=f"must name {world} ranks, got"):
            rows.all_gatherv(part(rank, (1, 2)), 0, [1])
        with pytest.raises(TensorError, match=r"sizes \[9, 9.*\] give rank"):
            rows.all_gatherv(part(rank, (1, 2)), 0, [9] * world)
        with pytest.raises(TensorError, match=rf"sizes \[1, 1.*\] are {world} rows, dim 0 has 5"):
            rows.reduce_scatterv(part(rank, (5, 2)), 0, [1] * world)
        with pytest.raises(TensorError, match=f"cut in {world} equal parts, got {world + 1}"):
            rows.reduce_scatterv(part(rank, (2, world + 1)))
        layout = RankLayout(rank, world, world // 2)
        with pytest.raises(ConfigError, match="got 2 ranks a dp rank"):
            VariableRows(layout, rows.groups, device=rank_device())


def manager(rank: int, world: int) -> None:
    """dispatch brings hidden, weights, ids and extras; combine sums and returns the own rows."""
    with some_rows(rank, world) as rows, some_rows(rank, world) as others:
        sizes = sizes_for(world)[0]
        reverse = sizes[::-1]
        both = All2AllManager(rows, lambda: sizes, sequence_parallel=others, sequence_sizes_of=lambda: reverse)
        for sequence, counts in ((False, sizes), (True, reverse)):
            hidden = [part(r, (n, 8)) for r, n in enumerate(counts)]
            weights = [part(r, (n, 2), torch.float32) for r, n in enumerate(counts)]
            ids = [part(r, (n, 2), torch.int32) for r, n in enumerate(counts)]
            own = (hidden[rank], weights[rank], ids[rank])
            want = [torch.cat(parts) for parts in (hidden, weights, ids)]
            three: Any = both.dispatch(*own, sequence)
            assert all(map(torch.equal, three, want))
            *three, extra = both.dispatch(*own, is_sequence_parallel=sequence, extra_tensors=[ids[rank]])
            assert all(map(torch.equal, three, want))
            assert torch.equal(extra[0], want[2])
            two: Any = both.dispatch_router_logits(*own[:2], sequence)
            assert all(map(torch.equal, two, want[:2]))
            *two, extra = both.dispatch_router_logits(*own[:2], sequence, [ids[rank]])
            assert torch.equal(two[1], want[1])
            assert torch.equal(extra[0], want[2])
            partial = [part(10 + r, (sum(counts), 8)) for r in range(world)]
            total = torch.stack([p.double() for p in partial]).sum(0).bfloat16()
            start = sum(counts[:rank])
            assert torch.equal(both.combine(partial[rank], sequence), total[start : start + counts[rank]])
        both.destroy()
        alone = All2AllManager(rows, lambda: sizes)
        with pytest.raises(ConfigError, match="needs sequence_parallel at construction"):
            alone.combine(partial[rank], True)
        with pytest.raises(ConfigError, match="come together"):
            All2AllManager(rows, lambda: sizes, sequence_parallel=others)


def replayed(rank: int, world: int, replays: int) -> None:
    """A captured dispatch and combine, replayed on other tensors: every kind run once before, with ``max_rows``."""
    sizes = sizes_for(world)[0]
    n, start = sizes[rank], sum(sizes[:rank])
    with some_rows(rank, world, max_rows=sum(sizes)) as rows:
        manager = All2AllManager(rows, lambda: sizes)
        hidden = torch.zeros(n, 8, dtype=torch.bfloat16, device=rank_device())
        ids = torch.zeros(n, 2, dtype=torch.int32, device=rank_device())
        partial = torch.zeros(sum(sizes), 8, dtype=torch.bfloat16, device=rank_device())

        def layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return *manager.dispatch_router_logits(hidden, ids), manager.combine(partial)

        layer()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = layer()
        for seed in range(replays):
            every = [
                (
                    part(100 * seed + r, (size, 8)),
                    part(100 * seed + r, (size, 2), torch.int32),
                    part(r + seed, partial.shape),
                )
                for r, size in enumerate(sizes)
            ]
            for own, new in zip((hidden, ids, partial), every[rank], strict=True):
                own.copy_(new)
            for result in results:
                result.fill_(-1)
            graph.replay()
            total = torch.stack([sums.double() for *_, sums in every]).sum(0).bfloat16()
            wants = torch.cat([h for h, *_ in every]), torch.cat([i for _, i, _ in every]), total[start : start + n]
            assert all(map(torch.equal, results, wants)), f"replay {seed}"
        del graph


CALLS = (gathers, gathers_columns, gathers_lists, reduces, refusals, manager)
