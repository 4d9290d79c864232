"""What the story knows of one destination: its journal read as it grows, counted, timed and judged."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from pathlib import Path

from outbox_relay.workbench.demo.checker import CheckResult, DeliveryChecker, Identity
from outbox_relay.workbench.demo.figures import Latency, RateMeter, RecentLatency, summarise_latency
from outbox_relay.workbench.demo.journal import JournalReader


class MonitoredDestination:
    """The arrivals at one sink's destination; `kind` says in a word what that is."""

    def __init__(self, name: str, kind: str, journal: Path) -> None:
        self.name = name
        self.kind = kind
        self.journal = journal
        self.refused = 0
        """Requests whose signature was wrong."""
        self._reader = JournalReader(journal)
        self._checker = DeliveryChecker()
        self._recent = RecentLatency()
        self._rate = RateMeter()
        self._timed: list[tuple[float, float]] = []

    @property
    def distinct(self) -> int:
        """How many different events have arrived."""
        return self._checker.distinct

    def read(self) -> None:
        """Take in what the journal has grown by."""
        while found := self._reader.read():
            for arrival in found:
                if arrival is None:
                    self.refused += 1
                elif self._checker.add(arrival.key, arrival.number, arrival.uid):
                    self._recent.add(arrival.arrived_at, arrival.latency_seconds)
                    self._timed.append((arrival.emitted_at, arrival.latency_seconds))

    def per_second(self, now: float) -> float:
        """Different events that arrived per second, in the last seconds before `now`."""
        return self._rate.per_second(now, self.distinct)

    def recent(self, now: float) -> Latency:
        """How long what arrived in the last seconds took; `now` is in seconds since 1970."""
        return self._recent.latency(now)

    def took(self, *, emitted_before: float | None = None) -> Latency:
        """How long first arrivals took: of all events, or of those emitted before a time in seconds since 1970."""
        return summarise_latency([took for at, took in self._timed if emitted_before is None or at < emitted_before])

    def missing(self, committed: AbstractSet[Identity]) -> int:
        """How many committed events have not arrived yet."""
        return self._checker.missing(committed)

    def result(self, committed: AbstractSet[Identity]) -> CheckResult:
        """Judge what has arrived so far."""
        return self._checker.result(committed)
