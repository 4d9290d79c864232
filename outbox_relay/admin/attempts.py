"""Recorded attempts of an event, and deliveries that are running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from outbox_relay.domain.errors import NotFound
from outbox_relay.postgres.store import Store

MOST_PER_SINK = 50
"""Number of recorded attempts that ``why`` shows for each sink."""

OUTSTANDING = ("pending", "waiting", "held")
"""The states of an event that is still to be delivered."""


def unknown_event(uid: UUID) -> NotFound:
    """Return the error for an event that neither the log nor ``delivery`` has."""
    return NotFound(
        f"no event {uid} is known: its transaction is not committed yet or was rolled back, or it was delivered "
        "and is past retention"
    )


def attempts(store: Store, uid: UUID) -> dict[str, Any]:
    """Return every recorded attempt of the event ``uid``, oldest first, for ``attempts --json``.

    ``outstanding`` has the sinks to which the event is not delivered yet, with the last error: attempts at a
    destination that is not available are neither counted nor recorded. The fields are described in docs/commands.md. No
    payload and no header value is stored with an attempt.

    Raises ``NotFound`` if neither the log, ``delivery``, a mark of a discard nor a record has the event,
    ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    found = store.named("attempts", {"uid": uid})
    event: dict[str, Any] | None = (store.named("why", {"uid": uid}))[0].found
    if event is None and not found:
        raise unknown_event(uid)
    delivered = {row.sink for row in found if row.outcome == "delivered"}  # a position may be written a moment later
    states: dict[str, dict[str, Any]] = {} if event is None else event["sinks"]
    waits = {n: state for n, state in states.items() if state["state"] in OUTSTANDING and n not in delivered}
    sinks = {sink.name: sink for sink in store.named("status_sinks", {})} if waits else {}
    outstanding = [_outstanding(name, state, sinks[name]) for name, state in waits.items() if name in sinks]
    return {"uid": str(uid), "attempts": [_attempt(row) for row in found], "outstanding": outstanding}


def _outstanding(name: str, state: dict[str, Any], sink: Any) -> dict[str, Any]:
    """Return why an event is not delivered to a sink, from its state in ``why`` and the row of the sink."""
    error = state.get("last_error")
    attempt: dict[str, Any] = state.get("last_attempt") or {}
    is_down = sink.circuit != "closed"
    seconds = attempt.get("seconds_ago") if error else sink.error_seconds if sink.last_error else None
    return {
        "sink": name,
        "state": state["state"],
        "behind": state["behind"],
        "attempts": state.get("attempts", 0),
        "error": error or sink.last_error,
        "error_seconds_ago": None if seconds is None else round(max(0.0, seconds), 3),
        "circuit": sink.circuit,
        "down_seconds": round(max(0.0, sink.circuit_seconds), 3) if is_down and sink.circuit_seconds else None,
    }


def recorded_attempts(store: Store, uid: UUID) -> Mapping[str, list[dict[str, Any]]]:
    """Return every recorded attempt of the event ``uid`` by sink, oldest first."""
    return _by_sink(store.named("attempts", {"uid": uid}))


def newest_attempts(store: Store, uid: UUID) -> Mapping[str, list[dict[str, Any]]]:
    """Return the newest ``MOST_PER_SINK`` recorded attempts of the event ``uid`` by sink, oldest first."""
    return _by_sink(store.named("newest_attempts", {"uid": uid, "most": MOST_PER_SINK}))


def _by_sink(rows: Sequence[Any]) -> Mapping[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        attempt = _attempt(row)
        found.setdefault(attempt.pop("sink"), []).append(attempt)
    return found


def _attempt(row: Any) -> dict[str, Any]:
    return {**row._asdict(), "at": row.at.isoformat()}


def running(store: Store, longer_than: float) -> dict[str, Any]:
    """Return the leased rows whose delivery began at least ``longer_than`` seconds ago, for ``running --json``.

    The fields are described in docs/commands.md. A delivery becomes a row when it has lasted a second.
    Rows whose beginning is not known are always included.

    Raises ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    return {"running": [_delivery(row) for row in store.named("running", {"longer_than": longer_than})]}


def _delivery(row: Any) -> dict[str, Any]:
    return {
        "uid": row.uid,
        "sink": row.sink,
        "type": row.type,
        "key": row.key,
        "relay": row.relay,
        "attempt": row.attempts + 1,
        "since": row.since and row.since.isoformat(),
        "running_seconds": row.running_for and round(max(0.0, row.running_for), 3),
        "lease_seconds": round(max(0.0, row.leased_for), 3),
    }
