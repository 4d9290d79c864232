"""A PostgreSQL server for tests: of any version, to be killed and restarted, with PostgreSQL's client programs."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow

from outbox_relay.postgres.migrations import migrate
from outbox_relay.workbench.embedded import postgres
from outbox_relay.workbench.embedded.postgres import SUPERUSER, Setting, StopMode
from tests.support.programs import WHEEL_MAJOR, program, programs

MEMORY = Path("/dev/shm")  # noqa: S108 - a directory with a name of its own is made in it
MEMORY_FREE_BYTES, MACHINE_BYTES = 6 << 30, 12 << 30
"""Free space and memory of the machine that are required to keep data in memory."""
TOOL_SECONDS = 120
KEPT_SECONDS = 24 * 3_600
"""Time for which a cluster of another schema is kept."""
TEMPLATE = "outbox_template"
"""The database with the schema in a cluster that was copied."""
CACHE = Path(__file__).parents[2] / ".cache" / "clusters"
ROOT = Path(__file__).parents[2]
SETTINGS: Mapping[str, Setting] = {"max_prepared_transactions": 20}


class PostgresServer(postgres.PostgresServer):
    """The server of the demo, of any version and with further methods.

    `major` is the version (see :mod:`tests.support.programs`), by default that of the environment variable
    OUTBOX_TEST_PG. All users may connect without a password, except those of :meth:`require_password`.

    A new cluster takes a second of the processor. Clusters of the other kinds are copies of one that an earlier run has
    made, all of a kind with the same system identifier: `empty`, or `migrated`, with the schema in :data:`TEMPLATE`.
    """

    def __init__(
        self,
        settings: Mapping[str, Setting] | None = None,
        *,
        fsync: bool = False,
        major: int | None = None,
        kind: Literal["new", "empty", "migrated"] = "new",
    ) -> None:
        self.major = wanted_major() if major is None else major
        self._kind = kind
        super().__init__({**SETTINGS, **(settings or {})}, fsync=fsync, parent=_memory())
        self._admin: psycopg.Connection[TupleRow] | None = None

    @property
    def pid(self) -> int:
        """Return the process id of the postmaster. Raise RuntimeError while the server is stopped."""
        return self.process.pid

    def bin(self, name: str) -> Path:
        """Return the path of a program. Raise :class:`tests.support.programs.NoProgram` if it is missing."""
        return program(programs(self.major), name)

    def prepare(self) -> None:
        """Create the data directory, or copy it."""
        if self._kind == "new":
            super().prepare()
            return
        made = CACHE / f"{self.major}-{self._kind}-{_key(self._kind, self.bin('postgres'))}"
        CACHE.mkdir(parents=True, exist_ok=True)
        with (CACHE / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                _make(self.major, self._kind, made)
        _copy(made, self.data)

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start again, on the same port and data."""
        self.stop(mode)
        self.start()

    def create_database(self, name: str, *, template: str = "template1") -> None:
        """Create a database as a copy of `template`, which must have no connections.

        Its files are copied, which takes half as long as the default, the write-ahead log.
        """
        command = sql.SQL("create database {} template {} strategy file_copy")
        self._administer(command.format(sql.Identifier(name), sql.Identifier(template)))

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


def _make(major: int, kind: str, made: Path) -> None:
    """Make the cluster that others are copies of, and remove those that were made of another schema long ago."""
    for old in CACHE.glob(f"{major}-{kind}-*"):
        if old.stat().st_mtime < time.time() - KEPT_SECONDS:
            shutil.rmtree(old, ignore_errors=True)
    with PostgresServer(major=major) as server:
        if kind == "migrated":
            server.create_database(TEMPLATE)
            migrate(server.dsn(TEMPLATE))
        server.stop("fast")
        copied = made.with_suffix(".part")
        shutil.rmtree(copied, ignore_errors=True)
        _copy(server.data, copied)
        copied.touch()
        copied.rename(made)


def _copy(data: Path, to: Path) -> None:
    subprocess.run(["/bin/cp", "-a", data, to], check=True, timeout=TOOL_SECONDS)


def _key(kind: str, program: Path) -> str:
    """Return a name for what a cluster is made of: the server's program, and the schema."""
    found = hashlib.sha256(f"{program} {program.stat().st_mtime}".encode())
    if kind == "migrated":
        for path in sorted([*(ROOT / "schema").rglob("*.sql"), *(ROOT / "outbox_relay/postgres").glob("*.py")]):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


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
