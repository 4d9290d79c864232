"""Notices of a test: those in the log, and the passage of time for their throttle."""

from __future__ import annotations

import json
from typing import Any

from tests.support.database import Database, query
from tests.support.sink_actions import call, register

RECEIVER = "ops"


def register_receiver(database: Database, *patterns: str) -> None:
    """Register the sink that receives notices, as a relay with ``[notify]`` does."""
    register(database, RECEIVER, *patterns, "outbox.*")


def notices(database: Database) -> list[tuple[str, dict[str, Any]]]:
    """Return type and payload of every notice, the oldest first."""
    text = "select type, convert_from(payload, 'UTF8') from outbox.event where type ^@ 'outbox.' order by id"
    return [(found, json.loads(payload)) for found, payload in query(database, text)]


def notice_types(database: Database) -> list[str]:
    """Return the types of all notices, the oldest first."""
    return [found for found, _ in notices(database)]


def pass_hours(database: Database, hours: float) -> None:
    """Move all notices, and the deaths of all rows, back by hours."""
    call(database, "update outbox.notice set at = at - %s * interval '1 hour'", hours)
    call(database, "update outbox.delivery set since = since - %s * interval '1 hour'", hours)


def die(connection: Any, sink: str, *classes: str, first: int = 1) -> None:
    """Insert dead rows of a sink in one statement, one of each class of errors, with ids from ``first`` on."""
    connection.execute(
        """insert into outbox.delivery
               (sink, id, shard, state, ordered, due_at, last_attempt, last_status, uid, type, key, payload,
                content_type, created_at)
           select %s, %s - 1 + n, 0, 'dead', false, now(), jsonb_build_object('code', class, 'answer', 'CANARY-A'),
                  400, gen_random_uuid(), 'order.made', 'CANARY-K', 'CANARY-P', 'text/plain', now()
             from unnest(%s::text[]) with ordinality c (class, n)""",
        (sink, first, list(classes)),
    )
