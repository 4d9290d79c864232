"""The inbox: a consumer handles each event once, however often it comes and however many handle it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import errors

from outbox_relay import inbox
from outbox_relay.inbox import InvalidMark, NoTransaction, aonce, once
from tests.support.database import Database, query
from tests.support.lock_waits import begun
from tests.support.wait import until

CONSUMERS = 16
WAITING = """select count(*) from pg_stat_activity
              where datname = current_database() and wait_event_type = 'Lock'"""
MARKS = "select consumer, uid from outbox.inbox order by consumer, uid"


@pytest.fixture
def shop(database: Database) -> Database:
    """Return a database with the table that handlers change."""
    with database.connect(autocommit=True) as owner:
        owner.execute("create table effects (uid uuid, by text)")
    return database


@pytest.fixture
def conn(shop: Database) -> Iterator[psycopg.Connection[Any]]:
    """Yield a consumer's connection."""
    with shop.connect() as connection:
        yield connection


def handle(connection: psycopg.Connection[Any], uid: UUID, consumer: str = "billing") -> bool:
    """Handle an event in a transaction, as a consumer does; return True if it had its effect."""
    with connection.transaction():
        first = once(connection, consumer, uid)
        if first:
            connection.execute("insert into effects values (%s, %s)", (uid, consumer))
        return first


def effects(database: Database) -> list[tuple[Any, ...]]:
    """Return the effects that are committed."""
    return query(database, "select uid, by from effects order by by")


# -- one effect ---------------------------------------------------------------------------------------------------


def test_the_second_delivery_has_no_effect(shop: Database, conn: psycopg.Connection[Any]) -> None:
    uid, other = uuid4(), uuid4()
    assert [handle(conn, each) for each in (uid, uid, other, uid)] == [True, False, True, False]
    assert sorted(effects(shop)) == sorted([(uid, "billing"), (other, "billing")])


def test_a_rollback_takes_the_mark_with_it(shop: Database, conn: psycopg.Connection[Any]) -> None:
    uid = uuid4()
    assert once(conn, "billing", uid)
    conn.rollback()
    with conn.transaction():
        with conn.transaction(force_rollback=True):
            assert once(conn, "billing", uid)
        assert once(conn, "billing", uid), "the savepoint took its mark with it"
        assert not once(conn, "billing", uid), "this transaction has handled it"
    assert query(shop, MARKS) == [("billing", uid)]


# -- at the same time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_second_consumer_waits_for_the_first(shop: Database, conn: psycopg.Connection[Any], ends: str) -> None:
    uid = uuid4()
    assert once(conn, "billing", uid)
    with begun(shop, lambda other: handle(other, uid)) as second:
        assert not second.done(), "it waits for the first"
        getattr(conn, ends)()
        assert second.result(30) == (ends == "rollback")
    assert effects(shop) == ([(uid, "billing")] if ends == "rollback" else [])


@pytest.mark.fence("a consumer handles an event twice, also at the same time or on different days")
def test_of_many_consumers_at_once_one_has_the_effect(shop: Database, conn: psycopg.Connection[Any]) -> None:
    """All wait for a transaction that has the mark, and race when it is rolled back."""
    uid = uuid4()

    def consume() -> bool:
        with shop.connect() as own:
            return handle(own, uid)

    def waiting() -> bool:
        return query(shop, WAITING) == [(CONSUMERS,)]

    with ThreadPoolExecutor(CONSUMERS) as pool:
        assert once(conn, "billing", uid)
        racing = [pool.submit(consume) for _ in range(CONSUMERS)]
        until(waiting, seconds=60, what="all consumers wait")
        conn.rollback()
        assert sorted(each.result(60) for each in racing) == [False] * (CONSUMERS - 1) + [True]
    assert effects(shop) == [(uid, "billing")]


# -- callers ------------------------------------------------------------------------------------------------------


async def test_asynchronous_connections_mark_too(shop: Database) -> None:
    uid = uuid4()
    async with await shop.aconnect() as conn:
        assert await aonce(conn, "billing", uid)
        await conn.rollback()
        async with conn.transaction():
            assert await aonce(conn.cursor(), "billing", uid)
        assert not await aonce(conn, "billing", str(uid))
        with pytest.raises(InvalidMark, match="1 to 255 bytes"):
            await aonce(conn, "", uid)
    async with await shop.aconnect(autocommit=True) as conn:
        with pytest.raises(NoTransaction, match=r"`async with conn\.transaction\(\):` around both"):
            await aonce(conn, "mail", uid)
        async with conn.transaction():
            assert await aonce(conn, "mail", uid)
    assert query(shop, MARKS) == [("billing", uid), ("mail", uid)]


def test_autocommit_without_a_transaction_is_refused(shop: Database) -> None:
    uid = uuid4()
    with shop.connect(autocommit=True) as conn:
        with pytest.raises(NoTransaction, match=r"`with conn\.transaction\(\):` around both"):
            once(conn, "billing", uid)
        assert query(shop, MARKS) == []
        with conn.transaction():
            assert once(conn, "billing", uid)
        with conn.pipeline(), conn.transaction():
            assert once(conn, "mail", uid)
    assert query(shop, MARKS) == [("billing", uid), ("mail", uid)]


# -- handlers -----------------------------------------------------------------------------------------------------


class Record:
    """A record as confluent_kafka gives it: ``headers`` is a method, which returns None without headers."""

    def __init__(self, uid: UUID | None, replay: int | None = None) -> None:
        self._headers = None if uid is None else [("id", str(uid).encode()), ("type", b"order.paid")]
        if self._headers is not None and replay is not None:
            self._headers.append(("outbox-replay", str(replay).encode()))

    def headers(self) -> list[tuple[str, bytes]] | None:
        """Return the headers."""
        return self._headers


class WebRequest:
    """A request as web frameworks give it: ``headers`` is a mapping."""

    def __init__(self, uid: UUID) -> None:
        self.headers = {"Webhook-Id": str(uid)}


def counted(**options: Any) -> tuple[Callable[..., int | None], list[Any]]:
    """Return a handler that handles each event once, and the list of what it has handled."""
    handled: list[Any] = []

    @inbox.once_per_event("billing", **options)
    def handler(_conn: psycopg.Connection[Any], message: Record | WebRequest) -> int:
        handled.append(message)
        return len(handled)

    assert handler.__name__ == "handler"
    return handler, handled


def test_a_handler_is_called_once_for_an_event(conn: psycopg.Connection[Any]) -> None:
    handler, handled = counted()
    uid = uuid4()
    assert [handler(conn, each) for each in (Record(uid), Record(uid), WebRequest(uid), Record(uuid4()))] == [
        *(1, None, None, 2)
    ]
    assert len(handled) == 2
    with pytest.raises(InvalidMark, match="do not name an event"):
        handler(conn, Record(None))


@pytest.mark.parametrize(("separate", "calls"), [(True, 3), (False, 1)])
def test_a_replay_is_handled_again_unless_told_otherwise(
    shop: Database, conn: psycopg.Connection[Any], separate: bool, calls: int
) -> None:
    handler, handled = counted(separate_replays=separate)
    uid = uuid4()
    for replay in (None, 7, 7, 8, None):
        handler(conn, Record(uid, replay))
    conn.commit()
    assert len(handled) == calls
    names = ["billing", "billing/replay-7", "billing/replay-8"]
    assert query(shop, MARKS) == [(name, uid) for name in names[:calls]]


def test_a_handler_that_fails_is_called_again(conn: psycopg.Connection[Any]) -> None:
    calls: list[Record] = []

    @inbox.once_per_event("billing")
    def handler(_conn: psycopg.Connection[Any], message: Record) -> None:
        calls.append(message)
        if len(calls) == 1:
            raise RuntimeError("the first time fails")

    record = Record(uuid4())
    with pytest.raises(RuntimeError, match="the first time fails"), conn.transaction():
        handler(conn, record)
    for _ in range(2):
        with conn.transaction():
            handler(conn, record)
    assert len(calls) == 2


@pytest.mark.parametrize("marks_again", [False, True])
def test_a_handler_that_swallows_the_error_of_a_statement_is_called_again(
    conn: psycopg.Connection[Any], marks_again: bool
) -> None:
    """Goes red when the commit of such a transaction, which rolls it back, passes for the effect of the event."""

    def mark(connection: psycopg.Connection[Any], consumer: str, uid: UUID) -> bool:
        return once(connection, consumer, uid)

    @inbox.once_per_event("billing", mark=mark if marks_again else once)
    def handler(connection: psycopg.Connection[Any], _: Record) -> str:
        with suppress(errors.UndefinedTable):
            connection.execute("insert into nowhere values (1)")
        return "handled"

    with pytest.raises(errors.InFailedSqlTransaction), conn.transaction():
        handler(conn, Record(uuid4()))
