"""What lies between the ranks of a world: whether kernels of one may write to the memory of all others."""

from __future__ import annotations

from socket import gethostname
from typing import TYPE_CHECKING

from rocm_dp.control import Op
from rocm_dp.errors import PeerRefusedError
from rocm_dp.memory import runtime
from rocm_dp.platform import host_id

if TYPE_CHECKING:
    import torch

    from rocm_dp.groups import Groups


def refusal(groups: Groups, device: torch.device) -> str:
    """Return why this rank can't reach the memory of another, by its own knowledge; collective.

    Kernels need atomics on the other's memory, which NVLink and xGMI have and PCIe has not. A device that this
    process is not shown (CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES) can't be asked about here; opening its
    memory, and the self-test, will tell.
    """
    address, failed = 0, ""
    try:
        address = runtime.bus_address(device) if device.type == "cuda" else 0
    except (PeerRefusedError, AttributeError, OSError) as error:
        failed = f"{type(error).__name__}: {error}"
    rows = groups.control.call(Op.LINKS, {"host": host_id(), "device": address})
    own = groups.layout.rank
    apart = len({row["host"] for row in rows}) > 1
    # Every rank sees that, so all of them come here.
    names = groups.control.texts(gethostname()) if apart else []
    if failed:
        return failed
    for rank, row in enumerate(rows):
        if row["host"] != rows[own]["host"]:
            return (
                f"rank {rank} is on another host ({names[rank]}), "
                "or in a container that does not share the ipc and pid namespaces"
            )
        if device.type == "cuda" and row["device"] != address:
            try:
                reason = runtime.link_refusal(device, row["device"])
            except (PeerRefusedError, AttributeError) as error:
                reason = str(error)
            if reason:
                return f"the GPU of rank {rank}: {reason}"
    return ""
