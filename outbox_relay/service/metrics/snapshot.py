"""A copy of everything that is exported. Loops count meanwhile, so a copy may lack what they count just now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from outbox_relay import __version__
from outbox_relay.domain.measures import Distribution, RelayMeasures
from outbox_relay.service.metrics.stored_figures import Entry
from outbox_relay.service.served_sinks import ServedSink


class Aged(NamedTuple):
    """An entry of figures, and its age in seconds when the copy was made."""

    entry: Entry
    age: float


class SinkCopy(NamedTuple):
    """The measures of one sink."""

    name: str
    delivered: int
    attempts: Mapping[str, Distribution]
    dead: Mapping[str, int]
    restarts: Mapping[str, int]
    end_to_end: Distribution
    read: Distribution
    claim: Distribution
    settle: Distribution
    leases_lost: int
    circuit: str
    in_flight: int
    in_flight_limit: int
    limit_waiting: int
    calls_hanging: int
    shards: int


class Snapshot(NamedTuple):
    """The measures of a process, and the figures of the database that it knows."""

    sinks: tuple[SinkCopy, ...]
    tick: Distribution
    fired: Mapping[str, int]
    """The times of schedules by outcome."""
    figures: tuple[Aged, ...]
    reload_successful: bool
    version: str = __version__


class Snapshots:
    """Takes copies. ``last_reload`` returns False after a reload that failed."""

    def __init__(
        self,
        sinks: Mapping[str, ServedSink],
        measures: RelayMeasures,
        figures: Callable[[float], Iterable[Aged]],
        last_reload: Callable[[], bool],
    ) -> None:
        self._sinks = sinks
        self._measures = measures
        self._figures = figures
        self._last_reload = last_reload

    def take(self) -> Snapshot:
        """Return the present state. Sinks that were removed from the database, and replays, are left out."""
        figures = tuple(self._figures(time.monotonic()))
        fired = {str(outcome): count for outcome, count in self._measures.schedules.fired.items()}
        return Snapshot(tuple(self.copies().values()), self._measures.tick.copy(), fired, figures, self._last_reload())

    def copies(self) -> dict[str, SinkCopy]:
        """Return the measures of the sinks by name."""
        return {name: _copy(sink) for name, sink in self._sinks.items() if not sink.leases.missing}

    def end_interval(self) -> dict[str, SinkCopy]:
        """Return the measures of the sinks by name, and begin another interval for their longest observations."""
        found = self.copies()
        for sink in self._sinks.values():
            sink.measures.begin_interval()
        return found


def _copy(sink: ServedSink) -> SinkCopy:
    measures = sink.measures
    return SinkCopy(
        sink.spec.name,
        measures.delivered_count,
        {outcome: histogram.copy() for outcome, histogram in dict(measures.attempts).items()},
        {str(reason): count for reason, count in dict(measures.dead).items()},
        dict(sink.restarts),
        *(measures.end_to_end.copy(), measures.read.copy(), measures.claim.copy(), measures.settle.copy()),
        sink.leases.losses + measures.row_leases_lost,
        sink.loop.circuit,
        measures.in_flight,
        sink.loop.in_flight_limit,
        sink.loop.limits.waiting,
        sink.sink.hanging,
        len(sink.leases.held),
    )
