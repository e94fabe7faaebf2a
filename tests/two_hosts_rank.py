"""One rank of two hosts, a process of its own: what it runs, by name, and the version of rocm_dp that it plays.

It finds the others as under torchrun. Its last line is what it was told, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from aiter_cases import standing_in
from exchange_cases import Case, Grid, H, check_case, check_gather

from rocm_dp import Groups, Options, PaddingMode, Phase, StepRules, TokenExchange, TokenPlan, agree, control
from rocm_dp.errors import RocmDpError
from rocm_dp.validate.launched import joined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIMEOUT = 6.0  # seconds of a collective that a rank may not come to
NOBODY = 3.0  # of a start at a wrong address
START = 60.0  # of any other start


@contextmanager
def on_groups(grid: Grid, *, timeout: float = START, **options: object) -> Iterator[TokenExchange]:
    layout, chosen = grid.layout(dist.get_rank()), Options(**options)  # type: ignore[arg-type]
    with (
        Groups.create(layout, timeout=timedelta(seconds=timeout)) as groups,
        TokenExchange(layout, groups, device="cpu", hidden=H, dtype=torch.bfloat16, options=chosen) as exchange,
    ):
        yield exchange


def counts_of(grid: Grid) -> list[tuple[int, ...]]:
    """Every rank idle, one busy on either host, uneven and equal ones."""
    dp = grid.dp
    uneven = tuple((7 * rank + 2) % 5 for rank in range(dp))
    return [(0,) * dp, (5,) + (0,) * (dp - 1), (0,) * (dp - 1) + (5,), uneven, (3,) * dp]


def across() -> dict[str, Any]:
    """Check all, and return the number of plans checked, and what ``explain`` says."""
    with joined(START):
        return {"verdicts": verdicts(), "checked": every_verb()}


def alone() -> dict[str, Any]:
    """Return what ``explain`` says."""
    with joined(START):
        return {"verdicts": verdicts()}


def every_verb() -> int:
    """Agree on each plan, then check every verb against the oracle; how many plans that were."""
    checked = 0
    for grid, transport in ((Grid(4, 4), None), (Grid(4, 2), None), (Grid(4, 4), "all_reduce")):
        with on_groups(grid, transport=transport, poison=True, confirm_calls=True) as exchange:
            align = grid.world // grid.dp
            for counts in counts_of(grid):
                for padding in PaddingMode:
                    case = Case(counts, padding, align, transport=transport)
                    assert agreed(exchange, counts, padding) == case.plan
                    check_case(exchange, grid, case)
                    checked += 1
    return checked


def agreed(exchange: TokenExchange, counts: tuple[int, ...], padding: PaddingMode) -> TokenPlan:
    count = counts[exchange.layout.dp_rank]
    return agree(
        count,
        phase=Phase.PREFILL if count else Phase.IDLE,
        can_overlap=False,
        can_graph=False,
        groups=exchange.groups,
        layout=exchange.layout,
        rules=StepRules(padding=padding),
    ).plan


def verdicts() -> dict[str, tuple[bool, str]]:
    """What ``explain`` says where interpreted kernels could use peer memory, and a stand-in for aiter is there."""
    world = dist.get_world_size()
    plan = TokenPlan((2,) * world, PaddingMode.MAX_LEN)
    with (
        standing_in(dist.get_rank(), Grid(world, world)) as (groups, _),
        TokenExchange(groups.layout, groups, device="cpu", hidden=H, dtype=torch.bfloat16) as exchange,
    ):
        return {verdict.name: (verdict.chosen, verdict.reason) for verdict in exchange.explain(plan)}


def meet() -> dict[str, Any]:
    """Join, saying so before, and gather once."""
    print("joining", flush=True)
    begin = time.monotonic()
    with joined(START), on_groups(Grid(4, 4)) as exchange:
        seconds = time.monotonic() - begin
        check_gather(exchange, Grid(4, 4), Case((1, 2, 0, 3)))
    return {"seconds": seconds}


def meet_nowhere() -> dict[str, Any]:
    """Join with a short timeout."""

    def join() -> None:
        with joined(NOBODY):
            pass

    return told(join)


def until_cut_off() -> dict[str, Any]:
    """Gather and combine until an error comes; say "ready" once all ranks have."""
    grid, plan = Grid(4, 4), TokenPlan((1, 2, 0, 3), PaddingMode.SUM_LEN)
    rounds, last = 0, time.monotonic()
    with joined(START), on_groups(grid, timeout=TIMEOUT) as exchange:
        local = torch.ones(plan.counts[exchange.layout.rank], H, dtype=torch.bfloat16)

        def stream() -> None:
            nonlocal rounds, last
            while True:
                exchange.combine(exchange.gather(local, plan), plan)
                rounds, last = rounds + 1, time.monotonic()
                if rounds == 1:
                    print("ready", flush=True)

        first = told(stream)
        first["seconds"] = time.monotonic() - last
        after = told(lambda: exchange.gather(local, plan))
    return {**first, "rounds": rounds, "after": after}


def told(call: Callable[[], object]) -> dict[str, Any]:
    """The error of ``call``, and the seconds until it came."""
    begin, error, text = time.monotonic(), "", ""
    values: dict[int, object] = {}
    try:
        call()
    except RocmDpError as raised:
        error, text, values = type(raised).__name__, str(raised), getattr(raised, "values", {})
    return {"error": error, "text": text, "values": values, "seconds": time.monotonic() - begin}


CASES = {case.__name__: case for case in (across, alone, meet, meet_nowhere, until_cut_off)}


def main(name: str, version: str = "") -> None:
    if not version:
        answer = CASES[name]()
    else:
        with patch.object(control, "_VERSION", control.version_word(version)):
            answer = told(CASES[name])
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
