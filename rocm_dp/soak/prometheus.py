"""A Prometheus endpoint for a soak that runs: loopback unless asked for otherwise."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rocm_dp.errors import ConfigError
from rocm_dp.soak.log import SoakLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector


# The metric: our counter, what it is multiplied by, and what it is.
_GAUGES = {
    "rocm_dp_pool_events_held": ("own.events_held", 1.0, "events of the exchange's pool that are handed out"),
    "rocm_dp_pool_events_made": ("own.events_made", 1.0, "events that the pool has made"),
    "rocm_dp_slots": ("own.slots", 1.0, "slots in use, one for each verb and batch"),
    "rocm_dp_pendings": ("own.pendings", 1.0, "calls that nobody has waited for yet"),
    "rocm_dp_records_in_flight": ("own.records_in_flight", 1.0, "event records the device may not have reached"),
    "rocm_dp_padding_wasted_ratio": ("program.wasted", 1.0, "share of the global buffer's rows that are padding"),
    "rocm_dp_skew_ratio": ("program.skew", 1.0, "largest count over the mean count"),
    "rocm_dp_step_seconds_median": ("latency.p50_ms", 1e-3, "seconds of a step, median since the last sample"),
    "rocm_dp_resident_bytes": ("rss", 1.0, "resident memory of the rank"),
}
_COUNTERS = {
    "rocm_dp_calls": ("own.calls", 1.0, "calls of the exchange"),
    "rocm_dp_slot_waits": ("program.waits", 1.0, "waits for a call in flight"),
    "rocm_dp_checks": ("program.checks", 1.0, "results compared with the oracle"),
}


def metrics(log: SoakLog) -> Iterator[Metric]:
    """Yield the metrics of the last sample of each rank, labelled by rank."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    lasts = {rank: said.samples[-1].values for rank, said in sorted(dict(log.ranks).items()) if said.samples}
    for family, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, (counter, scale, what) in table.items():
            metric = family(name, what, labels=["rank"])
            for rank, values in lasts.items():
                if counter in values:
                    metric.add_metric([str(rank)], values[counter] * scale)
            yield metric


@contextmanager
def endpoint(port: int | None, host: str = "127.0.0.1") -> Iterator[tuple[int, Callable[[SoakLog], None]]]:
    """Serve the metrics at ``http://host:port/metrics`` inside the block; yield the port and what to feed logs to.

    ``port`` None: serve nothing; 0: any free one. Raises ConfigError without prometheus-client, OSError for a port
    that is taken.
    """
    if port is None:
        yield 0, lambda _: None
        return
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ModuleNotFoundError as error:
        raise ConfigError("--metrics-port needs prometheus-client: pip install 'rocm-dp[soak]'") from error
    registry, logs = CollectorRegistry(), list[SoakLog]()
    registry.register(_collector(logs))
    server, thread = start_http_server(port, addr=host, registry=registry)

    def feed(log: SoakLog) -> None:
        logs[:] = [log]

    try:
        yield server.server_port, feed
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _collector(logs: list[SoakLog]) -> Collector:
    """Return what prometheus-client asks at each scrape; ``logs`` holds the last log, or nothing yet."""
    from prometheus_client.registry import Collector

    class FromLog(Collector):
        def collect(self) -> Iterator[Metric]:
            for log in logs:
                yield from metrics(log)

    return FromLog()
