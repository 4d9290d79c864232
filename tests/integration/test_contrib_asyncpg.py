"""Emitting and consuming with asyncpg: over connections and those of a pool, with codecs of the application's own."""

from __future__ import annotations

import json
import uuid
import warnings
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from outbox_relay import outbox
from outbox_relay.contrib import asyncpg as contrib
from outbox_relay.contrib.asyncpg import Event, InvalidEvent, NotInTransaction
from tests.support.database import Database, query
from tests.support.drivers import address

LOGGED = """select type, key, convert_from(payload, 'UTF8'), headers, deliver_at, uid,
       coalesce(content_type, 'application/json')
              from outbox.event order by id"""


@asynccontextmanager
async def connected(database: Database, **options: Any) -> AsyncGenerator[Any]:
    """Yield a connection of asyncpg."""
    connection: Any = await asyncpg.connect(**address(database), **options)
    try:
        yield connection
    finally:
        await connection.close()


async def test_an_event_is_committed_and_rolled_back_with_the_transaction(database: Database) -> None:
    async with connected(database) as conn:
        undone = conn.transaction()
        await undone.start()
        await contrib.emit(conn, "undone", {})
        await undone.rollback()
        async with conn.transaction():
            uid = await contrib.emit(conn, "kept", {})
            assert query(database, "select count(*) from outbox.event") == [(0,)]
    assert query(database, "select type, uid from outbox.event") == [("kept", uid)]


@pytest.mark.parametrize("options", [{}, {"statement_cache_size": 0}], ids=["prepared", "behind a pooler"])
async def test_every_argument_is_stored_whatever_codecs_there_are(database: Database, options: dict[str, Any]) -> None:
    at, uid = datetime(2020, 1, 2, 3, 4, 5, 678901, UTC), uuid.UUID(int=7)
    given: dict[str, Any] = {"key": "schlüssel", "headers": {"x": "ä"}, "deliver_at": at, "uid": uid}
    async with connected(database, **options) as conn:
        await conn.set_type_codec("jsonb", schema="pg_catalog", encoder=json.dumps, decoder=json.loads)
        await conn.set_type_codec("uuid", schema="pg_catalog", encoder=str, decoder=str)
        await conn.set_type_codec("timestamptz", schema="pg_catalog", encoder=str, decoder=str)
        async with conn.transaction():
            assert await contrib.emit(conn, "t", {"a": "ö"}, **given) == uid
            assert await contrib.emit(conn, "t", {"a": "ö"}, **given) == uid, "a known uid is not emitted again"
            own = await contrib.emit_many(
                conn, [Event("raw", b"\xc3\xbc", content_type="text/plain"), Event("own", 1, dumps=lambda _: '"own"')]
            )
            assert await contrib.emit_many(conn, []) == []
    assert query(database, LOGGED) == [
        ("t", "schlüssel", '{"a":"ö"}', {"x": "ä"}, at, uid, "application/json"),
        ("raw", None, "ü", None, None, own[0], "text/plain"),
        ("own", None, '"own"', None, None, own[1], "application/json"),
    ]


@pytest.mark.parametrize("options", [{}, {"statement_cache_size": 0}], ids=["prepared", "behind a pooler"])
async def test_unique_keys_and_changes_of_scheduled_events(database: Database, options: dict[str, Any]) -> None:
    later = datetime.now(UTC) + timedelta(hours=1)
    async with connected(database, **options) as conn, conn.transaction():
        first = await contrib.emit(conn, "t", {}, tenant="acme", priority=5, unique_key="k", deliver_at=later)
        again = await contrib.emit_many(conn, [Event("t", {}), Event("t", {}, unique_key="k")])
        assert again[1] == first
        assert await contrib.reschedule(conn, first, later + timedelta(hours=1)) is True
        assert await contrib.cancel(conn, first) is True
        assert await contrib.cancel(conn, again[0]) is False
        with pytest.raises(InvalidEvent, match="at must be in the years 1 to 9998"):
            async with conn.transaction():
                await contrib.reschedule(conn, first, datetime.max.replace(tzinfo=UTC))
    assert query(database, "select tenant, priority from outbox.event order by id") == [(None, None)]
    assert query(database, "select from outbox.scheduled") == []


async def test_a_refused_event_is_named_as_by_outbox_emit(database: Database) -> None:
    async with connected(database) as conn, conn.transaction():
        found: list[tuple[str, int | None]] = []
        for event in (Event("", {}), Event("t", float("nan")), Event("t", {"card": 4711}, key="k" * 2000)):
            with pytest.raises(InvalidEvent) as caught:
                async with conn.transaction():
                    await contrib.emit(conn, event.type, event.payload, key=event.key)
            found.append((str(caught.value), caught.value.index))
        with pytest.raises(InvalidEvent, match=r"^event 1: ") as caught:
            async with conn.transaction():
                await contrib.emit_many(conn, [Event("a", {}), Event("", {})])
        assert caught.value.index == 1
    with database.connect() as owner:
        for event, said in zip((Event("", {}), Event("t", {}, key="k" * 2000)), found[::2], strict=True):
            with pytest.raises(InvalidEvent) as caught, owner.transaction():
                outbox.emit(owner, event.type, event.payload, key=event.key)
            assert (str(caught.value), caught.value.index) == said
    assert "4711" not in str(found)


async def test_a_connection_of_a_pool_emits_and_warns_outside_a_transaction(database: Database) -> None:
    pool: Any
    async with asyncpg.create_pool(**address(database), min_size=1, max_size=1) as pool, pool.acquire() as conn:
        with pytest.warns(NotInTransaction) as warned:
            await contrib.emit(conn, "t", {})
        with pytest.warns(NotInTransaction):
            await contrib.emit_many(conn, [Event("t", {})])
        assert [warning.filename for warning in warned] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            async with conn.transaction():
                await contrib.emit(conn, "t", {})


async def test_the_wrong_object_is_told_the_right_function(database: Database) -> None:
    wrong: Any
    async with connected(database) as wrong:
        with pytest.raises(TypeError, match=r"outbox_relay\.contrib\.asyncpg"):
            await outbox.aemit(wrong, "t", {})
        with pytest.raises(TypeError, match=r"outbox_relay\.contrib\.asyncpg"):
            outbox.emit(wrong, "t", {})
    with database.connect() as wrong, pytest.raises(TypeError, match="a connection of asyncpg, not psycopg"):
        await contrib.emit(wrong, "t", {})


# -- the inbox ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"statement_cache_size": 0}], ids=["prepared", "behind a pooler"])
async def test_an_event_is_handled_once(database: Database, options: dict[str, Any]) -> None:
    uid = uuid.uuid4()
    async with connected(database, **options) as conn:
        await conn.set_type_codec("bool", schema="pg_catalog", encoder=str, decoder=str)
        await conn.set_type_codec("uuid", schema="pg_catalog", encoder=str, decoder=str)
        undone = conn.transaction()
        await undone.start()
        assert await contrib.once(conn, "billing", uid) is True
        await undone.rollback()
        async with conn.transaction():
            assert await contrib.once(conn, "billing", str(uid)) is True
            assert await contrib.once(conn, "billing", uid) is False
            assert await contrib.once(conn, "mail", uid) is True
    assert query(database, "select consumer, uid from outbox.inbox order by 1") == [("billing", uid), ("mail", uid)]
