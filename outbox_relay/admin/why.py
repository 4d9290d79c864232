"""The delivery state of one event, sink by sink."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from outbox_relay.domain.errors import NotFound
from outbox_relay.domain.routing import matches
from outbox_relay.postgres.store import Store


async def why(store: Store, uid: UUID) -> dict[str, Any]:
    """Return the event ``uid`` and its state in each sink, for ``why --json``.

    - ``not-routed``: no pattern of the sink matches its type.
    - ``delivered``: the position of its shard is after it, and it has no row.
    - ``passed-over``: the same, but it was emitted before the sink began with ``start = "now"``.
    - ``in-log``: the position of its shard is before it.
    - ``waiting``, ``held``, ``dead``: it has a row in that state.
    - ``scheduled``: its ``deliver_at`` is in the future.
    - ``under-way``: a relay has claimed its row.

    The other fields are described in docs/commands.md. No payload and no header value is read.

    Raises ``NotFound`` if the event is neither in the log nor in ``delivery``, ``DatabaseUnusable`` or
    ``DatabaseUnavailable``.
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
    """Return the state of an event after the position of its shard."""
    scheduled = row.deliver_in is not None and row.deliver_in > 0
    return {
        "state": "scheduled" if scheduled else "in-log",
        **({"due_in_seconds": _seconds(row.deliver_in)} if scheduled else {}),
        "owner": row.owner,
        "lease_seconds": None if row.owner is None else _seconds(row.owned_for),
        **_behind(row),
        **_sink_state(row),
    }


def _parked(row: Any) -> dict[str, Any]:
    """Return the state of an event with a row."""
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
            **_sink_state(row),
        }
    if row.state == "held":
        return {"state": "held", **_behind(row), **tried, **_sink_state(row)}
    scheduled = row.deliver_in is not None and row.deliver_in > 0
    return {
        "state": "scheduled" if scheduled else "waiting",
        "due_in_seconds": _seconds(row.due_in),
        **({} if scheduled else _behind(row)),
        **tried,
        **_sink_state(row),
    }


def _attempt(row: Any) -> dict[str, Any] | None:
    """Return the stored details of the last attempt, or None."""
    return row.last_attempt and {**row.last_attempt, "seconds_ago": _seconds(row.tried_seconds)}


def _behind(row: Any) -> dict[str, Any]:
    """Return uid and state of the first row of its key, if that precedes it."""
    return {"behind": row.behind_uid, "behind_state": row.behind_state}


def _sink_state(row: Any) -> dict[str, Any]:
    """Return the fields of the sink that stop all its deliveries."""
    return {"paused": bool(row.paused), "circuit": row.circuit, "sink_error": row.sink_error}


def _seconds(value: Any) -> float:
    return round(max(0.0, value), 3)
