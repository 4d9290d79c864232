"""Figures of the database: one relay at a time measures them, and every relay exports what is stored.

A group that fails, or that the role has no right to, is unknown and never 0. Its failure affects no other group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from uuid import UUID

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import DatabaseUnavailable, RelayError
from outbox_relay.domain.log_events import RateLimitedLog
from outbox_relay.domain.routing import like_patterns
from outbox_relay.postgres.store import Store
from outbox_relay.service.metrics.definitions import STATES, TABLES
from outbox_relay.service.metrics.snapshot import Aged
from outbox_relay.service.metrics.stored_figures import Entry, Value, dump, load

ROUND_SECONDS = 10.0
"""Interval between two rounds."""
LEASE_SECONDS = 15.0
"""Time after which another relay measures if the present one does not."""
SINKS_SECONDS = 2.0
"""Time of a round after which the remaining sinks are left for later rounds."""
MOST_ROWS, FEWEST_ROWS = 100_000, 1_000
"""Number of rows up to which those of a state are counted, and its minimum after counts that took too long."""
MOST_EVENTS, MOST_EVENTS_SECONDS = 10_000, 0.3
"""Number of events of the log up to which a backlog is counted, and the time for that."""
MOST_DEFAULT = 10_000
"""Number of events up to which those in the DEFAULT partition are counted."""
LOG_SECONDS = 600.0
"""Least time between two log lines about figures that fail."""


class SinkState(NamedTuple):
    """A sink to be measured, with the types of its routes as SQL LIKE patterns."""

    name: str
    types: tuple[str, ...] | None


class Figures:
    """The figures that this relay knows."""

    def __init__(self, store: Store, relay: UUID, log: BoundLogger) -> None:
        self._store = store
        self._relay = relay
        self._log = RateLimitedLog(log, LOG_SECONDS)
        self._entries: dict[tuple[str, str | None], Entry] = {}
        self._database_now = 0.0
        self._heard_at = time.monotonic()
        self._turn = 0
        self._most_rows = MOST_ROWS

    def known(self, now: float) -> list[Aged]:
        """Return the entries that are not too old at ``now``, a ``time.monotonic()`` value."""
        at = self._clock(now)
        aged = (Aged(entry, max(0.0, at - entry.at)) for entry in self._entries.values())
        return [each for each in aged if each.age < each.entry.kept_seconds]

    def round(self) -> None:
        """Measure and store the figures if this relay has the lease, and read those of another relay if not."""
        claim = self._store.claim_figures(self._relay, LEASE_SECONDS)
        self._hear(claim.now)
        if claim.token is None:
            stored, now = self._store.stored_figures()
            self._hear(now)
            self._take(stored, now)
            return
        self._measure()
        self._store.store_figures(self._relay, claim.token, dump(self._entries.values()))

    def _take(self, stored: object, now: float) -> None:
        self._entries = {(entry.group, entry.sink): entry for entry in load(stored, now)}

    def _hear(self, database_now: float) -> None:
        self._database_now, self._heard_at = database_now, time.monotonic()

    def _clock(self, now: float) -> float:
        """Return the database's time at a ``time.monotonic()`` value."""
        return self._database_now + now - self._heard_at

    # -- measuring --------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        sinks: list[SinkState] = []

        def of_sinks() -> list[Value]:
            rows = self._store.measure("figures_of_sinks", {})
            sinks.extend(SinkState(row.sink, like_patterns(row.patterns)) for row in rows)
            return [value for row in rows for value in _sink_values(row)]

        self._group("sinks", of_sinks)
        for group, values in self._groups().items():
            self._group(group, values)
        self._take_turns(sinks)
        self._forget({sink.name for sink in sinks})

    def _forget(self, sinks: set[str]) -> None:
        """Forget entries that are too old, those of sinks that are gone, and values that no relay would read."""
        stored = dump(each for each in self._entries.values() if each.sink is None or not sinks or each.sink in sinks)
        self._take(stored, self._clock(time.monotonic()))

    def _groups(self) -> dict[str, Callable[[], list[Value]]]:
        return {
            "transactions": lambda: self._one("outbox_oldest_transaction_seconds", "figures_of_transactions"),
            "locks": lambda: self._one("outbox_lock_waits", "figures_of_locks"),
            "tables": self._tables,
            "log": lambda: self._one("outbox_log_bytes", "figures_of_log"),
            "default_partition": lambda: self._one(
                "outbox_default_partition_rows", "status_default_partition", most=MOST_DEFAULT
            ),
            "retention": lambda: self._one("outbox_retention_blocked", "figures_of_retention"),
            "schedules": self._schedules,
        }

    def _group(self, group: str, measure: Callable[[], list[Value]], sink: str | None = None) -> None:
        """Measure a group, which is unknown if that fails. Raises ``DatabaseUnavailable``: so would all others."""
        at, before = self._clock(time.monotonic()), self._entries.get((group, sink))
        values, failed = list[Value](), True
        try:
            values = measure()
            failed = not values and group != "sinks"
        except DatabaseUnavailable:
            raise
        except Exception as error:  # as in run
            self._fail(group, error)
        every = max(ROUND_SECONDS, at - before.at) if before else ROUND_SECONDS
        self._entries[group, sink] = Entry(group, sink, at, every, failed, tuple(values))

    def _one(self, name: str, statement: str, **parameters: Any) -> list[Value]:
        """Return the value of a statement with one row of one column, or none without a row."""
        return [Value(name, (), float(row[0])) for row in self._store.measure(statement, parameters)]

    def _tables(self) -> list[Value]:
        rows = self._store.measure("figures_of_tables", {})
        return [Value("outbox_dead_tuples", (row.name,), float(row.dead)) for row in rows if row.name in TABLES]

    def _schedules(self) -> list[Value]:
        [row] = self._store.measure("figures_of_schedules", {})
        late = Value("outbox_schedule_late_seconds", (), row.late)
        return [late, Value("outbox_schedules_failing", (), float(row.failing))]

    # -- sinks ------------------------------------------------------------------------------------------------

    def _take_turns(self, sinks: list[SinkState]) -> None:
        """Measure sinks in turn, for ``SINKS_SECONDS``, beginning with the first that was left out last time."""
        until = time.monotonic() + SINKS_SECONDS
        first = self._turn % len(sinks) if sinks else 0
        for sink in (*sinks[first:], *sinks[:first]):
            if is_over(until):
                return
            self._turn += 1
            self._sink(sink)

    def _sink(self, sink: SinkState) -> None:
        rows: dict[str, tuple[float, float]] = {}

        def of_rows() -> list[Value]:
            found = self._count_rows(sink)
            rows.update(dict.fromkeys(STATES, (0.0, 0.0)))
            rows.update((row.state, (float(row.rows), row.oldest)) for row in found)
            return [value for state in STATES for value in _row_values(sink.name, state, *rows[state])]

        def of_backlog() -> list[Value]:
            if not rows:
                return []
            bounds = {"most": MOST_EVENTS, "seconds": MOST_EVENTS_SECONDS}
            types = None if sink.types is None else list(sink.types)
            parameters = {"sink": sink.name, "types": types, **bounds}
            [(events, oldest)] = self._store.measure("figures_of_backlog", parameters)
            (waiting, oldest_waiting), (held, oldest_held) = rows["waiting"], rows["held"]
            age = max(oldest, oldest_waiting, oldest_held)
            return [
                Value("outbox_backlog_events", (sink.name,), events + waiting + held),
                Value("outbox_oldest_undelivered_seconds", (sink.name,), age),
            ]

        self._group("exceptions", of_rows, sink.name)
        self._group("backlog", of_backlog, sink.name)

    def _count_rows(self, sink: SinkState) -> list[Any]:
        """Return the rows of a sink by state, and its scheduled events. Fewer are counted after a count that failed."""
        most, self._most_rows = self._most_rows, max(FEWEST_ROWS, self._most_rows // 10)
        types = None if sink.types is None else list(sink.types)
        found = self._store.measure("figures_of_rows", {"sink": sink.name, "types": types, "most": most})
        self._most_rows = min(MOST_ROWS, 2 * most)
        return found

    def _fail(self, group: str, error: Exception) -> None:
        reason = str(error) if isinstance(error, RelayError) else type(error).__name__
        self._log.warning("figures.failed", group=group, reason=reason)


def is_over(until: float) -> bool:
    """Return True once ``until``, a ``time.monotonic()`` value, has passed."""
    return time.monotonic() >= until


def _sink_values(row: Any) -> Iterable[Value]:
    yield Value("outbox_paused", (row.sink,), float(row.paused))
    yield Value("outbox_shards_unowned", (row.sink,), float(row.unowned))
    yield Value("outbox_position_lag_seconds", (row.sink,), row.position_lag)


def _row_values(sink: str, state: str, rows: float, oldest: float) -> Iterable[Value]:
    yield Value("outbox_exceptions", (sink, state), rows)
    yield Value("outbox_oldest_exception_seconds", (sink, state), oldest)
