"""The history: once a minute each relay adds its own minute to that of the database.

A minute that cannot be written is dropped, and so is one that lasted too long, such as that of a suspended process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from outbox_relay.domain.measures import Distribution, RelayMeasures, quantile, since
from outbox_relay.domain.times import lease_clock
from outbox_relay.postgres.store import Store
from outbox_relay.service.metrics.snapshot import Aged, SinkCopy

MINUTE_SECONDS = 60.0
LONGEST_SECONDS = 90.0
"""Length of an interval, by either clock, from which on it is dropped."""


class Moment(NamedTuple):
    """The measures at one time, by two clocks: the second one counts while the machine is suspended."""

    monotonic: float
    lease: float
    sinks: Mapping[str, SinkCopy]
    tick: Distribution


class History:
    """Adds minutes. ``copies`` ends an interval and returns the measures by sink name in the settings."""

    def __init__(
        self,
        store: Store,
        measures: RelayMeasures,
        copies: Callable[[], Mapping[str, SinkCopy]],
        figures: Callable[[float], Iterable[Aged]],
    ) -> None:
        self._store = store
        self._measures = measures
        self._copies = copies
        self._figures = figures
        self._before: Moment | None = None

    def step(self) -> None:
        """Add the interval since the last call, if there was one."""
        before, self._before = self._before, self._moment()
        if before is not None:
            self.add(before, self._before)

    def add(self, before: Moment, after: Moment) -> None:
        """Add the interval between two moments, once. It is dropped if that fails or may have failed."""
        if max(after.monotonic - before.monotonic, after.lease - before.lease) <= LONGEST_SECONDS:
            self._store.add_history(minute(before, after, self._figures(after.monotonic)))

    def _moment(self) -> Moment:
        tick = self._measures.tick.copy()
        self._measures.tick.begin_interval()
        return Moment(time.monotonic(), lease_clock(), self._copies(), tick)


def minute(before: Moment, after: Moment, figures: Iterable[Aged]) -> list[dict[str, Any]]:
    """Return the rows of an interval, sorted by sink: that of the process, and one of each sink."""
    tick = since(before.tick, after.tick)
    rows = {"": {"sink": "", "tick_p99": quantile(tick, 0.99), "busy_ms": 1000.0 * tick.sum}}
    for name, copy in after.sinks.items():
        rows[copy.name] = _row(before.sinks.get(name), copy)
    columns = {"outbox_backlog_events": "backlog", "outbox_oldest_undelivered_seconds": "oldest_seconds"}
    for entry, _ in figures:
        for value in entry.values:
            if entry.sink in rows and value.name in columns:
                rows[entry.sink][columns[value.name]] = int(value.value) if "backlog" in value.name else value.value
    return [rows[sink] for sink in sorted(rows)]


def _row(before: SinkCopy | None, after: SinkCopy) -> dict[str, Any]:
    def of(part: Callable[[SinkCopy], Distribution]) -> Distribution:
        return since(part(before) if before else None, part(after))

    end_to_end, read, claim, settle = (
        of(lambda sink: sink.end_to_end), of(lambda sink: sink.read), of(lambda sink: sink.claim),
        of(lambda sink: sink.settle),
    )  # fmt: skip
    return {
        "sink": after.name,
        "delivered": after.delivered - (before.delivered if before else 0),
        "failed": _failed(after) - (_failed(before) if before else 0),
        "dead": sum(after.dead.values()) - (sum(before.dead.values()) if before else 0),
        "end_to_end_p50": quantile(end_to_end, 0.5),
        "end_to_end_p99": quantile(end_to_end, 0.99),
        "claim_p99": quantile(claim, 0.99),
        "settle_p99": quantile(settle, 0.99),
        "busy_ms": 1000.0 * (read.sum + claim.sum + settle.sum),
    }


def _failed(sink: SinkCopy) -> int:
    return sum(sum(found.counts) for outcome, found in sink.attempts.items() if outcome != "delivered")
