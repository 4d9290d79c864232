"""The progress of every sink, the live relays, and types without a route."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from outbox_relay.admin.replays import replays
from outbox_relay.admin.text import MOST_SECONDS
from outbox_relay.admin.thresholds import ALIVE_SECONDS, STALE_SECONDS
from outbox_relay.admin.values import plain, seconds
from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.routing import NOTICE_TYPES, Routes, like_patterns
from outbox_relay.postgres.store import Store

T = TypeVar("T")
EXACT_EVENTS: Final = 10_000
"""Largest backlog in the log that is counted; a larger one is estimated."""
SEARCH_SECONDS: Final = 6.0
"""Time limit for counting the events of the log for one sink; the rest is estimated. The server ends it after 9 s."""
ANSWER_SECONDS: Final = 30.0
"""Time limit of the statement that counts, for one sink."""
HURRIED_SECONDS: Final = 3.0
"""Time limit of the statement that counts once another one has failed, because the rest is likely to be slow too."""
HURRIED_SEARCH_SECONDS: Final = 1.0
"""Time limit for counting once a statement has failed."""
BACKLOG: Final = ("backlog", "backlog_exact", "oldest_seconds", "waiting", "held", "dead", "scheduled")
"""The values of a sink that are counted."""
RETENTION: Final = "retention"
"""The name of the part that has the days."""
NEWEST_EVENTS: Final = 10_000
"""Number of newest events that are searched for types without a route."""


def status(store: Store) -> dict[str, Any]:
    """Return the state of all relays and sinks, for ``status --json``.

    For each sink:

    - ``backlog``: committed events whose delivery is not settled. These are events of the log after the position of
      their shard, and waiting and held rows, but not dead or scheduled ones. A position is written up to 0.1 s after
      the delivery. With more than ``EXACT_EVENTS`` events of the log, or after ``SEARCH_SECONDS``, ``backlog_exact`` is
      False, and the rest is estimated from the density of events in the ids that were counted.
    - ``oldest_seconds``: the age of the oldest event of the backlog by the database's clock, or the time since it
      became due if that is shorter; 0.0 without a backlog.
    - ``waiting``, ``held``, ``dead``: numbers of rows. ``scheduled``: number of events that are not
      due and that the sink takes.
    - ``circuit_seconds``: the time since the circuit was last closed, or None.
    - ``in_flight_limit``: the concurrency of a relay after the destination requested less; None means the configured
      maximum.
    - ``rate_per_second``, ``max_in_flight_total``, ``spread_seconds``: the limits across all relays, each None without
      one.
    - ``paused_reason``: the reason for which a relay paused the sink, or None.
    - ``last_error``: the last error of the destination; None if there is none, or if it is over: the circuit is closed,
      and an event was delivered after the error. ``last_error_at`` and ``last_error_mended_at`` are the times of the
      error and of its end by the database's clock, each with its age in seconds. ``mended_error`` is one that is over.
    - ``unowned``: the number of shards without an owner.
    - ``missing_positions``: the number of shards without a position, which no relay serves. The whole log counts as
      their backlog.

    ``relays`` are those seen within ``ALIVE_SECONDS`` or owning a shard, with the number of their shards per sink.
    ``stale`` is True for one that has missed heartbeats: it hangs, has ended, or cannot reach the database.
    ``unrouted`` are types of the newest ``NEWEST_EVENTS`` events that match no pattern, notices excepted.
    ``in_default_partition`` is the number of events, up to ``EXACT_EVENTS``, in the DEFAULT partition.

    ``retention`` has ``keep_days`` (0 means indefinitely), ``hold_until`` (None, or the time until which no day is
    emptied because the clock has jumped), and ``blocked``: the days that are past keep_days and still hold events,
    with ``kept_by`` as of the last pass, and ``since``; or, if nothing kept the day, ``left_because`` and ``left_at``.
    ``idle`` is True if no pass has begun in the last 15 minutes, and ``last_pass`` is the time of the newest one.
    ``replays`` are those that have not ended: see ``replays``.

    ``not_answered`` lists the parts whose statement failed, because it took too long or met a lock: each has ``part``
    and ``reason``. The values of such a part are None, and every other part is answered.

    Raises ``StatementFailed`` if the sinks cannot be listed, ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    sinks = store.named("status_sinks", {})
    parts = _Parts()
    missing = parts.ask("missing positions", store.missing_positions)
    return {
        "relays": parts.ask("relays", lambda: live_relays(store)),
        "sinks": {
            sink.name: {
                **(_backlog(store, sink, parts) or dict.fromkeys(BACKLOG)),
                **_delivery(sink),
                "missing_positions": None if missing is None else len(missing.get(sink.name, ())),
            }
            for sink in sinks
        },
        "unrouted": parts.ask("types without a route", lambda: _unrouted(store, sinks)),
        "in_default_partition": parts.ask("DEFAULT partition", lambda: _in_default_partition(store)),
        "retention": parts.ask(RETENTION, lambda: _retention(store)),
        "replays": parts.ask("replays", lambda: replays(store, unfinished=True)),
        "not_answered": parts.not_answered,
    }


class _Parts:
    """The parts of one ``status``, of which some may fail."""

    def __init__(self) -> None:
        self.not_answered: list[dict[str, str]] = []

    def ask(self, part: str, ask: Callable[[], T]) -> T | None:
        """Return the answer, or None if its statement failed, which is recorded."""
        try:
            return ask()
        except StatementFailed as error:
            self.not_answered.append({"part": part, "reason": str(error)})
            return None


def too_old(found: dict[str, Any], most_seconds: float) -> list[str]:
    """Return a line for each sink of ``status`` whose oldest event is too old or of unknown age."""
    lines: list[str] = []
    for name, sink in found["sinks"].items():
        oldest = sink["oldest_seconds"]
        if oldest is None:
            lines.append(f"sink {name}: the age of its oldest event is not known")
        elif oldest > most_seconds:
            lines.append(f"sink {name}: its oldest event has waited for {oldest:.1f} s, more than {most_seconds:g} s")
    return lines


def live_relays(store: Store) -> list[dict[str, Any]]:
    """Return the relays seen within ``ALIVE_SECONDS`` or owning a shard, with the number of their shards per sink."""
    relays: dict[Any, dict[str, Any]] = {}
    for row in store.named("status_relays", {"seconds": ALIVE_SECONDS, "stale": STALE_SECONDS}):
        seen = {"seen_seconds_ago": seconds(row.seen_seconds_ago), "stale": row.stale}
        relay = relays.setdefault(row.id, {**plain(row, "name", "version"), **seen, "shards": {}})
        if row.sink is not None:
            relay["shards"][row.sink] = row.shards
    return list(relays.values())


def _backlog(store: Store, sink: Any, parts: _Parts) -> dict[str, Any] | None:
    """Return the values of ``BACKLOG``, or None if they cannot be counted."""
    limit, deadline = SEARCH_SECONDS, ANSWER_SECONDS
    if parts.not_answered:
        limit, deadline = HURRIED_SEARCH_SECONDS, HURRIED_SECONDS
    types = like_patterns(sink.patterns)
    given = {"sink": sink.name, "types": None if types is None else list(types), "most": EXACT_EVENTS, "seconds": limit}
    statement = "status_queue" if sink.claim == "rows" else "status_backlog"
    rows = parts.ask(f"backlog of sink {sink.name}", lambda: store.named(statement, given, deadline))
    if rows is None:
        return None
    [row] = rows
    counts = plain(row, "backlog", "waiting", "held", "dead", "scheduled")
    return {**counts, "backlog_exact": row.exact, "oldest_seconds": round(min(row.oldest_seconds, MOST_SECONDS), 3)}


def _delivery(sink: Any) -> dict[str, Any]:
    """Return how a sink delivers: its circuit, limits, pause, shards without an owner, and its last error.

    The last error is None if it is over.
    """
    return {
        **plain(sink, "circuit", "in_flight_limit", "rate_per_second", "max_in_flight_total", "spread_seconds"),
        "circuit_seconds": seconds(sink.circuit_seconds),
        **plain(sink, "paused", "paused_reason", "unowned", "last_error", "mended_error"),
        "last_error_at": _time(sink.last_error_at),
        "last_error_seconds_ago": seconds(sink.error_seconds if sink.last_error_at else None),
        "last_error_mended_at": _time(sink.last_error_mended_at),
        "last_error_mended_seconds_ago": seconds(sink.mended_seconds),
    }


def _time(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _unrouted(store: Store, sinks: list[Any]) -> list[str]:
    routes = Routes({pattern: ("some",) for sink in sinks for pattern in sink.patterns})
    types = store.named("status_types", {"most": NEWEST_EVENTS})
    return [row.type for row in types if not routes.sinks_for(row.type) and row.type not in NOTICE_TYPES]


def _retention(store: Store) -> dict[str, Any]:
    found = store.retention_status(live=False)
    if found["idle"]:  # what keeps a day may have changed since the last pass
        with suppress(StatementFailed):  # it takes reading: then as of the last pass
            found = store.retention_status(live=True)
    names = ("day", "kept_by", "left_because", "left_at")
    blocked = [
        {
            **{name: day[name] for name in names},
            "since": min((keeper["since"] for keeper in day["kept_by"]), default=None),
        }
        for day in found["days"]
        if day["due"]
    ]
    return {**{name: found[name] for name in ("keep_days", "hold_until", "idle", "last_pass")}, "blocked": blocked}


def _in_default_partition(store: Store) -> int:
    [row] = store.named("status_default_partition", {"most": EXACT_EVENTS})
    return row.events
