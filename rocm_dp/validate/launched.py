"""This process as one rank of many that torchrun started, on one host or several."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rocm_dp.errors import RankMismatchError
from rocm_dp.platform import meeting_place
from rocm_dp.validate.rank import RankResult

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def joined(timeout: float) -> Iterator[torch.device]:
    """Join the ranks that torchrun started, one GPU each where each has one; give this rank's device.

    Raises RankMismatchError when not all of them have met within ``timeout`` seconds. Where nobody answers, torch
    then pauses at random, for 90 s at most, and tries once more for as long.
    """
    gpus, local = torch.cuda.device_count(), dist.get_node_local_rank(fallback_rank=0)
    device = torch.device("cuda", local) if local < gpus else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        text = f"the ranks did not all meet at {meeting_place()} (timeout {timeout:g} s): {error}"
        raise RankMismatchError(text) from error
    try:
        yield device
    finally:
        dist.destroy_process_group()


def gathered(result: RankResult) -> list[RankResult]:
    """Return what every rank found; collective. As JSON: nothing that arrives is run."""
    group = dist.new_group(backend="gloo")
    data = json.dumps(asdict(result)).encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    longest = max(int(size) for size in sizes)
    mine = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
    every = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(every, mine, group=group)
    return [RankResult(**json.loads(bytes(each.tolist()))) for each in every]
