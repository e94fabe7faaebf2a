"""What a user would write by hand with torch.distributed, buffers made beforehand: the paths to beat.

W ranks; the rows of a dp rank are cut into one share for each of its ranks, so that no row crosses a link twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rocm_dp.bench.contenders import Contender
from rocm_dp.plan import split_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from rocm_dp.bench.inputs import Inputs
    from rocm_dp.plan import TokenPlan

# torch 2.13 renamed both and warns about the old names.
_all_gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_equal = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Site:
    """Where the paths run: the inputs, the group of all ranks, and that of this dp rank's (None: it is alone)."""

    inputs: Inputs
    world: dist.ProcessGroup
    fellows: dist.ProcessGroup | None

    @property
    def count(self) -> int:
        """Rows of this dp rank."""
        return self.inputs.counts[self.inputs.layout.dp_rank]

    def own_share(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of its dp rank's rows."""
        return self.shares(rows)[self.inputs.layout.replica_rank]

    def shares(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Cut a dp rank's rows into one share for each of its ranks."""
        return [rows[start:stop] for start, stop in split_rows(rows.shape[0], self.inputs.layout.replicas)]

    def world_shares(self, rows: torch.Tensor, plan: TokenPlan) -> list[torch.Tensor]:
        """Cut global rows into one share for each rank of the world."""
        ranges = zip(plan.starts, plan.counts, strict=True)
        return [share for start, count in ranges for share in self.shares(rows[start : start + count])]


def gather_paths(site: Site) -> list[Contender]:
    """Return every library path of gather for one case."""
    return [_gather_all_reduce(site), gather_padded(site), gather_list(site), _gather_send_recv(site)]


def combine_paths(site: Site) -> list[Contender]:
    """Return every library path of combine for one case."""
    return [_combine_all_reduce(site), combine_padded(site), combine_list(site), _combine_send_recv(site)]


def _gather_all_reduce(site: Site) -> Contender:
    plan, layout = site.inputs.sum_len(), site.inputs.layout
    local, out = site.inputs.local(), site.inputs.empty(plan.rows)
    start = plan.starts[layout.dp_rank]
    own = out[start : start + site.count] if layout.replica_rank == 0 else None

    def call() -> torch.Tensor:
        out.zero_()
        if own is not None:
            own.copy_(local)
        dist.all_reduce(out, group=site.world)
        return out

    return Contender("torch: zero + copy + all_reduce", plan, call, (out,))


def gather_padded(site: Site) -> Contender:
    """Gather chunks of equal size, padded where needed."""
    plan, layout = site.inputs.max_len(), site.inputs.layout
    out = site.inputs.empty(plan.rows).zero_()
    share = plan.sizes[0] // layout.replicas
    first, start = layout.replica_rank * share, layout.rank * share
    mine = site.inputs.local()[first : first + share]
    real, chunk = mine.shape[0], out[start : start + share]

    def full() -> torch.Tensor:
        _all_gather_equal(out, mine, group=site.world)
        return out

    def padded() -> torch.Tensor:
        chunk[:real].copy_(mine)
        _all_gather_equal(out, chunk, group=site.world)
        return out

    # The padding of the own chunk was zeroed once and for all.
    written = (out[:start], chunk[:real], out[start + share :])
    return Contender("torch: padded all_gather", plan, full if real == share else padded, written)


def gather_list(site: Site) -> Contender:
    """Gather the real rows into views of uneven sizes: grouped collectives."""
    plan = site.inputs.sum_len()
    mine, out = site.own_share(site.inputs.local()), site.inputs.empty(plan.rows)
    views = site.world_shares(out, plan)

    def call() -> torch.Tensor:
        dist.all_gather(views, mine, group=site.world)
        return out

    return Contender("torch: all_gather of views", plan, call, (out,))


def _gather_send_recv(site: Site) -> Contender:
    plan, me = site.inputs.sum_len(), site.inputs.layout.rank
    mine, out = site.own_share(site.inputs.local()), site.inputs.empty(plan.rows)
    views = site.world_shares(out, plan)
    messages = _messages([mine] * len(views), views, site)

    def call() -> torch.Tensor:
        views[me].copy_(mine)
        _exchange(messages)
        return out

    return Contender("torch: send/recv", plan, call, (out,))


def _combine_all_reduce(site: Site) -> Contender:
    plan = site.inputs.sum_len()
    partial = site.inputs.partial(plan)
    start = plan.starts[site.inputs.layout.dp_rank]
    own = partial[start : start + site.count]

    def call() -> torch.Tensor:
        dist.all_reduce(partial, group=site.world)
        return own

    return Contender("torch: all_reduce + slice", plan, call, spends_input=True)


def combine_padded(site: Site) -> Contender:
    """Sum chunks of equal size, padded where needed."""
    plan, layout = site.inputs.max_len(), site.inputs.layout
    partial, out = site.inputs.partial(plan), site.inputs.empty(plan.sizes[0])
    own, fill = site.own_share(out), _filler(site, out)

    def call() -> torch.Tensor:
        _reduce_scatter_equal(own, partial, group=site.world)
        fill()
        return out[: plan.counts[layout.dp_rank]]

    return Contender("torch: padded reduce_scatter", plan, call, (out,))


def combine_list(site: Site) -> Contender:
    """Sum the real rows from views of uneven sizes: grouped collectives."""
    plan = site.inputs.sum_len()
    parts, out = site.world_shares(site.inputs.partial(plan), plan), site.inputs.empty(site.count)
    own, fill = site.own_share(out), _filler(site, out)

    def call() -> torch.Tensor:
        dist.reduce_scatter(own, parts, group=site.world)
        fill()
        return out

    return Contender("torch: reduce_scatter of views", plan, call, (out,))


def _combine_send_recv(site: Site) -> Contender:
    plan, me = site.inputs.sum_len(), site.inputs.layout.rank
    parts, out = site.world_shares(site.inputs.partial(plan), plan), site.inputs.empty(site.count)
    own, fill = site.own_share(out), _filler(site, out)
    staged = site.inputs.empty(len(parts) * own.shape[0]).view(len(parts), *own.shape)
    arriving = list(staged.unbind())
    messages = _messages(parts, arriving, site)

    def call() -> torch.Tensor:
        arriving[me].copy_(parts[me])
        _exchange(messages)
        torch.sum(staged, 0, out=own)
        fill()
        return out

    return Contender("torch: send/recv + sum", plan, call, (out, staged))


def _filler(site: Site, rows: torch.Tensor) -> Callable[[], object]:
    """Return a function that gets the shares of this dp rank's ``rows`` that its other ranks summed."""
    fellows, shares, own = site.fellows, site.shares(rows), site.own_share(rows)
    if fellows is None:
        return lambda: None
    if len({share.shape for share in shares}) == 1:
        return lambda: _all_gather_equal(rows, own, group=fellows)
    return lambda: dist.all_gather(shares, own, group=fellows)


def _messages(mine: list[torch.Tensor], theirs: list[torch.Tensor], site: Site) -> list[dist.P2POp]:
    """Send ``mine[r]`` to each other rank r and receive ``theirs[r]`` from it; what is empty is left out."""
    others = [rank for rank in range(len(theirs)) if rank != site.inputs.layout.rank]
    sends = [dist.P2POp(dist.isend, mine[r], r, site.world) for r in others if mine[r].numel()]
    receives = [dist.P2POp(dist.irecv, theirs[r], r, site.world) for r in others if theirs[r].numel()]
    return [*sends, *receives]


def _exchange(messages: list[dist.P2POp]) -> None:
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
