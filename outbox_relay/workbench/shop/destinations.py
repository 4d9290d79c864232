"""Arrivals at one destination, read from its journal, counted, timed and checked."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from pathlib import Path

from outbox_relay.workbench.shop.checker import CheckResult, DeliveryChecker, Identity
from outbox_relay.workbench.shop.figures import Latency, RateMeter, RecentLatency, summarise_latency
from outbox_relay.workbench.shop.journal import JournalReader


class MonitoredDestination:
    """The destination of one sink; `kind` is `kafka` or `webhook`."""

    def __init__(self, name: str, kind: str, journal: Path) -> None:
        self.name = name
        self.kind = kind
        self.journal = journal
        self.refused = 0
        """Number of requests with an invalid signature."""
        self._reader = JournalReader(journal)
        self._checker = DeliveryChecker()
        self._recent_latency = RecentLatency()
        self._rate = RateMeter()
        self._timed: list[tuple[float, float]] = []

    @property
    def distinct(self) -> int:
        """Return the number of different events that have arrived."""
        return self._checker.distinct

    def read(self) -> None:
        """Process the new entries of the journal."""
        while arrivals := self._reader.read():
            for arrival in arrivals:
                if arrival is None:
                    self.refused += 1
                elif self._checker.add(arrival.key, arrival.number, arrival.uid):
                    self._recent_latency.add(arrival.arrived_at, arrival.latency_seconds)
                    self._timed.append((arrival.emitted_at, arrival.latency_seconds))

    def per_second(self, now: float) -> float:
        """Return the current arrival rate of different events."""
        return self._rate.per_second(now, self.distinct)

    def recent_latency(self, now: float) -> Latency:
        """Return the latency of recent arrivals; `now` is in seconds since 1970."""
        return self._recent_latency.latency(now)

    def latency(self, *, emitted_before: float | None = None) -> Latency:
        """Return the latency of first arrivals, optionally of events emitted before a time (seconds since 1970)."""
        return summarise_latency(
            [seconds for at, seconds in self._timed if emitted_before is None or at < emitted_before]
        )

    def missing(self, committed: AbstractSet[Identity]) -> int:
        """Return the number of committed events that have not arrived yet."""
        return self._checker.missing(committed)

    def result(self, committed: AbstractSet[Identity]) -> CheckResult:
        """Compare the arrivals so far with the committed events."""
        return self._checker.result(committed)
