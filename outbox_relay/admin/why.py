"""Where one event is, sink by sink, and what it waits for there."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from outbox_relay.domain.errors import NotFound
from outbox_relay.domain.routing import matches
from outbox_relay.postgres.store import Store


async def why(store: Store, uid: UUID) -> dict[str, Any]:
    """Where the event ``uid`` is, as ``why --json`` prints it: the event, and under ``sinks`` a state for each sink.

    ``not-routed``: no pattern of the sink matches its type. ``delivered``: the position of its shard has passed it and
    no row is left. ``passed-over``: the same, but it was emitted before the sink began with ``start = "now"``.
    ``in-log``: its shard's position is still before it. ``waiting``, ``held``, ``dead``: it has a row in that state.
    ``scheduled``: it is not due yet by its own time. ``under-way``: a relay has claimed its row.

    What is known besides is in the other fields: see docs/commands.md. No payload and no value of a header is read.
    Raises ``NotFound`` when neither the log nor ``delivery`` has it, ``Unusable`` or ``DatabaseLost``.
    """
    rows = await store.named("why", {"uid": uid})
    if not rows:
        raise NotFound(
            f"no event {uid} is known: its transaction is not committed yet or was rolled back, or it was delivered "
            "and is past retention"
        )
    event = rows[0]
    return {
        "uid": event.uid,
        "type": event.type,
        "key": event.key,
        "id": event.id,
        "shard": event.shard,
        "in_log": event.in_log,
        "created_at": event.created_at.isoformat(),
        "age_seconds": _seconds(event.age_seconds),
        "sinks": {row.sink: _sink(row) for row in rows if row.sink is not None},
    }


def _sink(row: Any) -> dict[str, Any]:
    if row.state is not None:
        return _parked(row)
    if not any(matches(pattern, row.type) for pattern in row.patterns):
        return {"state": "not-routed"}
    if row.settled is False:
        return _in_log(row)
    return {"state": "passed-over" if row.before_start else "delivered"}


def _in_log(row: Any) -> dict[str, Any]:
    """The position of its shard is before it."""
    scheduled = row.deliver_in is not None and row.deliver_in > 0
    return {
        "state": "scheduled" if scheduled else "in-log",
        **({"due_in_seconds": _seconds(row.deliver_in)} if scheduled else {}),
        "owner": row.owner,
        "lease_seconds": None if row.owner is None else _seconds(row.owned_for),
        **_behind(row),
        **_gate(row),
    }


def _parked(row: Any) -> dict[str, Any]:
    """It has a row of its own."""
    tried = {
        "attempts": row.attempts,
        "last_error": row.last_error,
        "last_status": row.last_status,
        "last_attempt": _attempt(row),
    }
    if row.state == "dead":
        return {"state": "dead", **tried, "since_seconds": _seconds(row.since_seconds)}
    if row.leased_for is not None:
        return {
            "state": "under-way",
            "relay": row.leased_by,
            "lease_seconds": _seconds(row.leased_for),
            **tried,
            **_gate(row),
        }
    if row.state == "held":
        return {"state": "held", **_behind(row), **tried, **_gate(row)}
    scheduled = row.deliver_in is not None and row.deliver_in > 0
    return {
        "state": "scheduled" if scheduled else "waiting",
        "due_in_seconds": _seconds(row.due_in),
        **({} if scheduled else _behind(row)),
        **tried,
        **_gate(row),
    }


def _attempt(row: Any) -> dict[str, Any] | None:
    """What is kept of the last attempt; nothing when there was none or its sink keeps nothing."""
    return row.last_attempt and {**row.last_attempt, "seconds_ago": _seconds(row.tried_seconds)}


def _behind(row: Any) -> dict[str, Any]:
    """The first row of its key, if that comes before it: its uid and its state."""
    return {"behind": row.behind_uid, "behind_state": row.behind_state}


def _gate(row: Any) -> dict[str, Any]:
    """What keeps the whole sink from being sent anything."""
    return {"paused": bool(row.paused), "circuit": row.circuit, "sink_error": row.sink_error}


def _seconds(value: Any) -> float:
    return round(max(0.0, value), 3)
