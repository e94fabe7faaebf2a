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

WORLD = 4
SIZES = ((3, 0, 2, 1), (0, 0, 0, 5), (2, 2, 2, 2), (0, 0, 0, 0))


@contextmanager
def some_rows(rank: int) -> Iterator[VariableRows]:
    layout = RankLayout(rank, WORLD, WORLD)
    options = Options(timeout=30.0, poison=True)
    with (
        Groups.create(layout) as groups,
        VariableRows(layout, groups, device=rank_device(), options=options) as rows,
    ):
        yield rows


def part(rank: int, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randint(-4, 5, tuple(shape), generator=generator).to(dtype).to(rank_device())


def shape_with(rest: Sequence[int], dim: int, size: int) -> list[int]:
    at = dim % (len(rest) + 1)
    return [*rest[:at], size, *rest[at:]]


def gathers(rank: int) -> None:
    """Any shape along any dim, positive or negative; without sizes all bring the same."""
    with some_rows(rank) as rows:
        for rest, sizes in product([(), (5,), (3, 2), (2, 3, 4)], SIZES):
            for dim in range(-1 - len(rest), 1 + len(rest)):
                parts = [part(r, shape_with(rest, dim, size)) for r, size in enumerate(sizes)]
                got = rows.all_gatherv(parts[rank], dim, list(sizes))
                assert torch.equal(got, torch.cat(parts, dim)), (rest, dim, sizes)
                if len(set(sizes)) == 1:
                    assert torch.equal(rows.all_gatherv(parts[rank], dim), torch.cat(parts, dim))


def gathers_lists(rank: int) -> None:
    """Tensors of differing width and dtype in one message; earlier results stay as they were."""
    kinds = (((6,), torch.bfloat16), ((4, 2), torch.float8_e4m3fn), ((), torch.int64), ((3,), torch.bool))
    with some_rows(rank) as rows:
        earlier = rows.all_gatherv(part(rank, (rank, 6)), 0, list(range(WORLD)))
        for sizes in SIZES:
            every = [
                [part(r, (size, *rest), torch.int64).abs().remainder(2).to(dtype) for r, size in enumerate(sizes)]
                for rest, dtype in kinds
            ]
            got = rows.all_gatherv([parts[rank] for parts in every], sizes=sizes)
            for whole, parts in zip(got, every, strict=True):
                want = torch.cat(parts)
                assert (whole.dtype, whole.shape) == (want.dtype, want.shape)
                assert torch.equal(whole.double(), want.double())
        assert torch.equal(earlier, torch.cat([part(r, (r, 6)) for r in range(WORLD)]))


def reduces(rank: int) -> None:
    """The part of a dim that is this rank's, for dims above 1 too."""
    with some_rows(rank) as rows:
        for rest, sizes in product([(5,), (3, 2), (2, 3, 4)], SIZES):
            for dim in range(-1 - len(rest), 1 + len(rest)):
                fulls = [part(r, shape_with(rest, dim, sum(sizes))) for r in range(WORLD)]
                total = torch.stack([full.double() for full in fulls]).sum(0).bfloat16()
                want = torch.split(total, list(sizes), dim)[rank]
                got = rows.reduce_scatterv(fulls[rank], dim, list(sizes))
                assert got.is_contiguous()
                assert torch.equal(got, want), (rest, dim, sizes)
                if len(set(sizes)) == 1:
                    assert torch.equal(rows.reduce_scatterv(fulls[rank], dim), want)
        full = part(rank, (5, 8))
        want = torch.stack([part(r, (5, 8)) for r in range(WORLD)]).double().sum(0)
        assert torch.equal(rows.reduce_scatterv(full).double(), want[:, 2 * rank : 2 * rank + 2]), "the last dim"


def refusals(rank: int) -> None:
    with some_rows(rank) as rows:
        with pytest.raises(TensorError, match="must name 4 ranks, got"):
            rows.all_gatherv(part(rank, (1, 2)), 0, [1, 1])
        with pytest.raises(TensorError, match=r"sizes \[9, 9, 9, 9\] give rank"):
            rows.all_gatherv(part(rank, (1, 2)), 0, [9] * WORLD)
        with pytest.raises(TensorError, match=r"sizes \[1, 1, 1, 1\] are 4 rows, dim 0 has 5"):
            rows.reduce_scatterv(part(rank, (5, 2)), 0, [1] * WORLD)
        with pytest.raises(TensorError, match="cut in 4 equal parts, got 6"):
            rows.reduce_scatterv(part(rank, (2, 6)))
        layout = RankLayout(rank, WORLD, 2)
        with pytest.raises(ConfigError, match="got 2 ranks a dp rank"):
            VariableRows(layout, rows.groups, device=rank_device())


def manager(rank: int) -> None:
    """dispatch brings hidden, weights, ids and extras; combine sums and returns the own rows."""
    with some_rows(rank) as rows, some_rows(rank) as others:
        sizes = [3, 0, 2, 1]
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
            partial = [part(10 + r, (sum(counts), 8)) for r in range(WORLD)]
            total = torch.stack([p.double() for p in partial]).sum(0).bfloat16()
            start = sum(counts[:rank])
            assert torch.equal(both.combine(partial[rank], sequence), total[start : start + counts[rank]])
        both.destroy()
        alone = All2AllManager(rows, lambda: sizes)
        with pytest.raises(ConfigError, match="needs sequence_parallel at construction"):
            alone.combine(partial[rank], True)
        with pytest.raises(ConfigError, match="come together"):
            All2AllManager(rows, lambda: sizes, sequence_parallel=others)
