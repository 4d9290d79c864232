"""The states of the sinks and of the process as metrics, and the answer of ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Gauge, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from outbox_relay import __version__
from outbox_relay.service.sinks import ServedSink

CIRCUIT: Final = {"closed": 0.0, "half-open": 1.0, "open": 2.0}

GAUGES: Final[Mapping[str, tuple[str, Callable[[ServedSink], float]]]] = {
    "outbox_circuit_state": (
        "Circuit in this process: 0 closed, 1 half-open, 2 open.",
        lambda sink: CIRCUIT[sink.loop.circuit],
    ),
    "outbox_in_flight": ("Calls that the destination has not answered.", lambda sink: sink.measures.in_flight),
    "outbox_in_flight_limit": (
        "Present limit of concurrent calls, reduced after throttling.",
        lambda sink: sink.loop.in_flight_limit,
    ),
    "outbox_limit_waiting": (
        "Calls in this process that wait for rate_per_second or max_in_flight_total of all relays.",
        lambda sink: sink.loop.limits.waiting,
    ),
    "outbox_calls_hanging": (
        "Calls of handlers or plug-ins in this process that have outlasted their time limit and cannot be ended.",
        lambda sink: sink.sink.hanging,
    ),
    "outbox_shards_owned": ("Shards that this process owns.", lambda sink: len(sink.leases.held)),
}
"""The meaning of the gauges of a sink, and their values."""


class SinkStates(Collector):
    """Reads the state of ``sinks`` at each scrape. Sinks that were removed from the database are left out."""

    def __init__(self, sinks: Mapping[str, ServedSink]) -> None:
        self._sinks = sinks

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges, and the counters that leases and loops keep."""
        sinks = {name: sink for name, sink in self._sinks.items() if not sink.leases.missing}
        for metric, (text, value) in GAUGES.items():
            family = GaugeMetricFamily(metric, text, labels=["sink"])
            for name, sink in sinks.items():
                family.add_metric([name], value(sink))
            yield family
        lost = CounterMetricFamily(
            "outbox_lease_lost",
            "Leases of shards and of rows that ended before this process renewed or settled them.",
            labels=["sink"],
        )
        restarts = CounterMetricFamily(
            "outbox_session_restarts",
            "Sessions that started again from the stored positions, by reason.",
            labels=["sink", "reason"],
        )
        for name, sink in sinks.items():
            lost.add_metric([name], sink.leases.losses + sink.measures.row_leases_lost)
            for reason, count in list(sink.restarts.items()):
                restarts.add_metric([name, reason], count)
        yield lost
        yield restarts


def register(
    registry: CollectorRegistry, collectors: Iterable[Collector], last_reload_successful: Callable[[], bool]
) -> None:
    """Add the metrics that are no counters of the relay to ``registry``."""
    for collector in collectors:
        registry.register(collector)
    Gauge(
        "outbox_config_last_reload_successful",
        "1 if the last reload of the settings was carried out or none was requested, else 0.",
        registry=registry,
    ).set_function(lambda: float(last_reload_successful()))
    Info("outbox_build", "Version of the relay; always 1.", registry=registry).info({"version": __version__})


def exposition(registry: CollectorRegistry, accept: str) -> tuple[str, bytes]:
    """Return content type and body of ``/metrics`` for the header ``Accept``."""
    encode, content_type = choose_encoder(accept)
    return content_type, encode(registry)
