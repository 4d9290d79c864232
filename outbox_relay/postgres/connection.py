"""The relay's connection to the database: its settings are fixed, and it takes a long answer as fast as it comes.

libpq hands over 16 KB of an answer at a time, and psycopg goes back to the event loop for each: a hundred times for a
chunk of events, which costs as much as the events themselves, and more while another thread works.
"""

from __future__ import annotations

import os
import select
from collections.abc import Generator
from typing import Any, LiteralString, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.waiting import Ready, Wait

from outbox_relay.postgres.session_settings import startup_options

T = TypeVar("T")

PLACE: LiteralString = """
select c.system_identifier, d.oid::bigint
  from pg_catalog.pg_control_system() c, pg_catalog.pg_database d where d.datname = pg_catalog.current_database()
"""
MOST_PIECES = 16
"""Pieces of an answer that are taken before the event loop has its turn."""


class Connection(AsyncConnection[Any]):
    """As psycopg's, but for how it waits."""

    async def wait(self, gen: Generator[Wait, Ready | int, T], *args: Any, **kwargs: Any) -> T:
        """Do what ``gen`` does, as the method of psycopg that this is instead of."""
        return await super().wait(_taking(gen, self.pgconn.socket), *args, **kwargs)


def direct(dsn: str, more_options: str = "") -> str:
    """Return ``dsn`` with the settings that the relay's statements depend on, for a connection without a pooler.

    They come after the options of ``dsn``, or else of PGOPTIONS, and so outrank them. A malformed DSN is returned as
    it is, for libpq to refuse.
    """
    try:
        given = conninfo_to_dict(dsn).get("options")
        before = os.environ.get("PGOPTIONS", "") if given is None else str(given)
        return make_conninfo(dsn, options=startup_options(f"{before} {more_options}"), client_encoding="UTF8")
    except psycopg.Error:
        return dsn


async def fix_settings(connection: AsyncConnection[Any]) -> None:
    """Set on a direct connection what its startup packet could not.

    PGTZ and PGDATESTYLE outrank the options of a connection, and an old server refuses the name of a newer setting.
    """
    told = connection.pgconn.parameter_status
    if connection.info.server_version >= 170000:
        await connection.execute("set transaction_timeout = 0")
    if told(b"TimeZone") != b"UTC":
        await connection.execute("set TimeZone = 'UTC'")
    if not (told(b"DateStyle") or b"").startswith(b"ISO"):
        await connection.execute("set DateStyle = 'ISO'")


async def place(connection: AsyncConnection[Any]) -> tuple[int, int]:
    """Return what tells this database from all others: the cluster's system identifier and the database's oid."""
    row = await (await connection.execute(PLACE)).fetchone()
    return (row[0], row[1]) if row else (0, 0)


def _taking(gen: Generator[Wait, Ready | int, T], socket: int) -> Generator[Wait, Ready | int, T]:
    """``gen``, which is told without a wait that there is more to read, while there is."""
    arrived = select.poll()
    arrived.register(socket, select.POLLIN)
    try:
        wanted = next(gen)
        while True:
            wanted = gen.send((yield wanted))
            for _ in range(MOST_PIECES):
                if wanted is not Wait.R or not arrived.poll(0):
                    break
                wanted = gen.send(Ready.R)
    except StopIteration as end:
        result: T = end.value
        return result
