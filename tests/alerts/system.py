"""Relays with a database and a receiver of their own, under a light load, and ways to cause each fault."""

from __future__ import annotations

import contextlib
import json
import signal
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg

from outbox_relay.postgres.migrations import migrate
from tests.support.command import outbox_relay
from tests.support.database import Database
from tests.support.metrics import scrape
from tests.support.postgres import PostgresServer
from tests.support.receiver import Receiver
from tests.support.receiver.answers import say
from tests.support.receiver.signatures import SECRET
from tests.support.service import RelayService

CONFIG = """
[database]
dsn = "{dsn}"
[routes]
"*" = {names}
"""
SINK = """
[sinks.{name}]
type = "webhook"
url = "{url}"
secrets = ["{secret}"]
permanent_statuses = [400]
max_in_flight = {in_flight}
allow_http = true
allow_networks = ["127.0.0.0/8"]
"""
HANDLER = """
[sinks.mail]
type = "python"
handler = "tests.support.handlers:hang_at_first"
max_in_flight = 4
timeout_seconds = 1
[sinks.mail.retry]
base_seconds = 3600
"""
EXPECTED = ("connection_lost", "statement_failed", "lease_lost", "incarnation", "handed_over", "reload")
"""Reasons for which the faults make sessions restart."""
EMIT_SECONDS = 1.0
"""Time between two emits."""
EMITTER_SECONDS = 10.0
"""Maximum time to wait for the end of the emits."""


class System:
    """A database, a receiver, and relays that are named ``relay-1`` and so on."""

    def __init__(self, server: PostgresServer, name: str, relays: int) -> None:
        self.server = server
        self.database = Database(server, name)
        self.sinks: tuple[str, ...] = ("crm",)
        self.in_flight = 8
        self.has_handler = False
        self.user: str | None = None
        self.receiver = Receiver()
        self.types = ["order.created"]
        self.relays: dict[str, RelayService] = {}
        self._count = relays
        self._stack = ExitStack()
        self._ended = threading.Event()
        self._emitter = threading.Thread(target=self._emit, daemon=True)
        self._locks: list[psycopg.Connection[Any]] = []

    def __enter__(self) -> Self:
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._stack.enter_context(self.receiver)
        self.server.create_database(self.database.name)
        migrate(self.database.dsn)
        self._stack.callback(self._end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _end(self) -> None:
        """End everything that the faults have left."""
        self._ended.set()
        for relay in self.relays.values():
            with contextlib.suppress(ProcessLookupError):
                relay.process.kill()
                relay.process.wait(10)
        for connection in self._locks:
            connection.close()
        if self._emitter.is_alive():
            self._emitter.join(EMITTER_SECONDS)

    # -- relays -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the relays and the load."""
        for number in range(1, self._count + 1):
            name = f"relay-{number}"
            self.relays[name] = RelayService(self._directory, self.config(), name, expects=EXPECTED).start()
        self._emitter.start()

    def config(self) -> str:
        """Return the settings of a relay."""
        dsn = self.database.dsn_as(self.user) if self.user else self.database.dsn
        same = {"url": self.receiver.url, "secret": SECRET, "in_flight": self.in_flight}
        sinks = [SINK.format(name=name, **same) for name in self.sinks]
        names = [*self.sinks, *(["mail"] if self.has_handler else [])]
        handler = HANDLER if self.has_handler else ""
        return CONFIG.format(dsn=dsn, names=json.dumps(names)) + "".join(sinks) + handler

    def kill(self, name: str) -> None:
        """End a relay by SIGKILL."""
        self.relays[name].process.kill()
        self.relays[name].process.wait(10)

    def replace(self, name: str) -> None:
        """Stop a relay as a deployment does, and start it with the present settings on the same port."""
        relay = self.relays[name]
        relay.stop()
        relay.config.write_text(f'{self.config()}\n[http]\nlisten = "127.0.0.1:{relay.port}"\n')
        relay.start()

    def reload(self, name: str, text: str) -> None:
        """Overwrite the file of a relay and send SIGHUP."""
        self.relays[name].config.write_text(text)
        self.relays[name].send(signal.SIGHUP)

    def scrape(self) -> dict[str, str | None]:
        """Return the text of ``/metrics`` of each relay under the address of its target."""
        return {f"{name}.internal:8080": _text(relay.port) for name, relay in self.relays.items()}

    # -- the application ----------------------------------------------------------------------------------------

    def _emit(self) -> None:
        """Emit events until the end, on a connection that is opened again whenever it is lost."""
        while not self._ended.is_set():
            with contextlib.suppress(psycopg.Error), closing(self.database.connect(autocommit=True)) as connection:
                while not self._ended.wait(EMIT_SECONDS):
                    self._emit_types(connection)

    def _emit_types(self, connection: psycopg.Connection[Any]) -> None:
        for kind in list(self.types):
            connection.execute("select outbox.emit(%s, '1', key => gen_random_uuid()::text)", (kind,))

    # -- faults -------------------------------------------------------------------------------------------------

    def execute(self, statement: str) -> None:
        """Run a statement in a transaction of its own."""
        with self.database.connect(autocommit=True) as connection:
            connection.execute(statement.encode())

    def hold(self, statement: str) -> None:
        """Run a statement in a transaction that stays open until the end."""
        connection = self.database.connect()
        connection.execute(statement.encode())
        self._locks.append(connection)

    def command(self, *arguments: str) -> None:
        """Run a command of ``outbox-relay``, which must succeed."""
        ended = outbox_relay(*arguments, "--dsn", self.database.dsn)
        assert ended.code == 0, ended.err

    def answer(self, status: int) -> None:
        """Let the receiver answer every request with a status."""
        self.receiver.answer = say(status)


Step = Callable[[System], None]


def _text(port: int) -> str | None:
    try:
        return scrape(port)[1]
    except (OSError, AssertionError):
        return None
