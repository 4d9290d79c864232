"""Schedules: list, run, pause, resume, remove."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any
from uuid import UUID

from outbox_relay.admin.text import iso_time
from outbox_relay.domain.errors import NotFound
from outbox_relay.postgres.store import Store

MOST_LISTED = 10_000
"""Maximum number of schedules in a list."""
STATE_AFTER = {"pause": "paused", "resume": "active", "remove": "removed"}
"""The state of a schedule after each action."""


async def schedules(store: Store) -> list[dict[str, Any]]:
    """Return all schedules by name, for ``schedules list --json``.

    ``next_at`` is None until a relay has found the first time. ``late_seconds`` is above 0 while the next time has come
    and was not emitted, and None while the schedule is paused. ``error`` is the reason for which the schema refused the
    event.
    """
    found = await store.call("schedules", {"most": MOST_LISTED}, "read")
    return [_plain(row) for row in found]


async def change(store: Store, name: str, action: str, *, actor: str, reason: str | None = None) -> bool:
    """Pause, resume or remove a schedule; return False if it was paused or active already. Raises ``NotFound``."""
    parameters = {"name": name, "action": action, "actor": actor, "reason": reason}
    return (await _act(store, "set_schedule", parameters)).changed


async def run(store: Store, name: str, *, actor: str, reason: str | None = None) -> UUID:
    """Emit the event of a schedule now, and return its uid.

    Raises ``NotFound``, and ``ConfigurationError`` if the schema refuses the event.
    """
    return (await _act(store, "run_schedule", {"name": name, "actor": actor, "reason": reason})).uid


async def relays_with(store: Store, name: str) -> list[str]:
    """Return the names of the live relays that have a schedule in their settings."""
    [row] = await store.call("relays_with_schedule", {"name": name}, "operate")
    return row.relays


async def _act(store: Store, statement: str, parameters: dict[str, Any]) -> Any:
    try:
        [row] = await store.call(statement, parameters, "operate")
    except NotFound as error:
        known = [each["name"] for each in await schedules(store)]
        near = get_close_matches(parameters["name"].lower(), known, 1)
        name = f"there is no schedule {parameters['name']!r} in this database"
        raise NotFound(f"{name}; did you mean {near[0]}?" if near else str(error)) from None
    return row


def _plain(row: Any) -> dict[str, Any]:
    return {
        "name": row.name,
        "cron": row.cron,
        "timezone": row.timezone,
        "type": row.type,
        "key": row.key,
        "missed": row.missed,
        "state": "paused" if row.paused else "active",
        "next_at": iso_time(row.next_at),
        "last_at": iso_time(row.last_at),
        "late_seconds": row.late,
        "error": row.error,
        "error_at": iso_time(row.error_at),
        "generation": row.generation,
    }
