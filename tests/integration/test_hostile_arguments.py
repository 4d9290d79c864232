"""Every function that a role may call, with arguments that no client of ours passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import psycopg
import pytest

from tests.support.database import Database, query
from tests.support.days import begin, emit_ago, fill_days, keep
from tests.support.sink_actions import register

HOSTILE: dict[str, list[str]] = {
    "bigint": ["null", "0", "-1", "-9223372036854775808", "9223372036854775807"],
    "integer": ["null", "0", "-1", "-2147483648", "2147483647"],
    "double precision": ["null", "-1", "1e300", "'NaN'", "'infinity'", "'-infinity'"],
    "boolean": ["null", "false", "true"],
    "text": ["null", "''", "'infinity'", "'\\'", "'%'", "repeat('x', 5000)"],
    "jsonb": ["null", "'null'", "'[]'", "'{}'", "'\"x\"'", '\'{"since": "infinity"}\'', '\'{"states": ["waiting"]}\''],
    "uuid": ["null", "'00000000-0000-0000-0000-000000000000'"],
    "date": ["null", "'infinity'", "'-infinity'", "'5874897-12-31'", "'4713-01-01 BC'", "current_date - 12"],
    "timestamp with time zone": ["null", "'infinity'", "'-infinity'", "'294276-12-31 UTC'", "'4713-01-01 BC UTC'"],
    "pg_snapshot": ["null", "'3:3:'", "'9223372036854775807:9223372036854775807:'"],
    "xid8": ["null", "'3'", "'18446744073709551615'"],
}
CLEAR = {"22023", "25001", "25000", "40001", "42501", "55000", "55006", "P0001", "P0002", "OR001", "OR002"}
"""SQLSTATEs with which our functions refuse something, in words of their own."""
ALONE = ("outbox_internal.empty_day(", "outbox_internal.drop_day(")
"""Functions that must be a transaction of their own."""
FUNCTIONS = """
select p.oid::regprocedure::text, array(select format_type(t, null) from unnest(p.proargtypes) t)
  from pg_proc p
 where p.pronamespace = any ('{outbox, outbox_internal}'::regnamespace[]) and p.prosecdef
   and exists (select from outbox.privilege l where l.object_type = 'function' and l.name = p.proname)
 order by 1"""
"""The functions with the owner's rights that other roles may call."""


@pytest.fixture
def filled(database: Database) -> Database:
    """Return a log with a day that is due, a sink, a dead row and a lease of the retention."""
    register(database, "crm")
    with database.connect(autocommit=True) as connection:
        fill_days(connection, 12, 12)
        emit_ago(connection, 0, 3)
        keep(connection, 5, keep_uids_days=5, keep_dead_days=5)
        begin(connection)
        connection.execute(
            "insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, content_type, created_at)"
            " select 'crm', id, shard, 'dead', true, 'infinity', uid, type, coalesce(content_type, 'application/json'),"
            " '-infinity' from outbox.event"
        )
    return database


def calls(signature: str, types: list[str], lease: int) -> Iterator[str]:
    """Yield calls with one hostile argument each among usual ones, and one with nulls alone."""
    name = signature.partition("(")[0]
    usual = {
        "text": "'crm'",
        "jsonb": "'{}'",
        "bigint": str(lease),
        "date": "current_date - 12",
        "uuid": "gen_random_uuid()",
    }
    plain = [f"({usual.get(kind, HOSTILE.get(kind, ['null'])[-1])})::{kind}" for kind in types]
    yield f"{name}({', '.join(f'null::{kind}' for kind in types)})"
    for place, kind in enumerate(types):
        for value in HOSTILE.get(kind, ["null"]):
            yield f"{name}({', '.join([*plain[:place], f'({value})::{kind}', *plain[place + 1 :]])})"


def fault_of(connection: psycopg.Connection[Any], call: str) -> str | None:
    """Return what is wrong with the answer to a call, or None; the call is rolled back if it may be."""
    alone = call.startswith(ALONE)
    try:
        with nullcontext() if alone else connection.transaction(force_rollback=True):
            connection.execute(f"select * from {call}".encode(), prepare=False).fetchall()
    except psycopg.Error as error:
        return f"{call}: {error.sqlstate} {error}" if error.sqlstate not in CLEAR else None
    return None


def test_every_function_refuses_hostile_arguments_in_its_own_words_or_bears_them(filled: Database) -> None:
    """No internal error, no syntax error, no endless run, and no value that the client cannot load."""
    [(lease,)] = query(filled, "select lease from outbox.retention")
    functions = query(filled, FUNCTIONS)
    assert len(functions) >= 40
    with filled.connect(autocommit=True) as connection:
        connection.execute("set statement_timeout = '3s'")
        faults = [fault_of(connection, call) for name, types in functions for call in calls(name, types, lease)]
    assert not any(faults), "\n".join(filter(None, faults))
