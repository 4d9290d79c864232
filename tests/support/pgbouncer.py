"""PgBouncer from Debian, between clients and one PostgreSQL server, which can be replaced under them."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from outbox_relay.workbench.embedded.account import unprivileged
from outbox_relay.workbench.embedded.ports import LOOPBACK
from outbox_relay.workbench.embedded.postgres import SUPERUSER
from outbox_relay.workbench.embedded.server import Server
from tests.support.installed import absent
from tests.support.postgres import PostgresServer

USERS = (SUPERUSER, "relay")
"""Users that may connect without a password."""
SETTINGS: Mapping[str, str | int] = {
    "pool_mode": "transaction",
    "default_pool_size": 5,
    "max_client_conn": 500,
    # Seconds until a failed connection to the server is tried again; calls of a relay wait meanwhile.
    "server_login_retry": 1,
}


class PgBouncer(Server):
    """A pooler in front of `server`; `settings` are added to :data:`SETTINGS`."""

    name = "PgBouncer"
    start_seconds = 20
    stop_seconds = 10
    end_signals = (signal.SIGQUIT,)
    on_orphan = "QUIT"

    def __init__(self, server: PostgresServer, settings: Mapping[str, str | int] | None = None) -> None:
        super().__init__("outbox-pgbouncer-", "pgbouncer.log", account=unprivileged())
        self._settings = {**SETTINGS, **(settings or {})}
        self._target = server.port

    def dsn(self, database: str, user: str = SUPERUSER) -> str:
        """Return a connection string through the pooler."""
        return make_conninfo(host=LOOPBACK, port=self.port, dbname=database, user=user)

    def ask(self, command: str) -> list[dict[str, Any]]:
        """Run a command of the console, such as SHOW POOLS, and return its rows."""
        with psycopg.connect(self.dsn("pgbouncer"), autocommit=True, connect_timeout=5) as console:
            cursor = console.execute(command.encode())
            names = [column.name for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()] if names else []

    def pause(self) -> None:
        """Let open transactions end and begin no others; clients wait."""
        self.ask("PAUSE")

    def resume(self) -> None:
        """Begin transactions again."""
        self.ask("RESUME")

    def turn_to(self, server: PostgresServer) -> None:
        """Send new transactions to another server; connections to the previous one end with their transactions."""
        self._target = server.port
        self.prepare()
        self.ask("RELOAD")

    def command(self) -> Sequence[str | Path]:
        """Return the command line of the pooler."""
        return [_program(), self.directory / "pgbouncer.ini"]

    def answers(self) -> bool:
        """Return True if the console answers."""
        try:
            return bool(self.ask("SHOW VERSION"))
        except psycopg.OperationalError:
            return False

    def prepare(self) -> None:
        """Write the configuration."""
        settings = {
            "listen_addr": LOOPBACK,
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "trust",
            "auth_file": self.directory / "users.txt",
            "admin_users": SUPERUSER,
            **self._settings,
        }
        lines = ["[databases]", f"* = host={LOOPBACK} port={self._target}", "[pgbouncer]"]
        lines += [f"{name} = {value}" for name, value in settings.items()]
        self._file("users.txt", [f'"{user}" ""' for user in USERS])
        self._file("pgbouncer.ini", lines)

    def _file(self, name: str, lines: list[str]) -> None:
        file = self.directory / name
        file.write_text("\n".join(lines) + "\n")
        self._account.chown(file)


def _program() -> Path:
    """Return the path of the program. If it is missing, skip the test, or fail it if the variable CI is "true"."""
    found = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is None:
        absent("PgBouncer", "pgbouncer")
    return Path(found)
