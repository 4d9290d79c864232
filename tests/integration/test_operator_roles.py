"""Roles of people: those who look, who act, and who see payloads."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from psycopg import errors

from outbox_relay import outbox
from outbox_relay.postgres.migrations import migrate
from tests.support.command import Ended, inside
from tests.support.database import Database, query
from tests.support.roles import denied, new_role

HIDDEN = {"event": {"payload", "headers"}, "delivery": {"payload", "headers", "last_attempt"}, "attempt": {"detail"}}
ANSWER = '{"code": "http_500", "answer": "SECRET-A"}'
"""Details of an attempt whose destination repeated the payload."""
LOOKS: list[tuple[str, ...]] = [
    ("status",),
    ("status", "--json"),
    ("why", "UID"),
    ("dead", "list"),
    ("dead", "list", "--state", "waiting", "--json"),
    ("dead", "summary"),
    ("dead", "show", "UID"),
    ("dead", "retry", "--dry-run"),
    ("dead", "discard", "--dry-run", "--reason", "x"),
    ("audit",),
    ("attempts", "UID"),
    ("running",),
    ("sinks", "list"),
    ("retention", "status"),
    ("replay", "list"),
    ("schedules", "list"),
]
ANSWERS = [("why", "UID"), ("dead", "show", "UID"), ("attempts", "UID")]
"""The commands that show the answer of a destination."""
ACTS: list[tuple[str, ...]] = [
    ("dead", "retry", "UID"),
    ("dead", "discard", "UID", "--reason", "x"),
    ("pause", "crm"),
    ("resume", "crm"),
    ("sinks", "probe", "crm"),
]
PAYLOADS: list[tuple[str, ...]] = [("dead", "show", "UID", "--payload"), ("dead", "export")]


@dataclass(frozen=True)
class Place:
    """A database with a dead letter, a sink that claims events and one that claims rows, and a role for each grant."""

    database: Database
    uid: str
    roles: dict[str, str]

    def run(self, kind: str, *command: str) -> Ended:
        """Run a command with the role of this kind."""
        words = [self.uid if word == "UID" else word for word in command]
        return inside(*words, "--dsn", self.database.dsn_as(self.roles[kind]))


@pytest.fixture
def place(database: Database) -> Iterator[Place]:
    """Yield a place of the test's own."""
    with made(database) as found:
        yield found


@pytest.fixture(scope="module")
def shared_place(shared_database: Database) -> Iterator[Place]:
    """Yield the place of tests that leave it as it is."""
    with made(shared_database) as found:
        yield found


@contextmanager
def made(database: Database) -> Generator[Place]:
    """Create the dead letter and the roles."""
    with new_role(database, "read") as read, new_role(database, "act") as act, new_role(database, "pay") as pay:
        migrate(database.dsn, grants={"read": [read], "operate": [act], "payloads": [pay]})
        with database.connect() as conn:
            of_each = {"patterns": ["*"], "start": "beginning"}
            wanted = json.dumps([{"name": "crm", **of_each}, {"name": "jobs", "claim": "rows", **of_each}])
            conn.execute("select * from outbox_internal.register_sinks(%s, 0, '3:3:', 3)", (wanted,))
            uid = outbox.emit(conn, "order.created", {"card": "SECRET-P"}, key="k", headers={"token": "SECRET-H"})
            conn.execute(
                "insert into outbox.delivery (sink, id, shard, state, ordered, due_at, last_error, last_attempt_at, "
                "last_attempt, uid, type, key, payload, content_type, headers, created_at) "
                "select 'crm', id, shard, 'dead', true, now(), 'no', now(), %s::jsonb, uid, "
                "type, key, payload, coalesce(content_type, 'application/json'), headers, created_at from outbox.event",
                (ANSWER,),
            )
            conn.execute(
                "insert into outbox.attempt (uid, sink, id, number, relay, outcome, status, error, detail) "
                "select uid, 'crm', id, 1, 'here', 'refused', 500, 'no', %s::jsonb from outbox.event",
                (ANSWER,),
            )
        yield Place(database, str(uid), {"read": read, "operate": act, "payloads": pay})


@pytest.mark.parametrize("command", LOOKS, ids=" ".join)
@pytest.mark.parametrize("kind", ["read", "operate", "payloads"])
def test_everybody_may_look(shared_place: Place, kind: str, command: tuple[str, ...]) -> None:
    ended = shared_place.run(kind, *command)
    assert (ended.code, ended.err) == (0, "")
    assert ("SECRET-A" in ended.out) == (kind == "payloads" and command in ANSWERS)
    assert "SECRET-P" not in ended.out
    assert "SECRET-H" not in ended.out


@pytest.mark.parametrize("command", ACTS, ids=" ".join)
@pytest.mark.parametrize("kind", ["read", "payloads"])
def test_only_operators_may_act(shared_place: Place, kind: str, command: tuple[str, ...]) -> None:
    ended = shared_place.run(kind, *command)
    assert (ended.code, ended.out) == (2, "")
    assert "run outbox-relay migrate --grant-operate ROLE" in ended.err
    assert len(ended.err.splitlines()) == 1


def test_operators_act(place: Place) -> None:
    assert place.run("operate", "pause", "crm", "--reason", "broken").code == 0
    assert place.run("operate", "resume", "crm").code == 0
    assert place.run("operate", "dead", "retry", "UID").out == "retried 1 delivery\n"
    assert place.run("operate", "sinks", "probe", "crm").code == 0
    [actions] = query(
        place.database, "select array_agg(action order by id), array_agg(distinct role_name) from outbox.audit"
    )
    assert actions == (["pause", "resume", "dead retry"], [place.roles["operate"]])


@pytest.mark.parametrize("command", PAYLOADS, ids=" ".join)
@pytest.mark.parametrize("kind", ["read", "operate"])
def test_payloads_are_hidden(shared_place: Place, kind: str, command: tuple[str, ...]) -> None:
    ended = shared_place.run(kind, *command)
    assert (ended.code, ended.out) == (2, "")
    assert "run outbox-relay migrate --grant-payloads ROLE" in ended.err
    assert "SECRET" not in ended.err


@pytest.mark.parametrize("kind", ["read", "operate"])
@pytest.mark.parametrize(
    "statement",
    [
        "select payload from outbox.delivery",
        "select headers from outbox.event",
        "select d from outbox.delivery d",
        "select last_attempt from outbox.delivery",
        "select detail from outbox.attempt",
        "select * from outbox.attempt",
        "select to_jsonb(d) from outbox.delivery d",
        "select * from outbox.event",
        "select * from outbox_internal.read_rest('{1}', null, '3:3:', '3:3:', 0, 10, 1, 1)",
        "select * from outbox_internal.claim_rows('crm', null, null, 1, 1, 1, false, '{}', false, false)",
        "select hash_key from outbox.secret",
        "select retention from outbox.relay",
        "select r from outbox.relay r",
        "select outbox_internal.keyed_hash('k')",
        "select outbox_internal.record_action('forged', null, null, 1, null, null)",
        "insert into outbox.audit (action) values ('forged')",
        "delete from outbox.audit",
        "update outbox.delivery set state = 'waiting'",
        "delete from outbox.delivery",
        "update outbox.sink set paused = true",
        "update outbox.sink set probes = 1",
        "delete from outbox.discarded",
        "select outbox.emit('t', '1')",
    ],
)
def test_what_people_may_not(shared_place: Place, kind: str, statement: str) -> None:
    denied(shared_place.database, shared_place.roles[kind], statement)


@pytest.mark.parametrize("table", ["event", "delivery", "attempt"])
def test_every_column_is_hidden_or_granted(shared_place: Place, table: str) -> None:
    """A new column fails this test until grants.sql says who may see it."""
    found = query(
        shared_place.database,
        "select attname::text from pg_attribute where attrelid = %s::regclass and attnum > 0 and not attisdropped",
        f"outbox.{table}",
    )
    columns = {name for (name,) in found}
    granted = query(
        shared_place.database,
        "select unnest(columns) from outbox.privilege where kind = 'read' and object_type = 'table' and name = %s",
        table,
    )
    assert {name for (name,) in granted} == columns - HIDDEN[table]
    payloads = query(
        shared_place.database,
        "select unnest(columns) from outbox.privilege where kind = 'payloads' and object_type = 'table' and name = %s",
        table,
    )
    assert {name for (name,) in payloads} == columns


def test_traps_in_the_callers_path_are_not_sprung(place: Place) -> None:
    """Functions of the schema are run with the rights of its owner, whatever the caller's search_path holds."""
    with place.database.connect(user=place.roles["operate"]) as conn:
        conn.execute("create function pg_temp.lower(text) returns text language sql as 'select (1/0)::text'")
        conn.execute("create temporary table delivery (id integer)")
        conn.execute("set search_path = pg_temp, pg_catalog")
        wanted = json.dumps({"error": "NO", "uids": [place.uid, str(uuid4())]})
        assert _count(conn, "outbox.deliveries(%s::jsonb)", wanted) == 1
        assert _count(conn, "outbox.retry_deliveries(%s::jsonb)", wanted) == 1
        with pytest.raises(errors.UndefinedFunction):
            conn.execute("select is_meant(null, null)")


def _count(conn: Any, call: str, wanted: str) -> int:
    return len(conn.execute(f"select * from {call}".encode(), (wanted,)).fetchall())
