"""One rank of a stream of calls over peer memory, a process of its own: another is killed, stopped or late.

Arguments: rank, world, a file for the store, the timeout of a wait in seconds, how long rank 1 sleeps. Says
"ready" when the stream runs, and at the end, as JSON, what it was told.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from exchange_cases import Grid, H
from peer_exchange_cases import over_peers

from rocm_dp import PaddingMode, PeerTimeoutError, TokenPlan
from rocm_dp.control import Op
from rocm_dp.errors import ClosedError, RocmDpError


def main(rank: int, world: int, store: str, timeout: float, sleep: float) -> dict[str, object]:
    """Call until an error comes; return what it said, and how long after the last sign of all ranks it came."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    plan = TokenPlan((2,) * world, PaddingMode.SUM_LEN)
    told: dict[str, object] = {"error": ""}
    together = time.monotonic()
    try:
        with over_peers(rank, Grid(world, world), timeout=timeout) as exchange:
            local = torch.ones(2, H, device=exchange.device)
            partial = torch.ones(plan.rows, H, device=exchange.device)
            exchange.gather(local, plan)
            exchange.combine(partial, plan)
            exchange.groups.control.call(Op.CONFIRM, {})
            print("ready", flush=True)
            together = time.monotonic()
            if rank == 1:
                time.sleep(sleep)
            try:
                while True:
                    exchange.gather(local, plan)
                    exchange.combine(partial, plan)
                    if exchange.device.type == "cuda":
                        torch.cuda.synchronize(exchange.device)
            except PeerTimeoutError as error:
                told["call"] = [error.verb, error.batch]
                told["missing"] = list(error.missing)
                try:
                    exchange.gather(local, plan)
                except ClosedError as closed:
                    told["after"] = str(closed)
                raise
    except RocmDpError as error:
        told["error"], told["said"] = type(error).__name__, str(error)
    told["seconds"] = time.monotonic() - together
    return told


if __name__ == "__main__":
    number, size, path, bound, nap = sys.argv[1:]
    print(json.dumps(main(int(number), int(size), path, float(bound), float(nap))), flush=True)
