"""Actions on sinks as an operator's script runs them."""

from __future__ import annotations

import json
from typing import Any

from psycopg.rows import dict_row

from tests.support.database import Database


def register(database: Database, name: str, *patterns: str, start: str = "beginning") -> int:
    """Return the generation under which a sink is registered; 0 if it is refused."""
    wanted = json.dumps([{"name": name, "patterns": patterns or ["*"], "start": start}])
    [found] = call(database, "select generation from outbox_internal.register_sinks(%s, 0, '3:3:', 3)", wanted)
    return found["generation"]


def call(database: Database, statement: str, *parameters: Any, user: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of a statement in a transaction of its own."""
    if user is None:
        return database.run(statement, parameters, dict_row)
    with database.connect(autocommit=True, user=user) as connection:
        cursor = connection.cursor(row_factory=dict_row)
        cursor.execute(statement.encode(), parameters)
        return cursor.fetchall() if cursor.description else []


def remove(database: Database, sink: str | None, *, forget: bool = False, most: int = 1000) -> dict[str, Any]:
    """Call ``outbox.drop_sink``."""
    [found] = call(database, "select * from outbox.drop_sink(%s, %s, %s, 'tester', null)", sink, forget, most)
    return found


def lapse(database: Database) -> None:
    """Let every lease of a shard end, as if all relays had crashed a while ago: they may still write."""
    call(database, "update outbox.session set lease_until = clock_timestamp() - interval '1 second'")
    call(database, "update outbox.relay set seen_at = seen_at - interval '1 minute'")


def seek(database: Database, sink: str, to: str | None) -> dict[str, Any]:
    """Call ``outbox.seek_sink``."""
    [found] = call(database, "select * from outbox.seek_sink(%s, %s, 'tester', null)", sink, to)
    return found


def audited(database: Database) -> list[tuple[Any, ...]]:
    """Return action, sink, filter, count and actor of every row of the audit about actions on sinks."""
    rows = call(
        database,
        "select action, sink, filter, count, actor from outbox.audit where action like 'sinks %%' order by id",
    )
    return [tuple(row.values()) for row in rows]
