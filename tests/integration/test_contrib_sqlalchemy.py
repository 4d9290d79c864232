"""Emitting with SQLAlchemy: sessions and connections, synchronous and not, over psycopg and asyncpg."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.ext.asyncio import (
    AsyncSession,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from outbox_relay import outbox
from outbox_relay.contrib import sqlalchemy as contrib
from outbox_relay.contrib.sqlalchemy import Event, InvalidEvent, InvalidMark, NotInTransaction
from outbox_relay.testing import OutboxEvents
from tests.support import engines
from tests.support.database import Database, query
from tests.support.drivers import skip_without_encodings, url
from tests.support.engines import engine_of

DRIVERS = ("psycopg", "asyncpg")
LOGGED = """select type, key, convert_from(payload, 'UTF8'), headers, deliver_at, uid,
       coalesce(content_type, 'application/json')
              from outbox.event order by id"""

pytestmark = pytest.mark.usefixtures("shop")
engine = engines.engine


class Base(DeclarativeBase):
    """The tables of the shop."""


class Order(Base):
    """An order."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    total: Mapped[int]


@pytest.fixture
def shop(database: Database) -> Database:
    """Return a database with the table of orders."""
    with database.connect(autocommit=True) as owner:
        owner.execute("create table orders (id bigint primary key, total bigint not null)")
    return database


def committed(database: Database) -> list[tuple[Any, ...]]:
    """Return the events that are committed, and the number of orders."""
    return [
        *query(database, "select type, key from outbox.event order by id"),
        *query(database, "select count(*) from orders"),
    ]


# -- sessions and connections -------------------------------------------------------------------------------------


def test_an_event_is_committed_and_rolled_back_with_the_session(shop: Database, engine: Engine) -> None:
    with Session(engine) as session:
        session.add(Order(id=1, total=5))
        contrib.emit(session, "order.created", {"id": 1}, key="order-1")
        assert committed(shop) == [(0,)]
        session.rollback()
    assert committed(shop) == [(0,)]
    with Session(engine) as session, session.begin():
        session.add(Order(id=2, total=5))
        contrib.emit(session, "order.created", {"id": 2}, key="order-2")
    assert committed(shop) == [("order.created", "order-2"), (1,)]


def test_unique_keys_and_changes_of_scheduled_events(shop: Database, engine: Engine) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    with Session(engine) as session, session.begin():
        first = contrib.emit(session, "t", {}, tenant="acme", priority=5, unique_key="k", deliver_at=later)
        again = contrib.emit_many(session, [Event("t", {}), Event("t", {}, unique_key="k")])
        assert again[1] == first
        assert contrib.reschedule(session, first, later + timedelta(hours=1)) is True
        assert contrib.cancel(session, first) is True
        assert contrib.cancel(session, again[0]) is False
        with pytest.raises(InvalidEvent, match="at must be in the years 1 to 9998"), session.begin_nested():
            contrib.reschedule(session, first, datetime.max.replace(tzinfo=UTC))
    assert query(shop, "select tenant, priority from outbox.event order by id") == [(None, None)]
    assert query(shop, "select from outbox.scheduled") == []


# -- the event ----------------------------------------------------------------------------------------------------

WHOLE: dict[str, Any] = {
    "key": "schlüssel",
    "headers": {"x-tenant": "ä"},
    "deliver_at": datetime(2020, 1, 2, 3, 4, 5, 678901, UTC),
    "uid": uuid.UUID(int=7),
}
WANTED = ("t", "schlüssel", '{"a":"ö"}', {"x-tenant": "ä"}, WHOLE["deliver_at"], WHOLE["uid"], "application/json")


def logged(database: Database) -> list[tuple[Any, ...]]:
    """Return the events as they are stored."""
    return query(database, LOGGED)


def test_every_argument_is_stored(shop: Database, engine: Engine) -> None:
    with engine.begin() as connection:
        assert contrib.emit(connection, "t", {"a": "ö"}, **WHOLE) == WHOLE["uid"]
        assert contrib.emit(connection, "t", {"a": "ö"}, **WHOLE) == WHOLE["uid"], "a known uid is not emitted again"
        contrib.emit(connection, "raw", b"\xc3\xbc", content_type="text/plain")
        contrib.emit(connection, "own", object(), dumps=lambda _: '"own"')
    assert logged(shop)[0] == WANTED
    assert [(row[0], row[2], row[6]) for row in logged(shop)[1:]] == [
        ("raw", "ü", "text/plain"), ("own", '"own"', "application/json"),
    ]  # fmt: skip


def test_many_events_are_one_statement_in_their_order(shop: Database, engine: Engine) -> None:
    events = [Event(f"t{n}", {"n": n}, key=f"k{n % 3}") for n in range(50)]
    with engine.begin() as connection:
        uids = contrib.emit_many(connection, iter(events))
        assert contrib.emit_many(connection, []) == []
    assert query(shop, "select uid from outbox.event order by id") == [(uid,) for uid in uids]
    assert query(shop, "select count(distinct xid) from outbox.event") == [(1,)]


# -- what is refused ----------------------------------------------------------------------------------------------


def refused(session: Session | Any) -> Generator[tuple[str, int | None]]:
    """Yield message and index of events that are refused, each in a savepoint."""
    for each in (Event("", {}), Event("t", float("nan")), Event("t", {}, key="k" * 2000), Event("a\0b", {})):
        with pytest.raises(InvalidEvent) as caught, session.begin_nested():
            contrib.emit(session, each.type, each.payload, key=each.key)
        yield str(caught.value), caught.value.index
    with pytest.raises(InvalidEvent) as caught, session.begin_nested():
        contrib.emit_many(session, [Event("a", {}), Event("t", {}, key="k" * 2000)])
    yield str(caught.value), caught.value.index


def test_a_refused_event_is_named_as_by_outbox_emit(shop: Database, engine: Engine) -> None:
    with Session(engine) as session:
        found = [*refused(session)]
    with shop.connect() as conn:
        for each, said in zip((Event("", {}), Event("t", {}, key="k" * 2000)), (found[0], found[2]), strict=True):
            with pytest.raises(InvalidEvent) as caught, conn.transaction():
                outbox.emit(conn, each.type, each.payload, key=each.key)
            assert (str(caught.value), caught.value.index) == said
    assert "not JSON compliant" in found[1][0]
    assert [index for _, index in found] == [None, None, None, None, 1]


@pytest.mark.parametrize("driver", ["psycopg2", "pg8000"])
def test_other_drivers_emit_and_name_what_is_refused(shop: Database, driver: str) -> None:
    made = create_engine(url(shop, driver))
    with Session(made) as session:
        found = [*refused(session)]
        contrib.emit_many(session, [Event("many", b"\0\xff", content_type="x/y"), Event("queued", 1, unique_key="k")])
        contrib.emit(session, "one", {"a": "ö"}, key="k")
        OutboxEvents(session).assert_emitted("one", payload={"a": "ö"})
        with pytest.raises(InvalidMark, match="1 to 255 bytes"), session.begin_nested():
            contrib.once(session, "", uuid.uuid4())
        session.commit()
    made.dispose()
    assert [index for _, index in found] == [None, None, None, None, 1]
    assert found[0][0].startswith("type must be 1 to 255 visible ASCII characters")
    assert query(shop, "select type from outbox.event order by id") == [("many",), ("queued",), ("one",)]


@pytest.mark.parametrize("driver", DRIVERS)
async def test_text_that_the_connection_cannot_encode_is_refused_and_not_shown(shop: Database, driver: str) -> None:
    skip_without_encodings()
    latin: dict[str, Any] = {"client_encoding": "LATIN1"}
    options = {"server_settings": latin} if driver == "asyncpg" else latin
    async with engine_of(shop, driver, connect_args=options) as engine, engine.begin() as connection:
        for call in (
            contrib.aemit(connection, "t", {}, key="4711€"),
            contrib.aemit_many(connection, [Event("t", {}, key="4711€")]),
        ):
            with pytest.raises(InvalidEvent, match="have characters that the encoding") as caught:
                await call
            assert "4711" not in str(caught.value)
        with pytest.raises(InvalidMark, match="consumer has characters that the encoding"):
            await contrib.aonce(connection, "4711€", uuid.uuid4())
        await contrib.aemit(connection, "t", {"price": "€"}, key="ü")
    assert query(shop, "select key from outbox.event") == [("ü",)]


@pytest.mark.parametrize("driver", DRIVERS)
async def test_autocommit_is_warned_about_at_the_caller(shop: Database, engine: Engine, driver: str) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        with pytest.warns(NotInTransaction) as warned:
            contrib.emit(connection, "t", {})
        with pytest.warns(NotInTransaction):
            contrib.emit_many(connection, [Event("t", {})])
    async with (
        engine_of(shop, driver, isolation_level="AUTOCOMMIT") as everywhere,
        everywhere.connect() as asynchronous,
    ):
        with pytest.warns(NotInTransaction) as warned_there:
            await contrib.aemit(asynchronous, "t", {})
        with pytest.warns(NotInTransaction):
            await contrib.aemit_many(asynchronous, [Event("t", {})])
    assert [warning.filename for warning in (*warned, *warned_there)] == [__file__] * 2
    with warnings.catch_warnings(), engine.begin() as connection:
        warnings.simplefilter("error")
        contrib.emit(connection, "t", {})


@contextmanager
def names(*functions: str) -> Generator[None]:
    """Expect a TypeError that names the right functions."""
    with pytest.raises(TypeError) as caught:
        yield
    assert all(function in str(caught.value) for function in functions), caught.value


async def test_the_wrong_object_is_told_the_right_function(shop: Database, engine: Engine) -> None:
    wrong: Any
    with shop.connect() as wrong, names("aemit", "Session"):
        contrib.emit(wrong, "t", {})
    with Session(engine) as wrong:
        with names("emit for a Session"):
            await contrib.aemit(wrong, "t", {})
        with names("outbox_relay.contrib.sqlalchemy"):
            outbox.emit(wrong, "t", {})
    async with engine_of(shop, "asyncpg") as other, AsyncSession(other) as wrong:
        with names("aemit for an AsyncSession"):
            contrib.emit(wrong, "t", {})
        with names("aemit", "outbox_relay.contrib.sqlalchemy"):
            await outbox.aemit(wrong, "t", {})
    with pytest.raises(TypeError, match="event 0 must be"):
        contrib.emit_many(scoped_session(sessionmaker(engine)), [("t", {})])  # pyright: ignore[reportArgumentType]


def test_no_payload_is_in_an_error(shop: Database, engine: Engine) -> None:
    """SQLAlchemy's errors show the parameters of the statement, unless told not to."""
    with Session(engine) as session:
        with pytest.raises(InvalidEvent) as caught:
            contrib.emit(session, "t", {"card": "4711"}, key="k" * 2000)
        assert "4711" not in repr(caught.value)
        assert caught.value.__suppress_context__
    with shop.connect(autocommit=True) as owner:
        owner.execute("alter schema outbox rename to elsewhere")
    with engine.connect() as connection, pytest.raises(ProgrammingError, match="does not exist") as failed:
        contrib.emit(connection, "t", {"card": "4711"})
    assert "4711" not in str(failed.value)
    assert failed.value.__cause__ is failed.value.orig
