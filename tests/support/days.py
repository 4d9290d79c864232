"""A log with partitions of past days, and events in them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg import sql

from tests.support.command import Ended, inside
from tests.support.database import Database

Connection = psycopg.Connection[Any]
DEAD = """
insert into outbox.delivery
    (sink, id, shard, state, ordered, due_at, uid, type, payload, content_type, created_at, since)
select %s, e.id, e.shard, 'dead', true, now(), e.uid, e.type, e.payload, 'application/json', e.created_at,
       now() - %s * interval '1 day'
  from outbox.event e where e.id = %s"""


def date_ago(days: int) -> str:
    """Return the date (UTC) this number of days ago."""
    return (datetime.now(UTC) - timedelta(days=days)).date().isoformat()


def table_ago(days: int) -> str:
    """Return the name of the partition of that day."""
    return f"event_{date_ago(days).replace('-', '')}"


def make_day(connection: Connection, days: int, span: int = 1) -> None:
    """Make the partition that begins this number of days ago."""
    connection.execute(
        sql.SQL("create table outbox.{} partition of outbox.event for values from ({}) to ({})").format(
            sql.Identifier(table_ago(days)), f"{date_ago(days)} 00:00+00", f"{date_ago(days - span)} 00:00+00"
        )
    )


def emit_ago(connection: Connection, days: int, count: int = 1, payload: bytes = b"{}") -> list[int]:
    """Insert events of noon this number of days ago (of now, for 0) in a transaction of their own; return their ids."""
    moment = "now()" if days == 0 else f"'{date_ago(days)} 12:00+00'::timestamptz"
    rows = connection.execute(
        f"insert into outbox.event (shard, type, key, payload, created_at, emitter) "
        f"select outbox_internal.shard_of('k' || n, null), 'order.created', 'k' || n, %s, {moment}, "
        f"session_user::regrole "
        f"from generate_series(1, %s) n returning id".encode(),
        (payload, count),
    ).fetchall()
    return [row_id for (row_id,) in rows]


def fill_days(connection: Connection, first: int, last: int, count: int = 3) -> None:
    """Make the days from `first` to `last` days ago, each with events."""
    for days in range(first, last - 1, -1):
        make_day(connection, days)
        emit_ago(connection, days, count)


def register(connection: Connection, name: str, start: str) -> None:
    """Make a sink known that takes every event, from the beginning on or from now."""
    wanted = json.dumps([{"name": name, "patterns": ["*"], "start": start}])
    tick = connection.execute("select seq, snapshot::text, next_xid from outbox_internal.tick()").fetchone()
    assert tick is not None
    connection.execute("select * from outbox_internal.register_sinks(%s, %s, %s::pg_snapshot, %s)", (wanted, *tick))


def keep(connection: Connection, days: int, **others: Any) -> None:
    """Set the policy that is in force."""
    values = {"keep_days": days, "stated": True, **others}
    for name, value in values.items():
        connection.execute(sql.SQL("update outbox.retention set {} = {}").format(sql.Identifier(name), value))


def retention(database: Database, *arguments: str, user: str | None = None) -> Ended:
    """Run `outbox-relay retention`."""
    dsn = database.dsn if user is None else database.dsn_as(user)
    return inside("retention", *arguments, "--dsn", dsn)


def events_of(connection: Connection, table: str) -> int:
    """Return the number of events in a partition."""
    found = connection.execute(sql.SQL("select count(*) from outbox.{}").format(sql.Identifier(table))).fetchone()
    assert found is not None
    return found[0]


def one(connection: Connection, statement: str, *parameters: Any) -> Any:
    """Return the only value of a statement."""
    [(value,)] = connection.execute(statement.encode(), parameters or None).fetchall()
    return value


def begin(connection: Connection, who: UUID | None = None) -> int | None:
    """Claim the lease of the retention."""
    return one(connection, "select lease from outbox_internal.begin_retention(%s, 'test', 60)", who or uuid4())


def relay_says(connection: Connection, said: dict[str, Any] | None, seen: str = "0 s") -> None:
    """Record the table [retention] of one more live relay."""
    connection.execute(
        "insert into outbox.relay (id, name, version, sinks, seen_at, retention)"
        " values (gen_random_uuid(), 'r', '1', '{}', now() - %s::interval, %s)",
        (seen, None if said is None else json.dumps(said)),
    )


def said(days: int, *, archive: bool = False) -> dict[str, Any]:
    """Return the table [retention] of a file."""
    names = ("keep_days", "keep_uids_days", "keep_dead_days", "keep_attempts_days")
    return {**dict.fromkeys(names, days), "archive": archive}
