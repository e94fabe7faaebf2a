"""What passed its self-test on this machine, and the transports over peer memory that did."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from rocm_dp import routing
from rocm_dp.memory.channels import Channels
from rocm_dp.memory.copies import copier_for
from rocm_dp.transports import aiter, qualify  # noqa: A004 - the transport, not the builtin
from rocm_dp.transports.copy_engine import CopyEngineTransport
from rocm_dp.transports.peer import PeerTransport
from rocm_dp.transports.places import Places, Room

if TYPE_CHECKING:
    from rocm_dp.comm_stream import SideStream
    from rocm_dp.groups import Groups
    from rocm_dp.memory.copies import Lanes
    from rocm_dp.options import Options

_HIP = torch.version.hip is not None
_NO_LANES = 2  # the own rank's, and that of the first peer: its copies go on the caller's stream


class OverMemory(NamedTuple):
    """The transports over peer memory; None: not to be had here. ``beside``: ``peer`` beside computation."""

    peer: PeerTransport | None = None
    beside: PeerTransport | None = None
    copy_engine: CopyEngineTransport | None = None

    def named(self, name: str, *, overlap: bool = False) -> PeerTransport | CopyEngineTransport | None:
        """Return the one of this name; ``overlap``: for calls that run beside computation."""
        return {"peer": self.beside if overlap else self.peer, "copy_engine": self.copy_engine}.get(name)


def copy_lanes(side: SideStream, ranks: int) -> Lanes:
    """Return the streams for copies to several peers: on AMD, where each pair of GPUs has a link of its own."""
    return side.lanes(max(0, ranks - _NO_LANES) if _HIP else 0)


def facts_here(
    groups: Groups, device: torch.device, lanes: Lanes, table: routing.Table, kind: str
) -> routing.Facts:
    """Return what the ranks agree on; a self-test runs once for each device and kind of memory of the groups."""
    found: dict[str, str] = {}
    # What copies needs the kernels that meet and sum, so those are tested too, and first.
    names = [name for name in routing.OVER_MEMORY if table.needs(name)]
    if names:
        if not set(names) <= set(groups.qualified.get((device, kind), {})):
            groups.qualified[device, kind] = qualify.refusals(groups, device, lanes, names, kind=kind)
        found = {name: groups.qualified[device, kind][name] for name in names}
    if table.needs("aiter"):
        if (device, "aiter") not in groups.qualified:
            communicator, reason = aiter.connect(groups, device)
            if communicator is not None:
                groups.attached["aiter", device] = communicator
            groups.qualified[device, "aiter"] = {"aiter": reason}
        found |= groups.qualified[device, "aiter"]
    return routing.Facts(
        groups.layout.replicas,
        qualified=tuple(name for name, reason in found.items() if not reason),
        unqualified=tuple((name, reason) for name, reason in found.items() if reason),
    )


def open_memory(
    groups: Groups,
    device: torch.device,
    lanes: Lanes,
    facts: routing.Facts,
    options: Options,
    most: tuple[int | None, int | None],
) -> tuple[Channels | None, OverMemory]:
    """Make the channels of an exchange and the transports over them, where any is fit; collective.

    ``most``: rows of the global buffer and of one dp rank in it, at most (None: any).
    """
    fit = [name for name in routing.OVER_MEMORY if name in facts.qualified]
    if not fit:
        return None, OverMemory()
    copier = copier_for(device)
    channels = Channels(groups, device, timeout=options.timeout, kind=options.peer_memory)
    reserve = None if most[0] is None or most[1] is None else Room(most[0], most[1])
    places = Places(groups.layout, channels, reserve=reserve)
    peer = PeerTransport(places)
    copy_engine = CopyEngineTransport(places, peer, copier, lanes)
    has_peer = "peer" in fit
    return channels, OverMemory(
        peer if has_peer else None,
        PeerTransport(places, beside=True) if has_peer else None,
        copy_engine if "copy_engine" in fit else None,
    )
