"""The relay's connection to the database, with fixed settings and fast reading of long answers.

libpq returns an answer in pieces of 16 KB, and psycopg returns to the event loop for each piece: a hundred times for a
chunk of events. That costs as much as the events themselves, and more while another thread works.
"""

from __future__ import annotations

import os
import select
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Final, LiteralString, TypeVar

import psycopg
from psycopg import AsyncConnection, BaseConnection
from psycopg.conninfo import make_conninfo
from psycopg.pq import ConnStatus, TransactionStatus
from psycopg.waiting import Ready, Wait

from outbox_relay.postgres.conninfo import parsed
from outbox_relay.postgres.session_settings import CORRECTION, startup_options

T = TypeVar("T")

IDENTITY: LiteralString = """
select extract(epoch from pg_catalog.pg_postmaster_start_time())::text, d.oid::bigint
  from pg_catalog.pg_database d where d.datname = pg_catalog.current_database()
"""
CONNECT_SECONDS = 5
"""Longest wait for a new connection."""
CONNECTION_DEFAULTS: Mapping[str, str | int] = {
    "connect_timeout": CONNECT_SECONDS,
    "tcp_user_timeout": 15_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
"""With these, a peer that vanished is detected within 15 to 25 s; the kernel's defaults take 15 minutes."""
MOST_PIECES = 16
"""Maximum number of pieces of an answer that are read before the event loop runs again."""


class Connection(AsyncConnection[Any]):
    """A connection of psycopg that waits less often."""

    async def wait(self, gen: Generator[Wait, Ready | int, T], *args: Any, **kwargs: Any) -> T:
        """Run ``gen``, as the method that this overrides."""
        return await super().wait(_taking(gen, self.pgconn.socket), *args, **kwargs)


MARK: Final[LiteralString] = "outbox.direct"
"""The setting by which a direct connection knows that its startup packet has reached the server."""
IS_DIRECT: Final[LiteralString] = "select pg_catalog.current_setting('outbox.direct', true) is not distinct from 'on'"


def direct(dsn: str, more_options: str = "") -> str:
    """Return ``dsn`` with the settings that the relay's statements depend on, for a connection without a pooler.

    They follow the options of ``dsn``, or of PGOPTIONS if it has none, and so override them. A malformed DSN is
    returned unchanged, and libpq refuses it.
    """
    try:
        given = parsed(dsn).get("options")
        before = os.environ.get("PGOPTIONS", "") if given is None else str(given)
        options = startup_options(f"{before} {more_options} -c {MARK}=on")
        return make_conninfo(dsn, options=options, client_encoding="UTF8")
    except psycopg.Error:
        return dsn


async def is_direct(connection: AsyncConnection[Any]) -> bool:
    """Return False if a pooler ignores the settings in the startup packet of a connection."""
    row = await (await connection.execute(IS_DIRECT)).fetchone()
    return bool(row and row[0])


def reaches_server(dsn: str) -> bool:
    """Return True if a connection of ``dsn`` that has settings of its own can be made, as through no pooler. Blocks."""
    try:
        with psycopg.connect(direct(dsn), autocommit=True, connect_timeout=CONNECT_SECONDS) as connection:
            row = connection.execute(IS_DIRECT).fetchone()
            return bool(row and row[0])
    except psycopg.Error:
        return False


async def fix_settings(connection: AsyncConnection[Any]) -> None:
    """Set the settings of a direct connection that its startup packet cannot set.

    PGTZ and PGDATESTYLE override the options of a connection, and an old server refuses the name of a newer setting.

    Raises ``psycopg.errors.InsufficientPrivilege`` if this role may not change a setting that the relay depends on.
    """
    for statement in settings_to_fix(connection):
        await connection.execute(statement)


def settings_to_fix(connection: BaseConnection[Any]) -> Sequence[LiteralString]:
    """Return the statements with which ``fix_settings`` sets the settings of a new connection."""
    reported = connection.pgconn.parameter_status
    statements: list[LiteralString] = [CORRECTION]
    if connection.info.server_version >= 170000:
        statements.append("set transaction_timeout = 0")
    if reported(b"TimeZone") != b"UTC":
        statements.append("set TimeZone = 'UTC'")
    if not (reported(b"DateStyle") or b"").startswith(b"ISO"):
        statements.append("set DateStyle = 'ISO'")
    return statements


def is_alive(connection: BaseConnection[Any]) -> bool:
    """Return whether the server answered the last statement on this connection, if only to refuse or cancel it."""
    unanswered = (TransactionStatus.ACTIVE, TransactionStatus.UNKNOWN)
    return connection.pgconn.status == ConnStatus.OK and connection.pgconn.transaction_status not in unanswered


async def database_identity(connection: AsyncConnection[Any]) -> tuple[str, int]:
    """Return the start time of the server and the database's oid, which together identify a database of a server."""
    row = await (await connection.execute(IDENTITY)).fetchone()
    return (row[0], row[1]) if row else ("", 0)


def _taking(gen: Generator[Wait, Ready | int, T], socket: int) -> Generator[Wait, Ready | int, T]:
    """Wrap ``gen`` so that it reads on without a wait while more data has arrived."""
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
