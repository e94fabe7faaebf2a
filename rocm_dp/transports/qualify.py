"""Which transports over peer memory can be trusted here: those that passed their self-test, and why not others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_dp.kernels import peer as kernels
from rocm_dp.kernels.launch import on_device
from rocm_dp.memory import links
from rocm_dp.memory.channels import Channels
from rocm_dp.transports.self_test import SelfTest
from rocm_dp.transports.votes import FailedError, together, vote

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from rocm_dp.groups import Groups
    from rocm_dp.memory.copies import Lanes

_TIMEOUT_S = 20.0  # of a wait in the self-test


def refusals(
    groups: Groups, device: torch.device, lanes: Lanes, names: Collection[str], *, kind: str = "ipc"
) -> dict[str, str]:
    """Return why each of the transports ``names`` over peer memory of a ``kind`` can't be trusted; empty: it can.

    Collective, with the same answer on every rank. Every rank votes: what one of them can't do, none of them does.
    """
    told = vote(groups, kernels.usable(device) or _size(groups.layout.world_size) or _compiles(groups, device))
    told = told or vote(groups, links.refusal(groups, device))
    if told:
        return dict.fromkeys(names, told)
    channels: list[Channels] = []
    found = dict.fromkeys(names, "")
    name = ""
    try:
        together(groups, lambda: channels.append(Channels(groups, device, timeout=_TIMEOUT_S, kind=kind)))
        for name in names:
            SelfTest(groups, device, channels[0], lanes, name).run()
    except FailedError as error:
        # What failed may have left its channels in disorder: those behind it are not tried.
        untried = list(names)[list(names).index(name) + 1 :] if name else names
        found.update(dict.fromkeys(untried, f"not tried: {name or 'memory'} failed before it"))
        found[name or next(iter(names))] = str(error)
    for made in channels:
        made.close(collective=not any(found.values()))
    return found


def _compiles(groups: Groups, device: torch.device) -> str:
    """Try alone what needs no other rank: a compiler, a driver."""
    try:
        with on_device(device):
            kernels.look_form(groups.layout.world_size)
    except Exception as error:  # whatever it is, it must not be met in service
        return f"{type(error).__name__}: {error}"
    return ""


def _size(world: int) -> str:
    if world == 1:
        return "a rank alone has no peers"
    return "" if world <= kernels.MAX_RANKS else f"serves {kernels.MAX_RANKS} ranks at most, here are {world}"
