"""Emitting instances of declared classes, and comparing the log with its catalogue."""

from __future__ import annotations

from decimal import Decimal

import asyncpg
import pytest
import sqlalchemy as sa

from outbox_relay import outbox
from outbox_relay.contrib import asyncpg as asyncpg_outbox
from outbox_relay.contrib import sqlalchemy as sqlalchemy_outbox
from outbox_relay.postgres.migrations import migrate
from tests.support.command import Ended, inside
from tests.support.database import Database, query
from tests.support.declared import OrderCreated
from tests.support.drivers import address, url
from tests.support.roles import new_role

MODULE = "tests.support.declared"
SECRET = "4929-1234"
ROWS = "select type, key, convert_from(payload, 'UTF8') from outbox.event order by id"
CREATED = ("order.created", "1", '{"id":1,"total":"1","lines":[],"counts":{}}')


def order() -> OrderCreated:
    """Return an event."""
    return OrderCreated(id=1, total=Decimal(1))


def check(database: Database, *options: str, dsn: str | None = None) -> Ended:
    """Compare the log with the catalogue."""
    return inside("catalogue", "check", MODULE, "--dsn", dsn or database.dsn, *options)


def test_emit_takes_an_instance_in_the_place_of_the_type(database: Database) -> None:
    with database.connect() as connection:
        outbox.emit(connection, order())
        outbox.emit(connection, order(), key="k")
        outbox.emit_many(connection, [order(), outbox.Event(order(), key="m")])
        with pytest.raises(outbox.InvalidEvent, match="payload is given twice"):
            outbox.emit(connection, order(), {})
    assert [row[1] for row in query(database, ROWS)] == ["1", "k", "1", "m"]
    assert query(database, ROWS)[0] == CREATED


async def test_the_emits_of_other_packages_take_an_instance(database: Database) -> None:
    engine = sa.create_engine(url(database, "psycopg"))
    with engine.begin() as connection:
        sqlalchemy_outbox.emit(connection, order())
        sqlalchemy_outbox.emit_many(connection, [order()])
    engine.dispose()
    other = await asyncpg.connect(**address(database))
    async with other.transaction():
        await asyncpg_outbox.emit(other, order())
        await asyncpg_outbox.emit_many(other, [order()])
    await other.close()
    assert query(database, ROWS) == [CREATED] * 4


def test_the_first_difference_of_each_type_is_named(database: Database) -> None:
    with database.connect() as connection:
        outbox.emit(connection, "order.created", {"id": SECRET, "total": "1"})
        newest = outbox.emit(connection, "order.created", {"id": 1, "total": 7, SECRET: 1}, key=SECRET)
        outbox.emit(connection, "order.paid", {"id": 1, "amount": 1, "at": "2026-01-01T00:00:00Z"})
    ended = check(database)
    assert ended.code == 1
    assert f"order.created: $.total: expected string, found integer (event {newest})" in ended.out.splitlines()
    assert SECRET not in ended.out + ended.err
    found = check(database, "--json").json["types"]
    [told] = [each for each in found if each["difference"]]
    assert told == {
        "type": "order.created",
        "events": 2,
        "difference": {"uid": str(newest), "path": "$.total", "expected": "string", "found": "integer"},
    }


def test_a_role_needs_the_right_to_payloads(database: Database) -> None:
    with database.connect() as connection:
        outbox.emit(connection, order())
    with new_role(database, "reader") as reader, new_role(database, "viewer") as viewer:
        migrate(database.dsn, grants={"read": [reader], "payloads": [viewer]})
        refused = check(database, dsn=database.dsn_as(reader))
        assert refused.code == 2
        assert "--grant-payloads" in refused.err
        assert check(database, dsn=database.dsn_as(viewer)).code == 0
