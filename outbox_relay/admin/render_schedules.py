"""Schedules as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outbox_relay.admin.text import duration, replace_unprintable, table

HEADER = ("SCHEDULE", "STATE", "CRON", "TIMEZONE", "TYPE", "MISSED", "LAST", "NEXT")
LATE_SECONDS = 60.0
"""Lateness from which on a line says so."""


def schedules_text(found: Sequence[dict[str, Any]]) -> str:
    """Render a list of schedules as a table, and a line for each one that does not fire."""
    if not found:
        return "there is no schedule: a relay registers those of its file when it starts"
    lines = table([HEADER, *map(_row, found)])
    for each in found:
        if each["error"] is not None:
            failed = "failed" if each["retry_at"] is None else "refused"
            lines.append(f"schedule {each['name']}: {failed} at {each['error_at'][:19]}: {each['error']}")
        elif (each["late_seconds"] or 0.0) > LATE_SECONDS:
            late = duration(each["late_seconds"])
            lines.append(f"schedule {each['name']}: late by {late}: no relay of this version fires it")
    return "\n".join(map(replace_unprintable, lines))


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    last, following = ((each[name] or "-")[:19] for name in ("last_at", "next_at"))
    middle = (each[name] for name in ("name", "state", "cron", "timezone", "type", "missed"))
    return *middle, last, "-" if each["state"] == "paused" else following
