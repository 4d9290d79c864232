"""Events emitted as an application does, for tests whose relay runs as a process."""

from __future__ import annotations

from tests.support.database import Database


def emit_types(database: Database, *types: str) -> None:
    """Emit an event of each type, in one transaction."""
    with database.connect() as connection:
        for kind in types:
            connection.execute("select outbox.emit(%s, '1', key => %s)", (kind, kind))


def emit_payload(database: Database, payload: str, key: str) -> str:
    """Emit one event and return its uid."""
    with database.connect() as connection:
        [(uid,)] = connection.execute("select outbox.emit('order.made', %s, key => %s)::text", (payload, key))
    return uid
