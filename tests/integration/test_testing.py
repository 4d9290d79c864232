"""The test kit: what code has emitted, as its own transaction sees it, over every kind of connection."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
from psycopg.pq import TransactionStatus
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from outbox_relay import outbox
from outbox_relay.contrib import asyncpg as of_asyncpg
from outbox_relay.contrib import sqlalchemy as of_sqlalchemy
from outbox_relay.postgres.migrations import migrate
from outbox_relay.testing import EmittedEvent, OutboxEvents
from outbox_relay.testing.reading import FIRST_TIME, LAST_TIME
from tests.support.database import Database, query
from tests.support.drivers import address, url
from tests.support.roles import new_role


def test_the_open_transaction_of_psycopg_is_seen_and_what_is_rolled_back_is_not(database: Database) -> None:
    with database.connect() as conn:
        events = OutboxEvents(conn)
        conn.execute("select 1")
        events.refute_emitted("order.created")
        uid = outbox.emit(conn, "order.created", {"id": 1, "total": 5}, key="order-1", headers={"x": "1"})
        with conn.transaction(force_rollback=True):
            outbox.emit(conn, "order.paid", {"id": 1})
            events.assert_emitted("order.paid")
        events.refute_emitted("order.paid")
        [found] = events.assert_emitted("order.created", key="order-1", payload={"id": 1}, headers={"x": "1"})
        assert found == EmittedEvent(
            uid, "order.created", "order-1", {"id": 1, "total": 5}, "application/json", {"x": "1"}, None
        )
        outbox.emit_many(conn.cursor(), [outbox.Event("order.created", {"id": n}) for n in (2, 3)])
        events.assert_emitted("order.created", times=3)
        assert [each.payload["id"] for each in OutboxEvents(conn.cursor()).emitted()] == [1, 2, 3]
        assert events.emitted("order.paid") == []
        conn.commit()
        with pytest.raises(RuntimeError, match="no transaction is open"):
            events.refute_emitted("order.created")
        conn.execute("select 1")
        events.refute_emitted("order.created")


def test_a_failure_shows_what_was_emitted_and_how_it_differs(database: Database) -> None:
    with database.connect() as conn:
        outbox.emit(conn, "order.created", {"id": 1, "total": 5}, key="order-1")
        events = OutboxEvents(conn)
        with pytest.raises(AssertionError) as caught:
            events.assert_emitted("order.created", payload={"total": 7})
        assert str(caught.value) == (
            "wanted 1 event of type 'order.created' that match, found 0; emitted:\n"
            "  order.created  key 'order-1'  payload {'id': 1, 'total': 5}\n"
            "    payload.total: wanted 7, found 5"
        )
        with pytest.raises(AssertionError, match="wanted 2 events"):
            events.assert_emitted("order.created", times=2)
        with pytest.raises(AssertionError, match="wanted no event"):
            events.refute_emitted("order.created", key="order-1")


def test_a_consumer_runs_on_what_was_emitted(database: Database) -> None:
    with database.connect() as conn:
        outbox.emit_many(conn, [outbox.Event("a", 1), outbox.Event("b", 2), outbox.Event("a", 3)])
        seen: list[Any] = []
        assert OutboxEvents(conn).deliver(lambda event: seen.append(event.payload), "a") == 2
        assert seen == [1, 3]


async def test_a_consumer_that_would_not_run_is_refused(database: Database) -> None:
    wrong: Any

    async def handle(event: EmittedEvent) -> None:
        raise AssertionError(event)

    with database.connect() as conn:
        outbox.emit(conn, "a", 1)
        with pytest.raises(TypeError, match="deliver calls plain functions, and handle is asynchronous: use adeliver"):
            OutboxEvents(conn).deliver(handle)
    async with await psycopg.AsyncConnection.connect(database.dsn) as asynchronous:
        await outbox.aemit(asynchronous, "a", 1)
        wrong = print
        with pytest.raises(TypeError, match="adeliver awaits its handler, and print is plain"):
            await OutboxEvents(asynchronous).adeliver(wrong)


def test_a_role_that_only_emits_sees_its_own_events_alone(database: Database) -> None:
    """Those of another transaction, or of another role that it takes, are not shown."""
    with new_role(database, "emit") as emits, new_role(database, "emit2") as others:
        migrate(database.dsn, grants={"emit": [emits, others]})
        with database.connect(user=others) as other, database.connect(user=emits) as conn:
            outbox.emit(other, "of.another", {})
            outbox.emit(conn, "own", {"secret": 1})
            OutboxEvents(conn).assert_emitted("own", payload={"secret": 1})
            assert [each.type for each in OutboxEvents(conn).emitted()] == ["own"]
            other.commit()
            with pytest.raises(psycopg.errors.InsufficientPrivilege), conn.transaction():
                conn.execute("select payload from outbox.event")
            with pytest.raises(PermissionError, match="--grant-read ROLE"), OutboxEvents(conn):
                pass
        with database.connect(autocommit=True) as owner:
            owner.execute(f"grant {others} to {emits}".encode())
        with database.connect(user=emits) as conn:
            outbox.emit(conn, "own", {})
            conn.execute(f"set role {others}".encode())
            outbox.emit(conn, "of.the.other", {})
            assert [each.type for each in OutboxEvents(conn).emitted()] == ["of.the.other"]


def test_events_of_a_restored_log_with_the_same_transaction_id_are_not_shown(database: Database) -> None:
    """Transaction ids come again in another cluster. Red without the bound by time."""
    with database.connect() as conn:
        outbox.emit(conn, "restored", {"secret": 1})
        conn.execute("update outbox.event set created_at = created_at - interval '1 hour'")
        outbox.emit(conn, "own", {})
        assert [each.type for each in OutboxEvents(conn).emitted()] == ["own"]


def committed(database: Database) -> list[str]:
    """Return the types of the events that another session sees."""
    return [found for (found,) in query(database, "select type from outbox.event order by id")]


def test_a_block_covers_what_is_committed_inside_it(database: Database) -> None:
    with database.connect() as conn:
        outbox.emit(conn, "before", {})
        conn.commit()
        with OutboxEvents(conn) as events:
            outbox.emit(conn, "first", {})
            conn.commit()
            outbox.emit(conn, "second", {})
        events.assert_emitted("first")
        assert [each.type for each in events.emitted()] == ["first", "second"]
        conn.rollback()
        assert [each.type for each in events.emitted()] == ["first"]


async def test_asking_opens_no_transaction_that_is_in_the_way_of_the_code(database: Database) -> None:
    """Otherwise a block of the code would be a savepoint, whose events the test would see uncommitted."""
    with database.connect() as conn, OutboxEvents(conn) as events:
        with conn.transaction():
            outbox.emit(conn, "psycopg", {})
        assert committed(database) == ["psycopg"]
        events.assert_emitted("psycopg")
        assert conn.info.transaction_status == TransactionStatus.IDLE
    engine = create_engine(url(database, "psycopg"))
    with Session(engine) as session, OutboxEvents(session) as events:
        with session.begin():
            of_sqlalchemy.emit(session, "session", {})
        events.assert_emitted("session")
        assert not session.in_transaction()
    with engine.connect() as connection, OutboxEvents(connection) as events:
        with connection.begin():
            of_sqlalchemy.emit(connection, "connection", {})
        events.assert_emitted("connection")
        assert not connection.in_transaction()
    engine.dispose()
    async with await psycopg.AsyncConnection.connect(database.dsn) as conn, OutboxEvents(conn) as events:
        async with conn.transaction():
            await outbox.aemit(conn, "async", {})
        await events.aassert_emitted("async")
        assert conn.info.transaction_status == TransactionStatus.IDLE
    asynchronous = create_async_engine(url(database, "asyncpg"))
    async with AsyncSession(asynchronous) as session, OutboxEvents(session) as events:
        async with session.begin():
            await of_sqlalchemy.aemit(session, "async.session", {})
        await events.aassert_emitted("async.session")
    await asynchronous.dispose()
    assert committed(database) == ["psycopg", "session", "connection", "async", "async.session"]


async def test_a_question_without_an_open_transaction_is_refused_rather_than_answered(database: Database) -> None:
    """Nothing would be seen, so that a refutation would always hold."""
    engine, raw = create_engine(url(database, "psycopg")), await asyncpg.connect(**address(database))
    pool: Any = await asyncpg.create_pool(**address(database), min_size=1, max_size=1)
    with database.connect(autocommit=True) as autocommit, Session(engine) as session, engine.connect() as connection:
        for each in (autocommit, session, connection):
            with pytest.raises(RuntimeError, match="no transaction is open"):
                OutboxEvents(each).refute_emitted("t")
        with pytest.raises(RuntimeError, match="no transaction is open"):
            await OutboxEvents(raw).arefute_emitted("t")
        with pytest.raises(TypeError, match="outbox_events takes"):
            await OutboxEvents(pool).arefute_emitted("t")
        with connection.begin(), Session(connection) as joined:
            OutboxEvents(joined).refute_emitted("t")
    await raw.close()
    await pool.close()
    engine.dispose()


def test_sessions_and_connections_of_sqlalchemy_are_seen(database: Database) -> None:
    engine = create_engine(url(database, "psycopg"))
    scoped = scoped_session(sessionmaker(engine))
    with Session(engine) as session, engine.connect() as connection:
        for each in (session, connection, scoped):
            of_sqlalchemy.emit(each, "t", {"a": 1})
            OutboxEvents(each).assert_emitted("t", payload={"a": 1})
    with Session(engine) as session, OutboxEvents(session) as events:
        of_sqlalchemy.emit(session, "committed", {})
        session.commit()
    events.assert_emitted("committed")
    scoped.remove()
    engine.dispose()


async def test_asynchronous_connections_are_seen(database: Database) -> None:
    async def sees(conn: Any, emit: Any) -> None:
        await emit(conn, "t", {"a": 1}, key="k")
        events = OutboxEvents(conn)
        [found] = await events.aassert_emitted("t", key="k", payload={"a": 1})
        await events.arefute_emitted("u")
        seen: list[Any] = []

        async def consume(event: EmittedEvent) -> None:
            seen.append(event)

        assert await events.adeliver(consume) == 1
        assert seen == [found]
        with pytest.raises(TypeError, match="assert_emitted"):
            events.emitted()

    async with await psycopg.AsyncConnection.connect(database.dsn) as conn:
        await sees(conn, outbox.aemit)
        await conn.rollback()
        async with OutboxEvents(conn.cursor()) as events:
            await outbox.aemit(conn, "committed", {})
            await conn.commit()
        await events.aassert_emitted("committed")
    for driver in ("psycopg", "asyncpg"):
        engine = create_async_engine(url(database, driver))
        async with AsyncSession(engine) as session, engine.connect() as connection:
            await sees(session, of_sqlalchemy.aemit)
            await sees(connection, of_sqlalchemy.aemit)
        await engine.dispose()
    raw: Any = await asyncpg.connect(**address(database))
    async with raw.transaction():
        await sees(raw, of_asyncpg.emit)
    await raw.close()
    with database.connect() as wrong, pytest.raises(TypeError, match="a synchronous connection has emitted"):
        await OutboxEvents(wrong).aemitted()


async def test_a_savepoint_for_each_test_is_no_hindrance(database: Database) -> None:
    """The fixtures of SQLAlchemy's and asyncpg's own documentation, around code that commits."""
    engine = create_engine(url(database, "psycopg"))
    with engine.connect() as connection, connection.begin() as outer:
        session = Session(connection, join_transaction_mode="create_savepoint")
        of_sqlalchemy.emit(session, "committed", {})
        session.commit()
        of_sqlalchemy.emit(session, "undone", {})
        session.rollback()
        assert [each.type for each in OutboxEvents(session).emitted()] == ["committed"]
        assert [each.type for each in OutboxEvents(connection).emitted()] == ["committed"]
        outer.rollback()
    engine.dispose()
    for driver in ("psycopg", "asyncpg"):
        asynchronous = create_async_engine(url(database, driver))
        async with asynchronous.connect() as connection, connection.begin() as outer:
            async with AsyncSession(connection, join_transaction_mode="create_savepoint") as session:
                await of_sqlalchemy.aemit(session, "committed", {})
                await session.commit()
                await OutboxEvents(session).aassert_emitted("committed")
            await outer.rollback()
        await asynchronous.dispose()
    raw: Any = await asyncpg.connect(**address(database))
    outer = raw.transaction()
    await outer.start()
    async with raw.transaction():
        await of_asyncpg.emit(raw, "committed", {})
    await OutboxEvents(raw).aassert_emitted("committed")
    await outer.rollback()
    await raw.close()
    assert committed(database) == []


SUITE = """
import psycopg, pytest
from outbox_relay import outbox

@pytest.fixture
def conn():
    with psycopg.connect({dsn!r}) as found, found.transaction(force_rollback=True):
        yield found

@pytest.mark.parametrize("number", [1, 2])
def test_an_order_is_announced(conn, outbox_events, number):
    with conn.transaction():
        outbox.emit(conn, "order.created", {{"id": number}}, key="order-1")
    outbox_events(conn).assert_emitted("order.created", payload={{"id": number}})
"""


def test_pytest_finds_the_fixture_by_itself(database: Database, tmp_path: Path) -> None:
    """With a savepoint for each test in a transaction that is rolled back, as suites of applications have it."""
    (tmp_path / "test_shop.py").write_text(SUITE.format(dsn=database.dsn))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("style", ["SQL, DMY", "German", "Postgres"])
def test_times_are_read_whatever_the_session_shows(database: Database, style: str) -> None:
    offset = timezone(timedelta(hours=23, minutes=59, seconds=7, microseconds=5))
    times = [datetime(2030, 1, 2, 3, 4, 5, 678901, tzinfo=offset), datetime(9998, 12, 30, tzinfo=UTC)]
    with database.connect() as conn:
        conn.execute(f"set datestyle to {style}; set timezone to 'Pacific/Kiritimati'".encode())
        outbox.emit_many(conn, [outbox.Event("a", 1, deliver_at=at) for at in times])
        assert [event.deliver_at for event in OutboxEvents(conn).emitted()] == times
        for text in ("infinity", "-infinity", "0001-01-01 BC", "0001-01-01 00:00+14"):
            conn.execute("update outbox.scheduled set deliver_at = %s::timestamptz", (text,))
            limit = LAST_TIME if text == "infinity" else FIRST_TIME
            assert {event.deliver_at for event in OutboxEvents(conn).emitted()} == {limit}


def test_deeply_nested_payloads_are_given_as_they_are(database: Database) -> None:
    deep = b"[" * 5000 + b"]" * 5000
    with database.connect() as conn:
        outbox.emit(conn, "a", deep, content_type="application/json")
        [event] = OutboxEvents(conn).emitted()
    assert event.payload == deep


def test_a_connection_without_an_encoding_is_read(database: Database) -> None:
    with database.connect() as conn:
        conn.execute("set client_encoding to sql_ascii")
        uid = outbox.emit(conn, "a", {"n": 1}, key="k", headers={"x": "1"})
        assert OutboxEvents(conn).emitted() == [
            EmittedEvent(uid, "a", "k", {"n": 1}, "application/json", {"x": "1"}, None)
        ]
