"""The record of what operators and relays changed."""

from __future__ import annotations

from typing import Any

from outbox_relay.postgres.store import Store


async def audit(store: Store, since: str | None, most: int) -> list[dict[str, Any]]:
    """Return up to ``most`` actions since a time or an age, newest first, for ``audit --json``.

    ``since`` is as ``outbox.past_time`` in the schema reads it; None means all.

    Raises ``ConfigurationError``, ``DatabaseUnusable`` or ``DatabaseUnavailable``.
    """
    rows = await store.call("audit", {"since": since, "most": most}, "read")
    names = ("id", "action", "sink", "filter", "count", "reason", "actor", "login")
    return [
        {"at": row.at.isoformat(), "role": row.role_name} | {name: getattr(row, name) for name in names} for row in rows
    ]
