"""The database of the chaos suite: two servers behind proxies, one the synchronous standby of the other."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow

from outbox_relay.postgres.migrations import migrate
from outbox_relay.workbench.embedded.ports import LOOPBACK
from tests.chaos.nemesis import Nemesis
from tests.support import volume
from tests.support.postgres import SUPERUSER, PostgresServer
from tests.support.proxy import Proxy
from tests.support.replication import Pair

NAME = "shop"
RELAY = "relay"
"""The role of the relays, with the documented rights and without reserved slots."""
APPLICATION = "application"
"""The role of the handlers with a transaction."""
CROWD = "crowd"
"""The role that takes all slots except those reserved for superusers."""
SETTINGS = {"max_connections": 160, "superuser_reserved_connections": 20}
VOLUME_MEGABYTES = 12_288
"""Size of the file system in memory, which uses only as much as is written."""


class DatabaseSide:
    """A pair of servers with the schema in one database, and their faults.

    As a context manager it starts the servers and the proxies and finally removes them. Faults of the database are
    injected one at a time, from any thread; after each one the standby has all commits.
    """

    def __init__(self) -> None:
        self.pair = Pair("synchronous", SETTINGS, volume_megabytes=VOLUME_MEGABYTES if volume.available() else None)
        self.one_at_a_time = threading.Lock()
        self._proxies: dict[int, Proxy] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            self._stack.enter_context(self.pair)
            for port in self.pair.ports:
                self._proxies[port] = proxy = Proxy()
                proxy.target = port
                self._stack.enter_context(proxy)
            self._prepare()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def dsn(self) -> str:
        """Return the connection string of the writers: a superuser, directly to the primary."""
        return _dsn(SUPERUSER, self.pair.ports)

    @property
    def relay_dsn(self) -> str:
        """Return the connection string of the relays: their role, through the proxies, to the primary."""
        return _dsn(RELAY, [self._proxies[port].port for port in self.pair.ports])

    @property
    def proxies(self) -> list[Proxy]:
        """Return the proxies in front of the servers, which only relays use."""
        return list(self._proxies.values())

    @property
    def can_fill(self) -> bool:
        """Return True if each server has its own file system, so that a full disk can be real."""
        return volume.available()

    @property
    def application_dsn(self) -> str:
        """Return the connection string of the handlers with a transaction: their role, to the primary."""
        return _dsn(APPLICATION, self.pair.ports)

    def nemeses(self) -> list[Nemesis]:
        """Return a nemesis for each fault of the database."""
        from tests.chaos import dbfaults

        return dbfaults.nemeses(self)

    def connect(self) -> psycopg.Connection[TupleRow]:
        """Open a superuser's connection to the primary in autocommit mode."""
        return self.pair.primary.connect(NAME)

    def relay_backends(self) -> list[int]:
        """Return the process ids of the server's sessions of relays."""
        with self.connect() as connection:
            found = connection.execute("select pid from pg_stat_activity where usename = %s order by pid", (RELAY,))
            return [pid for (pid,) in found.fetchall()]

    def equip(self, server: PostgresServer) -> None:
        """Create the empty database and the roles."""
        server.create_database(NAME)
        with server.connect(NAME) as connection:
            connection.execute(f"create role {RELAY} login".encode())
            connection.execute(f"create role {CROWD} login".encode())
            connection.execute(f"create role {APPLICATION} login".encode())

    def _prepare(self) -> None:
        server = self.pair.primary
        self.equip(server)
        migrate(server.dsn(NAME), grant_relay=[RELAY], grants={"consume": [APPLICATION]})


def _dsn(user: str, ports: list[int]) -> str:
    return make_conninfo(
        host=",".join(LOOPBACK for _ in ports),
        port=",".join(map(str, ports)),
        dbname=NAME,
        user=user,
        target_session_attrs="read-write",
    )
