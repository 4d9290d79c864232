"""Schedules in a database, registered as relays register them, and the times that were emitted."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.support.database import Database, query

SCHEDULED_FOR = "outbox-scheduled-for"


def schedule(name: str = "nightly", **values: Any) -> dict[str, Any]:
    """Return a schedule as relays register it."""
    defaults = {"cron": "* * * * *", "timezone": "UTC", "type": "report.due", "payload": {"n": 1}, "headers": None}
    return {"name": name, **defaults, "key": None, "missed": "one", **values}


def register(database: Database, *wanted: dict[str, Any]) -> dict[str, int]:
    """Register schedules, and return their generations."""
    text = "select name, generation from outbox.register_schedules(%s)"
    return dict(query(database, text, json.dumps(wanted)))


def put(database: Database, name: str, next_at: datetime) -> None:
    """Let the next time of a schedule be this one."""
    text = "update outbox.schedule set after_at = %s, next_at = %s where name = %s returning 1"
    assert query(database, text, next_at - timedelta(seconds=1), next_at, name)


def fire(database: Database, name: str, seen: datetime, following: datetime, generation: int, *times: datetime) -> str:
    """Fire a schedule, and return the outcome."""
    text = "select outbox.fire_schedule(%s, %s, %s, %s, %s::timestamptz[])"
    [(outcome,)] = query(database, text, name, seen, following, generation, list(times) or None)
    return outcome


def row(database: Database, name: str = "nightly") -> dict[str, Any]:
    """Return a schedule as the database has it."""
    [(found,)] = query(database, "select to_jsonb(s) from outbox.schedule s where name = %s", name)
    return found


def emitted(database: Database) -> list[str]:
    """Return the times of the events in the log, in the order of the log."""
    return [time for (time,) in query(database, f"select headers ->> '{SCHEDULED_FOR}' from outbox.event order by id")]


def minute_of(database: Database) -> datetime:
    """Return the time of the database, without seconds."""
    [(now,)] = query(database, "select clock_timestamp()")
    return now.astimezone(UTC).replace(second=0, microsecond=0)


def text_of(time: datetime) -> str:
    """Return a time as the header has it."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
