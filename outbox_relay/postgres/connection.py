"""The relay's connection to the database: fixed settings, and a time limit that depends on no setting of a session."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final, LiteralString, TypeVar, cast

import psycopg
from psycopg import BaseConnection, capabilities
from psycopg.conninfo import make_conninfo
from psycopg.pq import ConnStatus, TransactionStatus
from psycopg.waiting import Ready, Wait

from outbox_relay.domain.errors import DatabaseUnusable, RelayError
from outbox_relay.postgres.dsn import find_authorities, parsed
from outbox_relay.postgres.errors import NOT_DIRECT, explain, is_starved
from outbox_relay.postgres.session_settings import CORRECTION, startup_options

T = TypeVar("T")

IDENTITY: LiteralString = """
select extract(epoch from pg_catalog.pg_postmaster_start_time())::text, d.oid::bigint
  from pg_catalog.pg_database d where d.datname = pg_catalog.current_database()
"""
CONNECT_SECONDS = 5
"""Longest wait for a new connection."""
CANCEL_SECONDS = 1.0
"""Longest wait for the acceptance of a cancellation, and then for its effect."""
CONNECTION_DEFAULTS: Mapping[str, str | int] = {
    "connect_timeout": CONNECT_SECONDS,
    "tcp_user_timeout": 15_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
"""With these, a peer that vanished is detected within 15 to 25 s; the kernel's defaults take 15 minutes."""


class Connection(psycopg.Connection[Any]):
    """A connection that waits for an answer until ``until``, a ``time.monotonic()`` value.

    Then the statement is cancelled. If the server answers that, the error is the server's, and the connection is kept.
    Otherwise it is ``TimeoutError``: the connection is of no further use, and it is unknown whether the statement took
    effect. Nothing is waited for after ``give_up_at()``.
    """

    until = float("inf")
    losses, made_at = 0, 0.0
    """The number of connections that its pool had lost when it was made, and the time."""
    give_up_at: Callable[[], float] = staticmethod(lambda: float("inf"))

    def wait(self, gen: Generator[Wait, Ready | int, T], *args: Any, **kwargs: Any) -> T:
        """Run ``gen``, as the method that this overrides."""
        try:
            return super().wait(self._limited(gen), *args, **kwargs)
        except TimeoutError:
            if not self._cancelled():
                raise
        self.until = time.monotonic() + CANCEL_SECONDS
        return super().wait(self._limited(gen), *args, **kwargs)

    def _limited(self, gen: Generator[Wait, Ready | int, T]) -> Generator[Wait, Ready | int, T]:
        """Wrap ``gen`` so that it ends in time. The driver resumes it ten times a second while nothing arrives."""
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if time.monotonic() > min(self.until, self.give_up_at()):
                    raise TimeoutError
                wanted = gen.send(ready)
        except StopIteration as end:
            result: T = end.value
            return result

    def _cancelled(self) -> bool:
        """Ask the server to end the statement. Return False if that is not possible in time."""
        # Before version 17, libpq waits for this without a limit.
        if not capabilities.has_cancel_safe() or time.monotonic() > self.give_up_at():
            return False
        try:
            self.cancel_safe(timeout=CANCEL_SECONDS)
        except psycopg.Error:
            return False
        return True


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


def is_direct(connection: psycopg.Connection[Any]) -> bool:
    """Return False if a pooler ignores the settings in the startup packet of a connection."""
    row = connection.execute(IS_DIRECT).fetchone()
    return bool(row and row[0])


def connect(
    dsn: str,
    *,
    pooler: bool = False,
    more_options: str = "",
    give_up_at: Callable[[], float] = lambda: float("inf"),
) -> Connection:
    """Return a new connection with the settings of the relay, which only a ``pooler`` keeps from it.

    Raises ``DatabaseUnavailable`` or ``DatabaseUnusable``.
    """
    find_authorities(dsn)
    began = time.monotonic()
    try:
        connection = Connection.connect(
            dsn if pooler else direct(dsn, more_options),
            autocommit=True,
            prepare_threshold=None if pooler else 2,
            **cast(Any, CONNECTION_DEFAULTS),
        )
    except psycopg.Error as error:
        raise explain(error, dsn) from None
    connection.until, connection.give_up_at = began + 2 * CONNECT_SECONDS, give_up_at
    try:
        if not pooler:
            fix_settings(connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, psycopg.Error | TimeoutError):
            raise explain(error) from None
        raise
    return connection


def reaches_server(dsn: str) -> bool:
    """Return True if a connection of ``dsn`` that has settings of its own can be made, as through no pooler. Blocks."""
    try:
        connect(dsn).close()
    except RelayError:
        return False
    return True


def fix_settings(connection: psycopg.Connection[Any]) -> None:
    """Set the settings of a direct connection that its startup packet cannot set.

    PGTZ and PGDATESTYLE override the options of a connection, and an old server refuses the name of a newer setting.

    Raises ``DatabaseUnusable`` if a pooler has ignored the startup packet, and
    ``psycopg.errors.InsufficientPrivilege`` if this role may not change a setting that the relay depends on.
    """
    if not is_direct(connection):
        raise DatabaseUnusable(NOT_DIRECT)
    reported = connection.pgconn.parameter_status
    connection.execute(CORRECTION)
    if connection.info.server_version >= 170000:
        connection.execute("set transaction_timeout = 0")
    if reported(b"TimeZone") != b"UTC":
        connection.execute("set TimeZone = 'UTC'")
    if not (reported(b"DateStyle") or b"").startswith(b"ISO"):
        connection.execute("set DateStyle = 'ISO'")


def is_alive(connection: BaseConnection[Any], error: Exception) -> bool:
    """Return whether ``error`` says nothing about the server, since it answered the last statement on this connection.

    libpq ends the connection itself if this process has no memory for an answer.
    """
    unanswered = (TransactionStatus.ACTIVE, TransactionStatus.UNKNOWN)
    answered = connection.pgconn.status == ConnStatus.OK and connection.pgconn.transaction_status not in unanswered
    return not isinstance(error, TimeoutError) and (answered or is_starved(error))


def database_identity(connection: psycopg.Connection[Any]) -> tuple[str, int]:
    """Return the start time of the server and the database's oid, which together identify a database of a server."""
    row = connection.execute(IDENTITY).fetchone()
    return (row[0], row[1]) if row else ("", 0)
