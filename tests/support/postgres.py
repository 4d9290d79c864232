"""A PostgreSQL server for tests: of any version, to be killed and restarted, with PostgreSQL's client programs."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow

from outbox_relay.workbench.embedded import postgres
from outbox_relay.workbench.embedded.postgres import SUPERUSER, Setting, StopMode
from tests.support.programs import WHEEL_MAJOR, program, programs

MEMORY = Path("/dev/shm")  # noqa: S108 - a directory with a name of its own is made in it
MEMORY_FREE_BYTES, MACHINE_BYTES = 6 << 30, 12 << 30
"""Free space and memory of the machine that are required to keep data in memory."""
TOOL_SECONDS = 120
FIRST_WITH_STRATEGY = 15
"""The first version in which CREATE DATABASE offers a strategy; earlier ones copy files."""
SETTINGS: Mapping[str, Setting] = {"max_prepared_transactions": 20}


class PostgresServer(postgres.PostgresServer):
    """The server of the demo, of any version and with further methods.

    `major` is the version (see :mod:`tests.support.programs`), by default that of the environment variable
    OUTBOX_TEST_PG. All users may connect without a password, except those of :meth:`require_password`.
    """

    def __init__(
        self, settings: Mapping[str, Setting] | None = None, *, fsync: bool = False, major: int | None = None
    ) -> None:
        self.major = wanted_major() if major is None else major
        super().__init__({**SETTINGS, **(settings or {})}, fsync=fsync, parent=_memory())
        self._admin: psycopg.Connection[TupleRow] | None = None

    @property
    def pid(self) -> int:
        """Return the process id of the postmaster. Raise RuntimeError while the server is stopped."""
        return self.process.pid

    def bin(self, name: str) -> Path:
        """Return the path of a program. Raise :class:`tests.support.programs.NoProgram` if it is missing."""
        return program(programs(self.major), name)

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start again, on the same port and data."""
        self.stop(mode)
        self.start()

    def create_database(self, name: str, *, template: str = "template1") -> None:
        """Create a database as a copy of `template`, which must have no connections.

        Its files are copied, which takes half as long as the default of PostgreSQL 15 and later, the write-ahead log.
        """
        strategy = sql.SQL("strategy file_copy" if self.major >= FIRST_WITH_STRATEGY else "")
        command = sql.SQL("create database {} template {} {}")
        self._administer(command.format(sql.Identifier(name), sql.Identifier(template), strategy))

    def drop_database(self, name: str) -> None:
        """Drop a database if it exists, and terminate its connections."""
        self._administer(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def _administer(self, command: sql.Composed) -> None:
        """Run a command on a connection that is kept until the server stops."""
        if self._admin is None:
            self._admin = self.connect()
        try:
            self._admin.execute(command)
        except psycopg.OperationalError:
            if not self._admin.broken:
                raise
            self._leave()  # the server has been restarted by another way than stop
            self._administer(command)

    def stop(self, mode: StopMode = "fast") -> None:
        """Close the connection of this object, and stop the server if it is running."""
        self._leave()
        super().stop(mode)

    def _leave(self) -> None:
        if self._admin is not None:
            self._admin.close()
        self._admin = None

    def require_password(self, role: str) -> None:
        """Require the password of `role` (SCRAM) for new connections."""
        rules = self.data / "pg_hba.conf"
        rules.write_text(f'host all "{role}" 127.0.0.1/32 scram-sha-256\n{rules.read_text()}')
        with self.connect() as connection:
            connection.execute("select pg_reload_conf()")

    def run(self, program: str, *arguments: str | Path, seconds: float = TOOL_SECONDS) -> str:
        """Run one of PostgreSQL's programs as the server's user. Return its stdout and stderr.

        Raise RuntimeError with this text if it fails, :class:`subprocess.TimeoutExpired` after `seconds`.
        """
        done = subprocess.run(
            [self.bin(program), *arguments],
            cwd=self.directory,
            env=postgres.process_environment(),
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            user=self._account.user,
            group=self._account.group,
            extra_groups=self._account.extra_groups,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} ended with {done.returncode}: {done.stdout}")
        return done.stdout

    def pgbench(
        self,
        database: str,
        script: str,
        *,
        transactions: int,
        clients: int = 1,
        user: str = SUPERUSER,
        options: Sequence[str] = (),
        seconds: float = TOOL_SECONDS,
    ) -> str:
        """Run a pgbench script `transactions` times per client with prepared statements. Return the report.

        `options` are passed to pgbench, such as `--rate=1000` or `--define=keys=100`.
        """
        file = self.directory / f"script-{os.urandom(4).hex()}.sql"
        file.write_text(script)
        file.chmod(0o644)
        return self.run(
            "pgbench", "--no-vacuum", "--protocol=prepared", f"--file={file}", f"--client={clients}",
            f"--jobs={min(clients, os.cpu_count() or 1)}", f"--transactions={transactions}", *options,
            self.dsn(database, user), seconds=seconds,
        )  # fmt: skip


def wanted_major() -> int:
    """Return the major version of PostgreSQL for the tests: OUTBOX_TEST_PG, or that of the wheel."""
    return int(os.environ.get("OUTBOX_TEST_PG") or WHEEL_MAJOR)


@cache
def _memory() -> Path | None:
    """Return the file system in memory if it is large enough: each test creates and drops a database of many files."""
    if not MEMORY.is_dir():
        return None
    there = os.statvfs(MEMORY)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    plenty = there.f_bavail * there.f_frsize >= MEMORY_FREE_BYTES and machine >= MACHINE_BYTES
    return MEMORY if plenty else None
