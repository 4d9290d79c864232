"""The emitter of an event: the role of the session, which cannot be forged and owns the uids that it chose."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from uuid import UUID, uuid4

import pytest
from psycopg import errors

from outbox_relay import outbox
from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database
from tests.support.roles import new_role
from tests.support.wait import until

ISOLATION = ["read committed", "repeatable read", "serializable"]


@pytest.fixture
def roles(database: Database) -> Iterator[tuple[str, str]]:
    """Yield two applications."""
    with new_role(database, "app") as one, new_role(database, "app") as other:
        migrate(database.dsn, grant_emit=[one, other])
        yield one, other


def emitters(database: Database) -> list[str | None]:
    """Return the roles that emitted the events of the log."""
    with database.connect() as conn:
        return [
            emitter
            for (emitter,) in conn.execute("select pg_get_userbyid(emitter)::text from outbox.event order by id")
        ]


def types(database: Database) -> list[str]:
    """Return the events of the log."""
    with database.connect() as conn:
        return [type_ for (type_,) in conn.execute("select type from outbox.event order by id")]


def test_an_event_records_the_role_of_the_session(database: Database, roles: tuple[str, str]) -> None:
    one, other = roles
    with database.connect(autocommit=True) as admin:
        admin.execute(f"grant {other} to {one}".encode())
        admin.execute(f"create schema definers authorization {other}".encode())
        admin.execute(f"grant usage on schema definers to {one}".encode())
    with database.connect(user=other) as conn:
        conn.execute(
            "create function definers.emit() returns uuid language sql security definer return outbox.emit('t', '1')"
        )
    with database.connect(user=one, autocommit=True) as conn:
        conn.execute("select outbox.emit('t', '1')")
        conn.execute("select outbox.emit_raw('t', '1')")
        conn.execute("select definers.emit()")
        conn.execute(f"set role {other}".encode())
        conn.execute("select outbox.emit('t', '1')")
        conn.execute("set role none")
        conn.execute("select outbox.emit('t', '1')")
    assert emitters(database) == [one, one, one, other, one]


@pytest.mark.parametrize(
    "statement",
    [
        "set role {}",
        "set local role {}",
        "select set_config('role', '{}', true)",
        "set session authorization {}",
        "select set_config('session_authorization', '{}', false)",
        "create function pg_temp.forged() returns uuid language sql set role = {} return outbox.emit('t', '1')",
    ],
)
def test_a_role_that_is_not_ones_own_cannot_be_taken(
    database: Database, roles: tuple[str, str], statement: str
) -> None:
    one, other = roles
    with (
        database.connect(user=one) as conn,
        pytest.raises((errors.InsufficientPrivilege, errors.InvalidParameterValue)),
    ):
        conn.execute(statement.format(other).encode())


@pytest.mark.parametrize("isolation", ISOLATION)
def test_a_uid_belongs_to_the_role_that_used_it_first(
    database: Database, roles: tuple[str, str], isolation: str
) -> None:
    one, other = roles
    uid = uuid4()
    for role in roles:
        with database.connect(autocommit=True) as admin:
            admin.execute(f"alter role {role} set default_transaction_isolation = '{isolation}'".encode())
    with database.connect(user=one) as conn:
        assert outbox.emit(conn, "a", 1, uid=uid) == uid
    with database.connect(user=other) as conn:
        batch = [outbox.Event("b", 1), outbox.Event("b", "SECRET", uid=uid)]
        with pytest.raises(outbox.InvalidEvent) as caught:
            outbox.emit_many(conn, batch)
        assert caught.value.index == 1
        conn.rollback()
        with pytest.raises(outbox.InvalidEvent) as caught:
            outbox.emit(conn, "b", "SECRET", uid=uid)
    assert str(caught.value) == (
        f'uid {uid} was emitted by role "{one}", and this is role "{other}": '
        "a uid belongs to the role that used it first"
    )
    with database.connect(user=one) as conn:
        assert outbox.emit(conn, "a", 1, uid=uid) == uid
    assert types(database) == ["a"]


@pytest.mark.parametrize("isolation", ISOLATION)
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_an_open_uid_blocks_another_role_until_its_transaction_ends(
    database: Database, roles: tuple[str, str], end: str, isolation: str
) -> None:
    one, other = roles
    uid = uuid4()
    found: list[UUID | str | None] = []
    with (
        database.connect(user=one) as first,
        database.connect(user=other) as second,
        database.connect(autocommit=True) as watcher,
    ):
        second.execute(f"set session characteristics as transaction isolation level {isolation}".encode())
        second.commit()
        outbox.emit(first, "first", 1, uid=uid)

        def emit() -> None:
            try:
                found.append(outbox.emit(second, "second", 1, uid=uid))
                second.commit()
            except outbox.InvalidEvent as error:
                found.append(str(error).partition(",")[0])
            except errors.SerializationFailure as error:
                found.append(error.sqlstate)

        thread = threading.Thread(target=emit)
        thread.start()
        waiting = "select 1 from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
        pid = second.info.backend_pid
        until(lambda: watcher.execute(waiting, [pid]).fetchone(), seconds=20, what="the second emit waits for a lock")
        getattr(first, end)()
        thread.join(timeout=20)
    refusal = f'uid {uid} was emitted by role "{one}"' if isolation == "read committed" else "40001"
    assert found == ([uid] if end == "rollback" else [refusal])
    assert types(database) == (["second"] if end == "rollback" else ["first"])
