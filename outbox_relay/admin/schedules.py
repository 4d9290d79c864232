"""Schedules: list, run, pause, resume, remove."""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

from outbox_relay.admin.actions import unknown
from outbox_relay.admin.values import plain
from outbox_relay.domain.errors import NotFound
from outbox_relay.postgres.store import Store

MOST_LISTED: Final = 10_000
"""Maximum number of schedules in a list."""
STATE_AFTER: Final = {"pause": "paused", "resume": "active", "remove": "removed"}
"""The state of a schedule after each action."""


def schedules(store: Store, after: str = "", most: int = MOST_LISTED) -> list[dict[str, Any]]:
    """Return up to ``most`` schedules by name, from the one after ``after``, for ``schedules list --json``.

    ``next_at`` is None until a relay has found the first time. ``late_seconds`` is above 0 while the next time has come
    and was not emitted, and None while the schedule is paused. ``error`` says why its event was not emitted, and
    ``retry_at`` when it is tried again if the schema refused it.
    """
    found = store.call("schedules", {"after": after, "name": None, "most": most}, "read")
    return [_plain(row) for row in found]


def schedule(store: Store, name: str) -> dict[str, Any]:
    """Return one schedule. Raises ``NotFound``, which names the nearest."""
    found = store.call("schedules", {"after": "", "name": name, "most": 1}, "read")
    if not found:
        raise NotFound(_unknown(store, name))
    return _plain(found[0])


def change(store: Store, name: str, action: str, *, actor: str, reason: str | None = None) -> bool:
    """Pause, resume or remove a schedule; return False if it was paused or active already. Raises ``NotFound``."""
    parameters = {"name": name, "action": action, "actor": actor, "reason": reason}
    return _act(store, "set_schedule", parameters).changed


def run(store: Store, name: str, *, actor: str, reason: str | None = None) -> UUID:
    """Emit the event of a schedule now, and return its uid.

    Raises ``NotFound``, and ``ConfigurationError`` if the schema refuses the event.
    """
    return _act(store, "run_schedule", {"name": name, "actor": actor, "reason": reason}).uid


def relays_with(store: Store, name: str) -> list[str]:
    """Return the names of the live relays that have a schedule in their settings."""
    [row] = store.call("relays_with_schedule", {"name": name}, "operate")
    return row.relays


def _act(store: Store, statement: str, parameters: dict[str, Any]) -> Any:
    try:
        [row] = store.call(statement, parameters, "operate")
    except NotFound:
        raise NotFound(_unknown(store, parameters["name"])) from None
    return row


def _unknown(store: Store, name: str) -> str:
    return unknown("schedule", name, [each["name"] for each in schedules(store)])


def _plain(row: Any) -> dict[str, Any]:
    names = ("next_at", "last_at", "error", "error_at", "retry_at", "generation")
    return {
        **plain(row, "name", "cron", "timezone", "type", "key", "tenant", "missed"),
        "state": "paused" if row.paused else "active",
        "late_seconds": row.late,
        **plain(row, *names),
    }
