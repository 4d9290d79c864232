"""Recorded attempts of an event, and deliveries that are running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from outbox_relay.domain.errors import NotFound
from outbox_relay.postgres.store import Store

MOST_PER_SINK = 50
"""Number of recorded attempts that ``why`` shows for each sink."""


def unknown_event(uid: UUID) -> NotFound:
    """Return the error for an event that neither the log nor ``delivery`` has."""
    return NotFound(
        f"no event {uid} is known: its transaction is not committed yet or was rolled back, or it was delivered "
        "and is past retention"
    )


async def attempts(store: Store, uid: UUID) -> dict[str, Any]:
    """Return every recorded attempt of the event ``uid``, oldest first, for ``attempts --json``.

    The fields are described in docs/commands.md. No payload and no header value is stored with an attempt.

    Raises ``NotFound`` if neither the log, ``delivery`` nor a record has the event, ``DatabaseUnusable`` or
    ``DatabaseUnavailable``.
    """
    found = await store.named("attempts", {"uid": uid})
    if not found and not (await store.named("is_known", {"uid": uid}))[0].known:
        raise unknown_event(uid)
    return {"uid": str(uid), "attempts": [_attempt(row) for row in found]}


async def recorded_attempts(store: Store, uid: UUID) -> Mapping[str, list[dict[str, Any]]]:
    """Return every recorded attempt of the event ``uid`` by sink, oldest first."""
    return _by_sink(await store.named("attempts", {"uid": uid}))


async def newest_attempts(store: Store, uid: UUID) -> Mapping[str, list[dict[str, Any]]]:
    """Return the newest ``MOST_PER_SINK`` recorded attempts of the event ``uid`` by sink, oldest first."""
    return _by_sink(await store.named("newest_attempts", {"uid": uid, "most": MOST_PER_SINK}))


def _by_sink(rows: Sequence[Any]) -> Mapping[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        attempt = _attempt(row)
        found.setdefault(attempt.pop("sink"), []).append(attempt)
    return found


def _attempt(row: Any) -> dict[str, Any]:
    return {**row._asdict(), "at": row.at.isoformat()}


async def running(store: Store, longer_than: float) -> dict[str, Any]:
    """Return the leased rows whose delivery began at least ``longer_than`` seconds ago, for ``running --json``.

    The fields are described in docs/commands.md. A delivery becomes a row when it has lasted ``park_after_seconds``.
    Rows whose beginning is not known are always included.

    Raises ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    return {"running": [_delivery(row) for row in await store.named("running", {"longer_than": longer_than})]}


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
