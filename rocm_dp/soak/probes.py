"""Every sampler that a rank, or a test, can have, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rocm_dp.soak.device import ExchangeSampler, TorchSampler
from rocm_dp.soak.heap import BlockSampler, HeapSampler
from rocm_dp.soak.host import HostSampler, ShmSampler, host_limits
from rocm_dp.soak.kfd import KfdSampler
from rocm_dp.soak.objects import ObjectSampler
from rocm_dp.soak.sample import AbsentError, Probe
from rocm_dp.soak.signals import MOST_SIGNALS, SignalSampler
from rocm_dp.soak.vendor import AmdsmiSampler, NvmlSampler

if TYPE_CHECKING:
    import torch

    from rocm_dp.exchange import TokenExchange

_MOST_QUEUES = 1024  # KFD_MAX_NUM_OF_QUEUES_PER_PROCESS


def host_probe() -> tuple[Probe, ObjectSampler]:
    """Return the samplers that need neither a GPU nor an exchange, and that of the objects."""
    probe, objects = Probe(), ObjectSampler()
    probe.add("host", HostSampler)
    probe.add("shm", ShmSampler)
    probe.add("objects", lambda: objects)
    # After the objects, whose sampler collects garbage first.
    probe.add("heap", HeapSampler)
    probe.add("blocks", BlockSampler)
    probe.add("hsa", SignalSampler)
    return probe, objects


def add_device(probe: Probe, device: torch.device) -> None:
    """Add what can be sampled of a GPU."""
    probe.add("torch", lambda: TorchSampler(device))
    probe.add("kfd", KfdSampler)
    probe.add("amdsmi", AmdsmiSampler)
    probe.add("nvml", lambda: _nvml(device))


def make_probe(exchange: TokenExchange) -> tuple[Probe, ObjectSampler]:
    """Return all samplers of a rank."""
    probe, objects = host_probe()
    add_device(probe, exchange.device)
    add_exchange(probe, exchange)
    return probe, objects


def add_exchange(probe: Probe, exchange: TokenExchange) -> None:
    """Add what an exchange counts itself."""
    probe.add("own", lambda: ExchangeSampler(exchange.stats))


def limits_of(exchange: TokenExchange) -> dict[str, float]:
    """Return what each counter may grow to, where there is a limit."""
    limits = {**host_limits(), "hsa.live": float(MOST_SIGNALS)}
    limits["kfd.queues"] = float(_MOST_QUEUES)
    limits["own.events_held"] = limits["own.events_made"] = float(exchange.options.max_events)
    limits["own.records_in_flight"] = float(exchange.options.max_in_flight)
    if exchange.device.type == "cuda":
        limits.update(TorchSampler(exchange.device).limits())
    return limits


def _nvml(device: torch.device) -> NvmlSampler:
    if device.type != "cuda":
        raise AbsentError(f"the ranks run on {device.type}")
    return NvmlSampler(device.index)
