"""The rights of roles: an application emits and nothing else, a relay relays and is no superuser, PUBLIC has none."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import errors, sql

from outbox_relay import outbox
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Refused, Verdict
from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import running, spec
from tests.support.roles import STATEMENTS, callable_by, denied, functions, new_role
from tests.support.wait import until

LOG = ("event", "event_default")
TABLES = ("discarded", "inbox", "meta", "grantee", "secret", "uid", "sink", "shard", "progress", "relay", "delivery",
          *LOG)  # fmt: skip


@pytest.fixture(scope="module")
def shared_app(shared_database: Database) -> Iterator[str]:
    """Yield an application's role in the shared database."""
    with new_role(shared_database, "app") as name:
        migrate(shared_database.dsn, grant_emit=[name])
        yield name


@pytest.fixture(scope="module")
def shared_relay(shared_database: Database) -> Iterator[str]:
    """Yield a relay's role in the shared database."""
    with new_role(shared_database, "relay") as name:
        migrate(shared_database.dsn, grant_relay=[name])
        yield name


@pytest.fixture
def stranger(database: Database) -> Iterator[str]:
    """Yield a role that nothing was granted to."""
    with new_role(database, "stranger") as name:
        yield name


def callable_only_by(database: Database, kind: str) -> set[str]:
    """Return the names of the functions that this kind of role may call, and a relay's may not."""
    with database.connect() as conn:
        found = conn.execute(
            """select name from outbox.privilege where object_type = 'function' and kind = %s
               except select name from outbox.privilege where object_type = 'function' and kind = 'relay'""",
            [kind],
        )
        return {name for (name,) in found}


# -- an application -----------------------------------------------------------------------------------------------


def test_an_application_emits(database: Database, app: str) -> None:
    with database.connect(user=app) as conn:
        outbox.emit(conn, "a", 1, key="k", uid=uuid4(), headers={"x": "y"})
        outbox.emit_many(conn, [outbox.Event("b", 1), outbox.Event("c", 1)])
        conn.execute("select outbox.emit('d', '1')")
    with database.connect() as conn:
        assert conn.execute("select type from outbox.event order by id").fetchall() == [("a",), ("b",), ("c",), ("d",)]


@pytest.mark.parametrize("table", TABLES)
def test_an_application_can_neither_read_nor_change_anything(
    shared_database: Database, shared_app: str, table: str
) -> None:
    for statement in ("select from {}", "delete from {}", "truncate {}", "insert into {} default values", "lock {}"):
        denied(shared_database, shared_app, statement.format(f"outbox.{table}"))
    with shared_database.connect() as conn:
        found = conn.execute("select has_any_column_privilege(%s, %s, 'select, insert, update, references')",
                             [shared_app, f"outbox.{table}"])  # fmt: skip
        assert found.fetchone() == (False,)


def test_an_application_can_call_its_functions_and_no_other(database: Database, app: str) -> None:
    assert callable_by(database, app) == {
        "cancel",
        "emit",
        "emit_raw",
        "emitted",
        "event_index",
        "lock_unique_keys",
        "reschedule",
    }
    assert len(functions(database)) > 6
    denied(database, app, "select outbox_internal.uuid7()")
    denied(database, app, "select outbox_internal.make_partitions()")
    denied(database, app, "select nextval('outbox.event_id_seq')")
    denied(database, app, "select last_value from outbox.event_id_seq")
    denied(database, app, "create table outbox.mine ()")


def test_a_stranger_and_public_have_nothing(database: Database, app: str, relay: str, stranger: str) -> None:
    assert app != relay
    denied(database, stranger, "select outbox.emit('t', '1')")
    with database.connect() as conn:
        grants = conn.execute(
            """
            select 'schema', nspname::text from pg_namespace, aclexplode(nspacl) a
             where nspname in ('outbox', 'outbox_internal') and a.grantee = 0
            union all
            select 'table', relname::text from pg_class, aclexplode(relacl) a
             where relnamespace = 'outbox'::regnamespace and a.grantee = 0
            union all
            select 'function', p.proname::text
              from pg_proc p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
             where p.pronamespace = any ('{outbox, outbox_internal}'::regnamespace[]) and a.grantee = 0
            """
        )
        assert grants.fetchall() == []


# -- attacks on SECURITY DEFINER ----------------------------------------------------------------------------------

TRAPS = """
create function {0}.sprung() returns boolean language plpgsql as $$
begin
    raise exception 'sprung as %', current_user;
end $$;
create function {0}.length(text) returns integer language sql as 'select {0}.sprung()::integer';
create function {0}.octet_length(bytea) returns integer language sql as 'select {0}.sprung()::integer';
create function {0}.jsonb_typeof(jsonb) returns text language sql as 'select {0}.sprung()::text';
create function {0}.concat(text, text, text) returns text language sql as 'select {0}.sprung()::text';
create function {0}.uuid7() returns uuid language sql as 'select {0}.sprung()::text::uuid';
create function {0}.gen_random_uuid() returns uuid language sql as 'select {0}.sprung()::text::uuid';
create function {0}.set_bit(bytea, integer, integer) returns bytea language sql as 'select {0}.sprung()::text::bytea';
create function {0}.pg_try_advisory_lock_shared(integer, integer) returns boolean language sql as 'select {0}.sprung()';
create function {0}.same(text, text) returns boolean language sql as 'select {0}.sprung()';
create operator {0}.~ (leftarg = text, rightarg = text, function = {0}.same);
create operator {0}.|| (leftarg = text, rightarg = text, function = {0}.same);
create domain {0}.text as pg_catalog.int4;
"""


def lay_traps(conn: psycopg.Connection[Any], schema: str) -> None:
    """Make functions, operators and a type whose use by emit would run code with the rights of the log's owner."""
    for number, statement in enumerate(TRAPS.format(schema).split(";\ncreate ")):
        conn.execute(f"{'create ' if number else ''}{statement}".encode())


def test_nothing_in_the_callers_search_path_runs_with_the_owners_rights(database: Database, app: str) -> None:
    with database.connect() as admin:
        admin.execute(sql.SQL("create schema traps authorization {}").format(sql.Identifier(app)))
    with database.connect(user=app) as conn:
        for schema in ("traps", "pg_temp"):
            lay_traps(conn, schema)
        conn.execute("create temporary table event (type pg_catalog.text)")
        conn.execute("create temporary table uid (uid uuid)")
        conn.execute("set search_path = traps, pg_temp, pg_catalog")
        with pytest.raises(errors.RaiseException, match=f"sprung as {app}"), conn.transaction():
            conn.execute("select length('x'::pg_catalog.text)")
        conn.execute(
            "select outbox.emit('t', '1', key => 'k', headers => '{\"a\": \"b\"}', uid => %s::uuid)", [uuid4()]
        )
        conn.execute("select outbox.emit_raw('t', 'x')")
        with pytest.raises(errors.InvalidParameterValue, match=r"outbox\.emit: type must be"), conn.transaction():
            conn.execute("select outbox.emit('a b', '1', headers => '{\"a\": \"b\"}')")
    with database.connect() as conn:
        assert conn.execute("select count(*) from outbox.event").fetchone() == (2,)


# -- a relay ------------------------------------------------------------------------------------------------------


def verdict(event: StoredEvent, attempt: int) -> Verdict:
    """Fail the events of one key once, refuse those of another, and deliver the others."""
    if event.key == "k1" and attempt == 1:
        return Failed("once")
    return Refused("never") if event.key == "k2" else DELIVERED


def test_a_relay_works_with_its_grants_alone(database: Database, relay: str) -> None:
    """Shards, deliveries, failures, retries and dead letters, all as a role that is no superuser."""
    wanted: set[str] = set()
    with database.connect() as conn:
        assert conn.execute("select rolsuper from pg_roles where rolname = %s", [relay]).fetchone() == (False,)
        for n in range(50):
            uid = outbox.emit(conn, "t", n, key=f"k{n % 5}")
            wanted |= {str(uid)} if n % 5 != 2 else set()
    sink = MemorySink(verdict)

    def settled() -> bool:
        with database.connect() as conn:
            states = conn.execute("select state, count(*) from outbox.delivery group by state").fetchall()
        return {event.uid for event in sink.delivered} == wanted and states == [("dead", 10)]

    with running(database.dsn_as(relay), (spec("s"), sink)) as harness:
        harness.owns_all()
        until(settled, seconds=30, what="40 events are delivered and 10 are dead")


@pytest.mark.parametrize("path", sorted(STATEMENTS.glob("*.sql")), ids=lambda path: path.stem)
def test_a_relay_may_run_every_statement_of_the_store(shared_database: Database, shared_relay: str, path: Path) -> None:
    statement = path.read_text(encoding="utf-8")
    nothing = dict.fromkeys(re.findall(r"%\((\w+)\)s", statement))
    with shared_database.connect(user=shared_relay) as conn:
        if path.stem == "emit":
            with pytest.raises(errors.InsufficientPrivilege, match="emit_raw"):
                conn.execute(statement.encode(), {**nothing, "type": "t", "payload": b"", "content_type": "x/y"})
            return
        if set(re.findall(r"outbox(?:_internal)?\.(\w+)\(", statement)) & callable_only_by(shared_database, "operate"):
            with pytest.raises(errors.InsufficientPrivilege, match="permission denied for function"):
                conn.execute(b"explain " + statement.encode(), nothing)
            return
        conn.execute(b"explain " + statement.encode(), nothing)  # which checks rights and runs nothing


def test_the_functions_of_each_kind(database: Database, app: str, relay: str) -> None:
    """A function that outbox.privilege names is there, and one that it does not name belongs to the owner alone."""
    with database.connect() as conn:
        found = conn.execute("select kind, name from outbox.privilege where object_type = 'function'").fetchall()
        listed = {kind: {name for each, name in found if each == kind} for kind, _ in found}
        [(there, guarded, triggers)] = conn.execute(
            """select array_agg(proname::text),
                      array_agg(proname::text) filter (where prosecdef),
                      array_agg(proname::text) filter (where prorettype = 'trigger'::regtype)
                 from pg_proc where pronamespace = any ('{outbox, outbox_internal}'::regnamespace[])"""
        ).fetchall()
    assert len(there) == len(set(there)), "outbox.privilege lists functions by their names alone"
    assert set().union(*listed.values()) <= set(there)
    assert callable_by(database, app) == listed["emit"]
    assert callable_by(database, relay) == listed["relay"]
    assert not listed["relay"] & set(triggers)
    owners = set(guarded) - set(triggers) - set().union(*listed.values())
    assert owners == set(), "with the owner's rights: list them for a kind in views.sql"
