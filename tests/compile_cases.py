"""What the ranks run for torch.compile: layers whose counts change at every step."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from exchange_cases import Grid

from rocm_dp import Groups, Options, PaddingMode, TokenExchange, TokenPlan, interleave
from rocm_dp.testing import rank_device

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

H = 8
STEPS = 200
GRID = Grid(2, 2)


@contextmanager
def an_exchange(rank: int) -> Iterator[TokenExchange]:
    import torch._dynamo as dynamo

    dynamo.reset()
    layout = GRID.layout(rank)
    options = Options(timeout=30.0)
    with (
        Groups.create(layout) as groups,
        TokenExchange(
            layout, groups, device=rank_device(), hidden=H, dtype=torch.float32, max_rows=256, options=options
        ) as exchange,
    ):
        exchange.reserve(batches=2)
        yield exchange
    dynamo.reset()


def plans() -> list[TokenPlan]:
    """200 plans of which no two have the same counts; one rank or another is idle in many."""
    every = [(7 * step % 23, 11 * step % 31) for step in range(STEPS)]
    assert len(set(every)) == STEPS
    return [TokenPlan(counts, PaddingMode.SUM_LEN) for counts in every]


def warm_up() -> list[TokenPlan]:
    """No row, one row and more, of each rank and of all: torch compiles sizes 0 and 1 apart from the rest."""
    every = [(5, 6), (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (3, 1), (1, 3), (4, 4)]
    return [TokenPlan(counts, PaddingMode.SUM_LEN) for counts in every]


def graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def changing_counts(rank: int) -> tuple[int, int]:
    """Run every plan through a compiled layer; return the graphs after warm-up and at the end."""
    with an_exchange(rank) as exchange:

        def layer(x: torch.Tensor, plan: TokenPlan) -> torch.Tensor:
            everyone = exchange.gather(torch.relu(x) + 1, plan)
            summed: torch.Tensor = exchange.combine(torch.sigmoid(everyone) * 2, plan)
            return summed - x

        return run(layer, rank)


def async_verbs(rank: int) -> tuple[int, int]:
    """The same with two batches that overlap, each compiled between its yields."""
    with an_exchange(rank) as exchange:
        before, between = (torch.compile(f, backend="eager", dynamic=True) for f in (torch.relu, torch.sigmoid))

        def batch(x: torch.Tensor, plan: TokenPlan, index: int) -> Generator[None, None, torch.Tensor]:
            pending = exchange.gather_async(before(x), plan, batch=index)
            yield
            pending = exchange.combine_async(between(pending.wait()), plan, batch=index)
            yield
            own: torch.Tensor = pending.wait()
            return own.clone()

        def layer(x: torch.Tensor, plan: TokenPlan) -> torch.Tensor:
            halves = plan.halves()
            at = halves[0].counts[rank]
            parts = zip((x[:at], x[at:]), halves, strict=True)
            return torch.cat(interleave(*(batch(*both, index) for index, both in enumerate(parts))))

        return run(layer, rank, compile_it=False)


def reading_counts(rank: int) -> tuple[int, int]:
    """The control: a layer that reads the counts itself is compiled again for new ones."""
    with an_exchange(rank) as exchange:

        def layer(x: torch.Tensor, plan: TokenPlan) -> torch.Tensor:
            for _ in range(plan.counts[0]):
                x = x + 1
            everyone = exchange.gather(x, plan)
            return everyone.sum(0)

        return run(layer, rank, steps=12)


def run(
    layer: Callable[..., torch.Tensor], rank: int, *, compile_it: bool = True, steps: int = STEPS
) -> tuple[int, int]:
    from torch._dynamo.utils import counters

    counters.clear()
    compiled = torch.compile(layer, backend="eager", dynamic=True) if compile_it else layer
    found = []
    with torch._dynamo.config.patch(recompile_limit=512, accumulated_recompile_limit=2048):
        for phase in (warm_up(), plans()[:steps]):
            for seed, plan in enumerate(phase):
                x = torch.randn(plan.counts[rank], H, generator=torch.Generator().manual_seed(seed)).to(
                    rank_device()
                )
                got = compiled(x, plan).clone()
                with torch.compiler.set_stance("force_eager"):
                    want = layer(x, plan)
                assert torch.equal(got, want), plan
            found.append(graphs())
    return found[0], found[1]
