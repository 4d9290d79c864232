"""Events of a test, and what a scripted sink has received of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import psycopg

from outbox_relay import outbox
from outbox_relay.domain.event import StoredEvent
from tests.support.database import Database, query
from tests.support.memory_sink import MemorySink
from tests.support.wait import until


def emit(database: Database, keys: Iterable[str | None], **options: Any) -> list[int]:
    """Emit one event per key in one transaction and return their ids."""
    with database.connect() as connection:
        uids = outbox.emit_many(
            connection, [outbox.Event("test.event", {"n": n}, key=key, **options) for n, key in enumerate(keys)]
        )
        rows = connection.execute("select id from outbox.event where uid = any(%s) order by id", (uids,)).fetchall()
    return [row[0] for row in rows]


def ids(sink: MemorySink) -> list[int]:
    """Return the ids of the delivered events in the order of delivery."""
    return [event.id for event in sink.delivered]


def first_deliveries(events: Sequence[StoredEvent]) -> dict[str | None, list[int]]:
    """Return the ids of each key in the order of their first delivery."""
    found: dict[str | None, list[int]] = {}
    for event in events:
        seen = found.setdefault(event.key, [])
        if event.id not in seen:
            seen.append(event.id)
    return found


def in_order(events: Sequence[StoredEvent]) -> bool:
    """Return True if the first deliveries of every key came in the order of ids."""
    return all(seen == sorted(seen) for key, seen in first_deliveries(events).items() if key is not None)


def delivered(sink: MemorySink, wanted: Iterable[int], seconds: float = 20) -> None:
    """Wait until all events in `wanted` have been delivered."""
    missing = set(wanted)

    def fact() -> bool:
        return not missing - set(ids(sink))

    until(fact, seconds=seconds, what=f"{len(missing)} events are delivered")


def has(database: Database, text: str, *parameters: Any, seconds: float = 20) -> list[tuple[Any, ...]]:
    """Wait until a query has rows and return them."""

    def fact() -> list[tuple[Any, ...]]:
        return query(database, text, *parameters)

    return until(fact, seconds=seconds, what=text)


def touched(connection: psycopg.Connection[Any]) -> tuple[int, int]:
    """Return (rows, pages) of ``delivery`` and its indexes that the current transaction has looked at."""
    [(rows_read,)] = connection.execute(
        "select (seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint from pg_stat_xact_user_tables "
        "where schemaname = 'outbox' and relname = 'delivery'"
    ).fetchall()
    [(pages,)] = connection.execute(
        "select sum(pg_stat_get_xact_blocks_fetched(i.indexrelid)) + pg_stat_get_xact_blocks_fetched(i.indrelid) "
        "from pg_index i where i.indrelid = 'outbox.delivery'::regclass group by i.indrelid"
    ).fetchall()
    return rows_read, int(pages)


def add_waiting(
    database: Database, event: int, key: str | None, payload: bytes | None = b"{}", deliver_at: str | None = None
) -> None:
    """Make a waiting row of sink `s` that is due, as a person or an older version may have left it."""
    query(
        database,
        "select name from outbox_internal.register_sinks("
        """'[{"name": "s", "patterns": ["*"], "start": "beginning"}]', 0, '3:3:', 3)""",
    )
    query(
        database,
        "insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, key, payload, content_type, "
        "deliver_at, created_at) values ('s', %s, 0, 'waiting', %s, now(), gen_random_uuid(), 'test', %s, %s, "
        "'text/plain', %s, '20000-01-01') returning 1",
        *(event, key is not None, key, payload, deliver_at),
    )


def dead_letters(database: Database) -> list[tuple[int, str, int]]:
    """Return (id, reason, attempts) of every dead letter."""
    with database.connect(autocommit=True) as connection:
        query = "select id, last_error, attempts from outbox.delivery where state = 'dead' order by id"
        return connection.execute(query).fetchall()
