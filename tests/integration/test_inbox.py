"""The inbox: a consumer handles each event once, however often it comes and however many handle it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import IsolationLevel, errors
from psycopg.adapt import Loader
from psycopg.rows import dict_row, tuple_row

from outbox_relay import inbox, outbox
from outbox_relay.inbox import InvalidMark, NoTransaction, aonce, once
from tests.support.database import Database, query
from tests.support.lock_waits import begun
from tests.support.wait import until

CONSUMERS = 16
DAY_MS = 86_400_000
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


def uid_at(milliseconds: int) -> UUID:
    """Return a uid of version 7 that was made at a time."""
    return UUID(int=milliseconds << 80 | 7 << 76 | 2 << 62 | uuid4().int & (1 << 62) - 1)


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


def test_each_consumer_handles_an_event(shop: Database, conn: psycopg.Connection[Any]) -> None:
    uid = uuid4()
    names = ["billing", "Billing", "billing/replay-7", "ß" * 127 + "x", " "]
    assert all(handle(conn, uid, name) for name in names)
    assert not any(handle(conn, uid, name) for name in names)
    assert len(effects(shop)) == len(names)


@pytest.mark.fence("a consumer handles an event twice, also at the same time or on different days")
@pytest.mark.parametrize("days", [-3000, -1, 0, 40_000])
def test_a_redelivery_on_another_day_has_no_effect(shop: Database, conn: psycopg.Connection[Any], days: int) -> None:
    """Neither the day in the uid nor that of the first handling matters."""
    uid = uid_at(time.time_ns() // 1_000_000 + days * DAY_MS)
    assert uid.version == 7
    assert handle(conn, uid)
    query(shop, "update outbox.inbox set handled_at = handled_at - interval '36 hours' returning 1")
    assert not handle(conn, uid)
    assert effects(shop) == [(uid, "billing")]


@pytest.mark.parametrize("uid", [UUID(int=0), UUID(int=(1 << 128) - 1), uuid4()], ids=["nil", "max", "version 4"])
def test_uids_of_every_version_are_marked(conn: psycopg.Connection[Any], uid: UUID) -> None:
    assert once(conn, "billing", str(uid).upper())
    assert not once(conn, "billing", uid)


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


def test_events_and_consumers_do_not_wait_for_each_other(shop: Database, conn: psycopg.Connection[Any]) -> None:
    uid = uuid4()
    assert once(conn, "billing", uid)
    with shop.connect() as other:
        other.execute("set lock_timeout = '5s'")
        assert once(other, "mail", uid)
        assert once(other, "billing", uuid4())


def test_a_higher_isolation_fails_instead_of_handling_twice(shop: Database, conn: psycopg.Connection[Any]) -> None:
    uid = uuid4()
    conn.isolation_level = IsolationLevel.REPEATABLE_READ
    conn.execute("select 1")
    with shop.connect() as other:
        assert handle(other, uid)
    with pytest.raises(errors.SerializationFailure):
        once(conn, "billing", uid)


# -- callers ------------------------------------------------------------------------------------------------------


class Word(Loader):
    """Loads every boolean and number as text, as an application may."""

    def load(self, data: Any) -> str:
        return f"<{bytes(data).decode()}>"


def test_the_callers_settings_make_no_difference(conn: psycopg.Connection[Any]) -> None:
    conn.row_factory = dict_row
    for name in ("bool", "int4", "uuid", "text"):
        conn.adapters.register_loader(name, Word)
    uid = uuid4()
    assert once(conn.cursor(), "billing", uid) is True
    assert once(conn, "billing", uid) is False
    with conn.pipeline():
        conn.execute("select 1")
        assert once(conn, "mail", uid) is True
        assert once(conn, "mail", uid) is False
    for _ in range(7):  # more often than psycopg waits before it prepares
        once(conn, "billing", uuid4())
    conn.row_factory = tuple_row
    assert conn.execute("select name from pg_prepared_statements").fetchall() == []


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


@pytest.mark.parametrize("name", ["", "x" * 256, "ß" * 128])
def test_a_name_beyond_the_limit_is_refused_by_the_database(conn: psycopg.Connection[Any], name: str) -> None:
    said = f"consumer must have 1 to 255 bytes, not {len(name.encode())}"
    with pytest.raises(InvalidMark, match=f"^{said}$"), conn.transaction():
        once(conn, name, uuid4())
    with pytest.raises(errors.InvalidParameterValue, match=rf"outbox\.once: {said}"):
        conn.execute("select outbox.once(%s, gen_random_uuid())", (name,))


@pytest.mark.parametrize(("call", "field"), [("null, gen_random_uuid()", "consumer"), ("'billing', null", "uid")])
def test_sql_callers_may_not_leave_anything_out(conn: psycopg.Connection[Any], call: str, field: str) -> None:
    with pytest.raises(errors.InvalidParameterValue, match=rf"outbox\.once: {field} must not be null"):
        conn.execute(f"select outbox.once({call})".encode())


def test_values_that_cannot_be_sent_are_refused_before_anything_is(conn: psycopg.Connection[Any]) -> None:
    wrong: Any = 7
    for consumer, uid in (("a\0b", uuid4()), (wrong, uuid4()), ("billing", wrong), ("billing", "no uid")):
        with pytest.raises(InvalidMark):
            once(conn, consumer, uid)
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
    conn.execute("set client_encoding = 'LATIN1'")
    with pytest.raises(InvalidMark, match=r"characters that the encoding .* lacks"):
        once(conn, "€", uuid4())
    assert once(conn, "ü", uuid4())


def test_other_failures_are_psycopgs_own(shop: Database, conn: psycopg.Connection[Any]) -> None:
    with shop.connect(autocommit=True) as owner:
        owner.execute("alter schema outbox rename to elsewhere")
    with pytest.raises(errors.InvalidSchemaName):
        once(conn, "billing", uuid4())


async def test_the_wrong_object_is_told_the_right_function(shop: Database, conn: psycopg.Connection[Any]) -> None:
    wrong: Any = conn
    with pytest.raises(TypeError, match=r"aonce takes a psycopg AsyncConnection .* there is once for a Connection"):
        await aonce(wrong, "billing", uuid4())
    async with await shop.aconnect() as wrong:
        with pytest.raises(TypeError, match=r"once takes a psycopg Connection .*; there is aonce for an Async"):
            once(wrong, "billing", uuid4())
    wrong = "postgresql:///shop"
    with pytest.raises(TypeError, match=r"not builtins\.str; .* docs/consumers\.md"):
        once(wrong, "billing", uuid4())


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


def test_a_handler_may_go_back_to_a_savepoint_of_its_own(conn: psycopg.Connection[Any]) -> None:
    @inbox.once_per_event("billing")
    def handler(connection: psycopg.Connection[Any], _: Record) -> str:
        with suppress(errors.UndefinedTable), connection.transaction():
            connection.execute("insert into nowhere values (1)")
        return "handled"

    record = Record(uuid4())
    for result in ("handled", None):
        with conn.transaction():
            assert handler(conn, record) == result


async def test_an_asynchronous_handler_that_swallows_the_error_of_a_statement_fails(shop: Database) -> None:
    @inbox.aonce_per_event("billing")
    async def handler(conn: psycopg.AsyncConnection[Any], _: Record) -> None:
        with suppress(errors.UndefinedTable):
            await conn.execute("insert into nowhere values (1)")

    async with await shop.aconnect() as conn:
        with pytest.raises(errors.InFailedSqlTransaction):
            async with conn.transaction():
                await handler(conn, Record(uuid4()))


async def test_an_asynchronous_handler_is_called_once_for_an_event(shop: Database) -> None:
    @inbox.aonce_per_event("billing")
    async def handler(conn: psycopg.AsyncConnection[Any], message: Record) -> str:
        await conn.execute("insert into effects values (%s, 'handler')", (inbox.uid_of(message.headers()),))
        return "done"

    uid = uuid4()
    async with await shop.aconnect() as conn:
        assert [await handler(conn, Record(uid)) for _ in range(2)] == ["done", None]
    assert effects(shop) == [(uid, "handler")]


def test_an_event_that_was_emitted_is_known_by_its_uid(shop: Database, conn: psycopg.Connection[Any]) -> None:
    with shop.connect() as app:
        uid = outbox.emit(app, "order.paid", {})
    assert handle(conn, uid)
    assert query(shop, "select e.uid from outbox.event e join outbox.inbox i using (uid)") == [(uid,)]


def test_a_handler_that_rolls_back_and_returns_has_not_handled_its_event(conn: psycopg.Connection[Any]) -> None:
    @inbox.once_per_event("billing")
    def handler(connection: psycopg.Connection[Any], _: Record) -> str:
        connection.rollback()
        connection.execute("select 1")
        return "handled"

    with pytest.raises(errors.InFailedSqlTransaction, match="the handler returned"):
        handler(conn, Record(uuid4()))


def test_a_handler_that_swallows_the_end_of_its_connection_has_not_handled_its_event(
    shop: Database, conn: psycopg.Connection[Any]
) -> None:
    @inbox.once_per_event("billing")
    def handler(connection: psycopg.Connection[Any], _: Record) -> str:
        query(shop, "select pg_terminate_backend(%s)", connection.info.backend_pid)
        with suppress(psycopg.OperationalError):
            connection.execute("select 1")
        return "handled"

    with pytest.raises(psycopg.OperationalError), conn.transaction():
        handler(conn, Record(uuid4()))
