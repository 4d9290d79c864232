"""The test kit: what code has emitted, as its own transaction sees it, over every kind of connection."""

from __future__ import annotations

import subprocess
import sys
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
from outbox_relay.testing import EmittedEvent, OutboxEvents
from tests.support.database import Database, query
from tests.support.drivers import address, url


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
