"""Metric families of prometheus-client, made from a snapshot in the thread that renders them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from outbox_relay.domain import measures
from outbox_relay.service.metrics import definitions as d
from outbox_relay.service.metrics.definitions import Definition
from outbox_relay.service.metrics.snapshot import SinkCopy, Snapshot

CIRCUIT: Final = {"closed": 0.0, "half-open": 1.0, "open": 2.0}
_LE: Final = (*(f"{bound:g}" if bound != int(bound) else f"{bound:.1f}" for bound in measures.BOUNDS), "+Inf")

Labels = tuple[str, ...]
_Part = Callable[[SinkCopy], measures.Distribution]


class SnapshotCollector(Collector):
    """Yields the families of one snapshot. Outcomes and reasons that never occurred are left out."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield every family, except for figures of the database that are unknown."""
        yield from self._counts()
        yield from self._durations()
        yield from self._states()
        yield from self._figures()
        yield _gauge(d.RELOAD_SUCCESSFUL, [((), float(self._snapshot.reload_successful))])
        build = InfoMetricFamily(d.BUILD_INFO.family, d.BUILD_INFO.help)
        build.add_metric((), {"version": self._snapshot.version})
        yield build

    def _counts(self) -> Iterator[Metric]:
        sinks = self._snapshot.sinks
        yield _counter(d.DELIVERED, [((sink.name,), sink.delivered) for sink in sinks])
        attempts = ((sink, o, a) for sink in sinks for o, a in sink.attempts.items())
        yield _counter(d.ATTEMPTS, [((sink.name, outcome), sum(a.counts)) for sink, outcome, a in attempts])
        yield _counter(d.DEAD, [((sink.name, reason), n) for sink in sinks for reason, n in sink.dead.items()])
        yield _counter(d.LEASE_LOST, [((sink.name,), sink.leases_lost) for sink in sinks])
        restarts = [((sink.name, reason), n) for sink in sinks for reason, n in sink.restarts.items()]
        yield _counter(d.SESSION_RESTARTS, restarts)
        yield _counter(d.SCHEDULES_FIRED, [((outcome,), n) for outcome, n in self._snapshot.fired.items()])

    def _durations(self) -> Iterator[Metric]:
        sinks = self._snapshot.sinks
        attempts = [((sink.name, outcome), a) for sink in sinks for outcome, a in sink.attempts.items()]
        yield _histogram(d.ATTEMPT_SECONDS, attempts)
        yield _histogram(d.END_TO_END, _of(sinks, lambda sink: sink.end_to_end))
        yield _histogram(d.TICK_SECONDS, [((), self._snapshot.tick)])
        yield _histogram(d.READ_SECONDS, _of(sinks, lambda sink: sink.read))
        yield _histogram(d.CLAIM_SECONDS, _of(sinks, lambda sink: sink.claim))
        yield _histogram(d.SETTLE_SECONDS, _of(sinks, lambda sink: sink.settle))

    def _states(self) -> Iterator[Metric]:
        sinks = self._snapshot.sinks
        yield _gauge(d.CIRCUIT_STATE, [((sink.name,), CIRCUIT[sink.circuit]) for sink in sinks])
        yield _gauge(d.IN_FLIGHT, [((sink.name,), sink.in_flight) for sink in sinks])
        yield _gauge(d.IN_FLIGHT_LIMIT, [((sink.name,), sink.in_flight_limit) for sink in sinks])
        yield _gauge(d.LIMIT_WAITING, [((sink.name,), sink.limit_waiting) for sink in sinks])
        yield _gauge(d.CALLS_HANGING, [((sink.name,), sink.calls_hanging) for sink in sinks])
        yield _gauge(d.SHARDS_OWNED, [((sink.name,), sink.shards) for sink in sinks])

    def _figures(self) -> Iterator[Metric]:
        values: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
        ages, failed = dict[str, float](), dict[str, float]()
        for entry, age in self._snapshot.figures:
            ages[entry.group] = max(age, ages.get(entry.group, 0.0))
            failed[entry.group] = max(float(entry.failed), failed.get(entry.group, 0.0))
            for value in entry.values:
                values[value.name][value.labels] = value.value
        for definition in d.FIGURES:
            if definition.name in values:
                yield _gauge(definition, values[definition.name].items())
        yield _gauge(d.FIGURES_AGE, [((group,), age) for group, age in sorted(ages.items())])
        yield _gauge(d.FIGURES_FAILED, [((group,), value) for group, value in sorted(failed.items())])


def _of(sinks: Iterable[SinkCopy], part: _Part) -> list[tuple[Labels, measures.Distribution]]:
    return [((sink.name,), part(sink)) for sink in sinks]


def _counter(definition: Definition, samples: Iterable[tuple[Labels, float]]) -> Metric:
    family = CounterMetricFamily(definition.family, definition.help, labels=definition.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _gauge(definition: Definition, samples: Iterable[tuple[Labels, float]]) -> Metric:
    family = GaugeMetricFamily(definition.family, definition.help, labels=definition.labels, unit=definition.unit)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _histogram(definition: Definition, samples: Iterable[tuple[Labels, measures.Distribution]]) -> Metric:
    """Return a family. Its counts are derived from the copied buckets, so that they always agree."""
    family = HistogramMetricFamily(definition.family, definition.help, labels=definition.labels, unit=definition.unit)
    for labels, found in samples:
        if any(found.counts):
            family.add_metric(labels, list(zip(_LE, map(float, accumulate(found.counts)), strict=True)), found.sum)
    return family
