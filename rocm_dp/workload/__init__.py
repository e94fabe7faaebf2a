"""Requests to serve, read from real traces or drawn from fitted models, and the steps that serve them."""

from rocm_dp.workload.scheduler import Routing, SchedulerConfig, Step, Work, schedule, sequence_tokens
from rocm_dp.workload.synthetic import CODE, CONVERSATION, TraceModel, fit
from rocm_dp.workload.traces import Request, Trace, TraceKind, read_trace

__all__ = [
    "CODE",
    "CONVERSATION",
    "Request",
    "Routing",
    "SchedulerConfig",
    "Step",
    "Trace",
    "TraceKind",
    "TraceModel",
    "Work",
    "fit",
    "read_trace",
    "schedule",
    "sequence_tokens",
]
