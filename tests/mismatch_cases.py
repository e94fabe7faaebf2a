"""What ranks run when they disagree on purpose: each returns what its error said, and how long it took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from exchange_cases import Grid, H, an_exchange

from rocm_dp import (
    Groups,
    Options,
    PaddingMode,
    Phase,
    RankLayout,
    TokenExchange,
    TokenPlan,
    agree,
    confirm,
    interleave,
)
from rocm_dp.agreement import StepRules
from rocm_dp.errors import RocmDpError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

TIMEOUT = 3.0


def outcome(call: Callable[[], object]) -> tuple[str, str, dict[int, object], float]:
    """The error of ``call``: its type, its text, each rank's value, and the seconds it took."""
    start = time.monotonic()
    try:
        call()
    except RocmDpError as error:
        return type(error).__name__, str(error), getattr(error, "values", {}), time.monotonic() - start
    return "nothing", "", {}, time.monotonic() - start


def vote(rank: int, votes: list[dict[str, object]], dp: int) -> tuple[str, str, dict[int, object], float]:
    """Agree with this rank's own arguments."""
    layout = RankLayout(rank, len(votes), dp)
    settings = {"phase": Phase.DECODE, "can_overlap": True, "can_graph": True, **votes[rank]}
    count = settings.pop("count")
    with Groups.create(layout) as groups:
        return outcome(lambda: agree(count, groups=groups, layout=layout, **settings))  # type: ignore[arg-type]


def call_something_else(rank: int) -> tuple[str, str, dict[int, object], float]:
    """Rank 1 confirms a plan while the others agree."""
    with an_exchange(rank, Grid(3, 3)) as exchange:
        if rank == 1:
            plan = TokenPlan((1, 2, 3), PaddingMode.SUM_LEN)
            return outcome(lambda: confirm(plan, groups=exchange.groups))
        return outcome(lambda: _agree(exchange))


def gather_while_others_agree(rank: int) -> tuple[str, str, dict[int, object], float]:
    """Rank 1 issues the data-plane call one step early; nobody may wait longer than the timeout."""
    with an_exchange(rank, Grid(3, 3), timeout=TIMEOUT) as exchange:
        if rank == 1:
            plan = TokenPlan((1, 2, 3), PaddingMode.SUM_LEN)
            return outcome(lambda: exchange.gather(torch.zeros(2, H, dtype=torch.bfloat16), plan))
        return outcome(lambda: _agree(exchange))


def one_rank_stays_away(rank: int) -> tuple[str, str, dict[int, object], float]:
    """Rank 2 takes an early return, as idle ranks of naive engines do."""
    with an_exchange(rank, Grid(3, 3), timeout=TIMEOUT) as exchange:
        if rank == 2:
            time.sleep(TIMEOUT + 3)
            return "nothing", "", {}, 0.0
        return outcome(lambda: _agree(exchange))


def _agree(exchange: TokenExchange) -> object:
    layout = exchange.layout
    return agree(
        layout.rank, phase=Phase.DECODE, can_overlap=True, can_graph=False, groups=exchange.groups, layout=layout
    )


def plans_in_another_order(rank: int, *, confirmed: bool) -> tuple[str, str, dict[int, object], float]:
    """Counts equal in sum but in another order on rank 1: RCCL would hang or deliver wrong data."""
    counts = (2, 1) if rank == 1 else (1, 2)
    plan = TokenPlan(counts, PaddingMode.SUM_LEN)
    local = torch.zeros(counts[rank], H, dtype=torch.bfloat16)
    with an_exchange(rank, Grid(2, 2), timeout=TIMEOUT, confirm_calls=confirmed) as exchange:
        if confirmed:
            return outcome(lambda: exchange.gather(local, plan))
        return outcome(lambda: confirm(plan, groups=exchange.groups))


def messages_in_another_order(rank: int) -> tuple[str, str, dict[int, object], float]:
    """Two kinds of message, both known to both ranks, then one of each at a time."""
    plan = TokenPlan((1, 2), PaddingMode.SUM_LEN)
    with an_exchange(rank, Grid(2, 2), confirm_calls=True) as exchange:
        kinds = [torch.zeros(rank + 1, width) for width in (2, 3)]
        for kind in kinds:
            exchange.gather_many([kind], plan)
        return outcome(lambda: exchange.gather_many([kinds[rank]], plan))


def long_plans(rank: int) -> tuple[str, str, dict[int, object], float]:
    """Plans of many dp ranks that differ in the last count only."""
    plan = TokenPlan((1234,) * 199 + (rank,), PaddingMode.SUM_LEN)
    with an_exchange(rank, Grid(2, 2)) as exchange:
        return outcome(lambda: confirm(plan, groups=exchange.groups))


Said = tuple[str, str, dict[int, object], float]


def two_exchanges_lose_a_rank(rank: int) -> tuple[Said, Said, int]:
    """Rank 1 stays away from the first exchange's call; the second exchange must know at once."""
    plan = TokenPlan((1, 2), PaddingMode.SUM_LEN)
    nothing: Said = ("nothing", "", {}, 0.0)
    with (
        an_exchange(rank, Grid(2, 2), timeout=TIMEOUT) as first,
        TokenExchange(first.layout, first.groups, device="cpu", hidden=H, dtype=torch.float32) as second,
    ):
        if rank == 1:
            time.sleep(TIMEOUT + 3)
            return nothing, nothing, 0
        lost = outcome(lambda: first.gather(torch.zeros(1, H, dtype=torch.bfloat16), plan))
        return lost, outcome(lambda: second.gather(torch.zeros(1, H), plan)), 1


def one_call_more(rank: int) -> tuple[str, str, dict[int, object], float]:
    """Rank 0 goes on to a combine while rank 1 gathers again."""
    plan = TokenPlan((1, 2), PaddingMode.SUM_LEN)
    with an_exchange(rank, Grid(2, 2), confirm_calls=True) as exchange:
        local = torch.zeros(rank + 1, H, dtype=torch.bfloat16)
        full = exchange.gather(local, plan).clone()
        if rank == 0:
            return outcome(lambda: exchange.combine(full, plan))
        return outcome(lambda: exchange.gather(local, plan))


def one_rank_by_the_async_verb(rank: int, verb: str) -> tuple[str, str, dict[int, object], float]:
    """Rank 1 makes the same call beside computation, over peer memory with a grid of its own."""
    plan = TokenPlan((1, 2), PaddingMode.SUM_LEN)
    with an_exchange(rank, Grid(2, 2), confirm_calls=True) as exchange:
        call = getattr(exchange, verb if rank == 0 else f"{verb}_async")
        rows = torch.zeros(plan.rows if verb == "combine" else rank + 1, H, dtype=torch.bfloat16)
        return outcome(lambda: call([rows] if verb == "gather_many" else rows, plan))


def make_exchange(rank: int, settings: list[dict[str, object]]) -> tuple[str, str, dict[int, object], float]:
    """Construct an exchange with this rank's own settings."""
    layout = RankLayout(rank, len(settings), len(settings))
    given = {"hidden": H, "dtype": torch.bfloat16, "device": "cpu", **settings[rank]}
    with Groups.create(layout) as groups:
        return outcome(lambda: TokenExchange(layout, groups, **given).close())  # type: ignore[arg-type]


def make_groups(rank: int) -> tuple[str, str, dict[int, object], float]:
    """Rank 0 believes in dp 2, rank 1 in dp 1."""
    return outcome(lambda: Groups.create(RankLayout(rank, 2, 2 - rank)).close())


def take_another_place(rank: int) -> tuple[str, str, dict[int, object], float]:
    """Rank 1 believes that it is rank 2."""
    return outcome(lambda: Groups.create(RankLayout(2 if rank == 1 else rank, 3, 3)).close())


def borrow_crossed_groups(rank: int) -> tuple[str, str, dict[int, object], float]:
    """cp groups {0, 3} and {1, 2} in place of {0, 2} and {1, 3}: right sizes and places, wrong members."""
    layout = RankLayout(rank, 4, 1, 2)
    with Groups.create(layout) as own:
        crossed, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])  # type: ignore[no-untyped-call]
        given = {"world": own.world, "tp": own.tp, "cp": crossed, "moe_dp": own.moe_dp, "cpu": own.cpu}
        said = outcome(lambda: Groups.borrow(layout, **given))
        dist.destroy_process_group(crossed)
        return said


def borrow_and_return(rank: int) -> bool:
    """An exchange on borrowed groups works, and closing them leaves the owner's alive."""
    layout = RankLayout(rank, 4, 2)
    plan = TokenPlan((1, 2), PaddingMode.SUM_LEN)
    with Groups.create(layout) as own:
        for _ in range(2):
            with (
                Groups.borrow(
                    layout, world=own.world, tp=own.tp, cp=own.cp, moe_dp=own.moe_dp, cpu=own.cpu
                ) as groups,
                TokenExchange(layout, groups, device="cpu", hidden=H, dtype=torch.float32) as exchange,
            ):
                full = exchange.gather(torch.ones(plan.counts[layout.dp_rank], H), plan)
                if not bool((full == 1).all()):
                    return False
        confirm(plan, groups=own)
    return True


def one_half_raises(rank: int) -> tuple[str, str, dict[int, object], float]:
    """Rank 0's second half-batch raises between its gather and its combine; rank 1 must get a named error."""
    with an_exchange(rank, Grid(2, 2), timeout=TIMEOUT) as exchange:
        plans = TokenPlan((4, 2), PaddingMode.SUM_LEN).halves()

        def half(batch: int) -> Generator[None, None, torch.Tensor]:
            plan = plans[batch]
            local = torch.ones(plan.counts[rank], H, dtype=torch.bfloat16)
            pending = exchange.gather_async(local, plan, batch=batch)
            yield
            rows = pending.wait()
            if rank == 0 and batch == 1:
                raise RocmDpError("the experts of rank 0 failed")
            pending = exchange.combine_async(rows.clone(), plan, batch=batch)
            yield
            return pending.wait()

        said = outcome(lambda: interleave(half(0), half(1)))
        pendings = exchange.stats().pendings
        exchange.drain()
        assert exchange.stats().pendings == 0, pendings
        return said


def rules_with(**fields: object) -> StepRules:
    return StepRules(**fields)  # type: ignore[arg-type]


def options_with(**fields: object) -> Options:
    return Options(**fields)  # type: ignore[arg-type]


def same_error_type(rank: int) -> str:
    """A wrong tensor on one rank raises there, before any communication, and the next right call succeeds."""
    plan = TokenPlan((1, 2), PaddingMode.SUM_LEN)
    with an_exchange(rank, Grid(2, 2)) as exchange:
        said = ""
        if rank == 0:
            wrong = torch.zeros(2, H, dtype=torch.bfloat16)
            said = outcome(lambda: exchange.gather(wrong, plan))[1]
        full = exchange.gather(torch.full((rank + 1, H), float(rank), dtype=torch.bfloat16), plan)
        assert full[:, 0].tolist() == [0, 1, 1]
        assert dist.get_world_size(exchange.groups.world) == 2
        return said
