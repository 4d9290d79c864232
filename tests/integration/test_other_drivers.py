"""Connections of psycopg 2 and pg8000: refused with the name of the right function, which works over them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from importlib import import_module  # pg8000 has no types
from typing import Any

import psycopg2
import pytest
from psycopg2 import extensions

from outbox_relay import inbox, outbox
from tests.support.database import Database, query
from tests.support.drivers import address

UID = "01a1fe9a-d7b3-795c-8af1-aa7f5518f66b"
RIGHT = "use the SQL function outbox.{0} over this connection, or {0} with a connection of psycopg 3"


class OwnConnection(extensions.connection):
    """A connection of an application that has its own class."""


def psycopg_2(database: Database) -> Any:
    return psycopg2.connect(database.dsn)


def own_class(database: Database) -> Any:
    return psycopg2.connect(database.dsn, connection_factory=OwnConnection)


def pg_8000(database: Database) -> Any:
    return import_module("pg8000.dbapi").connect(**address(database))


def pg_8000_native(database: Database) -> Any:
    return import_module("pg8000.native").Connection(**address(database))


@pytest.fixture(params=[psycopg_2, own_class, pg_8000, pg_8000_native], ids=lambda each: each.__name__)
def conn(request: pytest.FixtureRequest, database: Database) -> Generator[Any]:
    """Yield a connection of another driver."""
    connect: Callable[[Database], Any] = request.param
    with closing(connect(database)) as found:
        yield found


def test_a_connection_is_refused_with_the_right_function(conn: Any) -> None:
    with pytest.raises(TypeError) as caught:
        outbox.emit(conn, "t", {"card": 4711})
    said = str(caught.value)
    assert said.startswith("emit takes a psycopg Connection or Cursor, not ")
    assert said.endswith(f"; {RIGHT.format('emit')}, see docs/emitting.md")
    with pytest.raises(TypeError, match=RIGHT.format("emit")):
        outbox.emit_many(conn, [outbox.Event("t", {})])
    with pytest.raises(TypeError, match=rf"{RIGHT.format('once')}, see docs/consumers\.md"):
        inbox.once(conn, "billing", UID)


@pytest.mark.parametrize("connect", [psycopg_2, pg_8000])
def test_the_functions_that_are_named_work(database: Database, connect: Callable[[Database], Any]) -> None:
    with closing(connect(database)) as found:
        cursor = found.cursor()
        cursor.execute("select outbox.emit(%s, cast(%s as jsonb), key => %s)", ("t", '{"id": 1}', "k"))
        cursor.execute("select outbox.once(%s, cast(%s as uuid))", ("billing", UID))
        assert cursor.fetchone()[0] is True
        found.commit()
    assert query(database, "select type, key from outbox.event") == [("t", "k")]
