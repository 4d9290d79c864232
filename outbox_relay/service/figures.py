"""Figures of the database: one relay at a time measures and stores them, and every relay exports what is stored.

A group that fails, or that the role has no right to, is unknown and never 0. Its failure affects no other group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple
from uuid import UUID

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import DatabaseUnavailable, RelayError
from outbox_relay.domain.log_events import RateLimitedLog
from outbox_relay.domain.routing import like_patterns
from outbox_relay.postgres.store import Store

ROUND_SECONDS = 10.0
"""Interval between two rounds."""
LEASE_SECONDS = 15.0
"""Time after which another relay measures if the present one does not."""
KEPT_SECONDS = 60.0
"""Age at which a figure is unknown."""
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

STATES: Final = ("waiting", "held", "scheduled", "dead")
"""The states of rows of ``outbox.delivery``, as ``status`` shows them."""
FIGURES: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "outbox_backlog_events": (
        "Committed events whose delivery is not settled, without dead and scheduled ones; estimated if there are many.",
        ("sink",),
    ),
    "outbox_oldest_undelivered_seconds": ("Age of the oldest event of the backlog; 0 without a backlog.", ("sink",)),
    "outbox_position_lag_seconds": (
        "Age of the first event of the log that the slowest position has not passed; 0 if there is none.",
        ("sink",),
    ),
    "outbox_exceptions": ("Rows of outbox.delivery by state, at most 100,000 of each.", ("sink", "state")),
    "outbox_oldest_exception_seconds": (
        "Age of the oldest event among the rows of a state; 0 without rows.",
        ("sink", "state"),
    ),
    "outbox_paused": ("1 if the sink is paused, else 0.", ("sink",)),
    "outbox_shards_unowned": ("Shards that no relay owns.", ("sink",)),
    "outbox_oldest_transaction_seconds": (
        "Age of the oldest transaction that keeps VACUUM from removing rows, prepared ones too.",
        (),
    ),
    "outbox_lock_waits": ("Sessions that wait for a lock on the relay's tables.", ()),
    "outbox_dead_tuples": ("Dead rows of a table, as statistics say.", ("table",)),
    "outbox_default_partition_rows": ("Events in the DEFAULT partition, counted up to 10,000.", ()),
    "outbox_log_bytes": ("Size of the log with its indexes.", ()),
    "outbox_retention_blocked": ("Days that are past keep_days and still hold events.", ()),
    "outbox_schedule_late_seconds": (
        "Time by which the schedule that is latest is late, or has waited for its first time; 0 if none is.",
        (),
    ),
    "outbox_schedules_failing": ("Schedules whose event was refused or not fired.", ()),
}
"""The meaning and the labels of every figure, by the name of its metric."""

SINGLE: Final[Mapping[str, tuple[str, str, Mapping[str, int]]]] = {
    "transactions": ("outbox_oldest_transaction_seconds", "figures_of_transactions", {}),
    "locks": ("outbox_lock_waits", "figures_of_locks", {}),
    "log": ("outbox_log_bytes", "figures_of_log", {}),
    "default_partition": ("outbox_default_partition_rows", "status_default_partition", {"most": MOST_DEFAULT}),
    "retention": ("outbox_retention_blocked", "figures_of_retention", {}),
}
"""The groups of one value, with the metric, the statement and its parameters."""


class Value(NamedTuple):
    """The value of a metric with the values of its labels, in their order."""

    name: str
    labels: tuple[str, ...]
    value: float


class Entry(NamedTuple):
    """One group of figures, or one sink's part of it, measured ``at`` a POSIX time by the database's clock.

    With ``failed`` there are no values.
    """

    group: str
    sink: str | None
    at: float
    failed: bool
    values: tuple[Value, ...]


def dump(entries: Iterable[Entry]) -> dict[str, Any]:
    """Return entries as a JSON object."""
    return {"entries": [entry._asdict() for entry in entries]}


def load(stored: Any, now: float) -> list[Entry]:
    """Return the entries of a stored object that are not too old at ``now``, by the database's clock."""
    loaded: list[Entry] = []
    for each in stored["entries"] if stored else ():
        values = tuple(Value(name, tuple(labels), value) for name, labels, value in each["values"])
        loaded.append(Entry(each["group"], each["sink"], each["at"], each["failed"], values))
    return [entry for entry in loaded if now - entry.at < KEPT_SECONDS]


class Figures(Collector):
    """The figures that this relay knows. ``round`` is a chore; the registry calls ``collect``."""

    def __init__(self, store: Store, relay: UUID, log: BoundLogger) -> None:
        self._store = store
        self._relay = relay
        self._log = RateLimitedLog(log, LOG_SECONDS)
        self._entries: dict[tuple[str, str | None], Entry] = {}
        """The entries by group and sink. Replaced and never changed: other threads collect."""
        self._database_ahead = 0.0
        """Seconds from ``time.monotonic()`` to the POSIX time of the database."""
        self._first = 0
        """The place of the sink with which the next round begins."""
        self._most_rows = MOST_ROWS

    def known(self) -> list[tuple[Entry, float]]:
        """Return the entries that are not too old, with their ages in seconds."""
        now = self._now()
        return [(entry, max(0.0, now - entry.at)) for entry in self._entries.values() if now - entry.at < KEPT_SECONDS]

    def collect(self) -> Iterator[Metric]:
        """Yield a gauge for each figure that is known, and the ages and failures of the groups."""
        families = {name: GaugeMetricFamily(name, text, labels=labels) for name, (text, labels) in FIGURES.items()}
        ages, failures = dict[str, float](), dict[str, float]()
        for entry, age in self.known():
            ages[entry.group] = max(age, ages.get(entry.group, 0.0))
            failures[entry.group] = max(float(entry.failed), failures.get(entry.group, 0.0))
            for name, labels, value in entry.values:
                families[name].add_metric(labels, value)
        yield from (family for family in families.values() if family.samples)
        yield _of_groups(
            "outbox_figures_age_seconds",
            "Age of the figures of the database that this process exports, by group; of several sinks the greatest.",
            ages,
        )
        yield _of_groups(
            "outbox_figures_failed",
            "1 if figures of the group are unknown, after an error, for lack of a right or of time; else 0.",
            failures,
        )

    def round(self) -> None:
        """Measure and store the figures if this relay has the lease, and read those of another relay if not."""
        claim = self._store.claim_figures(self._relay, LEASE_SECONDS)
        self._database_ahead = claim.now - time.monotonic()
        if claim.token is None:
            stored, now = self._store.stored_figures()
            self._entries = {(entry.group, entry.sink): entry for entry in load(stored, now)}
            return
        measured = {(entry.group, entry.sink): entry for entry in self._measured()}
        sinks = {value.labels[0] for value in measured["sinks", None].values}
        former = {key: entry for key, entry in self._entries.items() if entry.sink in sinks or not sinks}
        self._entries = {**former, **measured}
        self._store.store_figures(self._relay, claim.token, dump(entry for entry, _ in self.known()))

    def _now(self) -> float:
        """Return the time by the database's clock."""
        return self._database_ahead + time.monotonic()

    # -- measuring --------------------------------------------------------------------------------------------

    def _measured(self) -> Iterator[Entry]:
        """Yield what is measured, as many sinks as there is time for. Raises ``DatabaseUnavailable``."""
        patterns = dict[str, list[str]]()
        yield self._group("sinks", lambda: self._sinks(patterns))
        yield self._group("tables", self._tables)
        for group, (name, statement, parameters) in SINGLE.items():
            yield self._group(group, partial(self._single, name, statement, parameters))
        yield self._group("schedules", self._schedules)
        until, names = time.monotonic() + SINKS_SECONDS, list(patterns)
        self._first %= max(1, len(names))
        for name in (*names[self._first :], *names[: self._first]):
            if is_over(until):
                return
            self._first += 1
            yield from self._of_sink(name, patterns[name])

    def _group(self, group: str, measure: Callable[[], list[Value]], sink: str | None = None) -> Entry:
        """Measure a group, which is unknown if that fails. Raises ``DatabaseUnavailable``: so would all others."""
        at = self._now()
        try:
            values = measure()
        except DatabaseUnavailable:
            raise
        except Exception as error:  # a figure that cannot be had must stop no other
            reason = str(error) if isinstance(error, RelayError) else type(error).__name__
            self._log.warning("figures.failed", group=group, reason=reason)
            return Entry(group, sink, at, True, ())
        return Entry(group, sink, at, not values and group != "sinks", tuple(values))

    def _single(self, name: str, statement: str, parameters: Mapping[str, int]) -> list[Value]:
        """Return the value of a statement with one row of one column, or none without a row."""
        return [Value(name, (), float(row[0])) for row in self._store.measure(statement, parameters)]

    def _sinks(self, patterns: dict[str, list[str]]) -> list[Value]:
        """Measure the sinks, and add their ``patterns``."""
        values: list[Value] = []
        for row in self._store.measure("figures_of_sinks", {}):
            patterns[row.sink] = row.patterns
            values += [
                Value("outbox_paused", (row.sink,), float(row.paused)),
                Value("outbox_shards_unowned", (row.sink,), float(row.unowned)),
                Value("outbox_position_lag_seconds", (row.sink,), row.position_lag),
            ]
        return values

    def _tables(self) -> list[Value]:
        rows = self._store.measure("figures_of_tables", {})
        return [Value("outbox_dead_tuples", (row.name,), float(row.dead)) for row in rows]

    def _schedules(self) -> list[Value]:
        [row] = self._store.measure("figures_of_schedules", {})
        late = Value("outbox_schedule_late_seconds", (), row.late)
        return [late, Value("outbox_schedules_failing", (), float(row.failing))]

    def _of_sink(self, sink: str, patterns: list[str]) -> Iterator[Entry]:
        """Yield the rows of a sink by state, and its backlog, which is unknown without them."""
        types = like_patterns(patterns)
        parameters = {"sink": sink, "types": None if types is None else list(types)}
        counts = dict.fromkeys(STATES, (0.0, 0.0))

        def of_rows() -> list[Value]:
            most, self._most_rows = self._most_rows, max(FEWEST_ROWS, self._most_rows // 10)  # fewer after a failure
            rows = self._store.measure("figures_of_rows", {**parameters, "most": most})
            self._most_rows = min(MOST_ROWS, 2 * most)
            counts.update((row.state, (float(row.rows), row.oldest)) for row in rows)
            return [value for state in STATES for value in _row_values(sink, state, *counts[state])]

        def of_backlog() -> list[Value]:
            bounds = {"most": MOST_EVENTS, "seconds": MOST_EVENTS_SECONDS}
            [(events, oldest)] = self._store.measure("figures_of_backlog", {**parameters, **bounds})
            (waiting, oldest_waiting), (held, oldest_held) = counts["waiting"], counts["held"]
            return [
                Value("outbox_backlog_events", (sink,), events + waiting + held),
                Value("outbox_oldest_undelivered_seconds", (sink,), max(oldest, oldest_waiting, oldest_held)),
            ]

        rows = self._group("exceptions", of_rows, sink)
        yield rows
        yield self._group("backlog", list if rows.failed else of_backlog, sink)


def is_over(until: float) -> bool:
    """Return True once ``until``, a ``time.monotonic()`` value, has passed."""
    return time.monotonic() >= until


def _row_values(sink: str, state: str, rows: float, oldest: float) -> Iterable[Value]:
    yield Value("outbox_exceptions", (sink, state), rows)
    yield Value("outbox_oldest_exception_seconds", (sink, state), oldest)


def _of_groups(name: str, text: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["group"])
    for group, value in sorted(values.items()):
        family.add_metric([group], value)
    return family
