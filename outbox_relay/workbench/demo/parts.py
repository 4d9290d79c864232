"""The parts of a demo, started and watched."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from outbox_relay.domain.event import SHARDS
from outbox_relay.postgres.migrations import migrate
from outbox_relay.workbench.embedded.broker import Broker
from outbox_relay.workbench.embedded.postgres import PostgresServer
from outbox_relay.workbench.embedded.process import ProcessFailed
from outbox_relay.workbench.processes import PythonProcess, RelayProcess
from outbox_relay.workbench.shop.arrivals import Destination
from outbox_relay.workbench.shop.orders import WRITERS, ShopDatabase
from outbox_relay.workbench.shop.processes import KAFKA, TOPIC, WEBHOOK, ShopProcesses
from outbox_relay.workbench.supervision import ProcessWatch, Signals

P = TypeVar("P", bound=PythonProcess)

POLL_SECONDS = 0.1
LINE_SECONDS = 1.0
"""Interval between lines of progress, and between questions to relays."""
READY_SECONDS = 60.0
STATEMENT_SECONDS = 30.0
"""Time limit of a command of an operator."""
DATABASE = "shop"
INVOICES = 12
"""Number of events that a destination refuses, for the page."""


def write_line(line: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class DemoParts:
    """Everything that runs during a demo; closing `stack` ends it.

    Methods raise :class:`~outbox_relay.workbench.supervision.Interrupted` after a signal, and :class:`ProcessFailed` if
    a process has exited by itself.
    """

    def __init__(self, stack: ExitStack, signals: Signals) -> None:
        self._stack = stack
        self._watch = ProcessWatch(signals)
        self._began = self._shown_at = time.monotonic()
        self._directory = Path(tempfile.mkdtemp(prefix="outbox-demo-"))
        stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
        self.broken = self._directory / "broken"
        """While this file exists, the receiver refuses damaged orders."""
        self.summary = self._directory / "shop.json"
        self.destinations = tuple(
            Destination(name, kind, self._directory / f"{kind}.journal")
            for name, kind in ((KAFKA, "kafka"), (WEBHOOK, "webhook"))
        )
        self._relays: list[RelayProcess] = []
        self._shop: PythonProcess | None = None

    def open(self, *, with_page: bool) -> str | None:
        """Start everything but the shop, and wait until the relays own every shard. Return the page's address."""
        self.say("starting PostgreSQL")
        self.postgres = self._stack.enter_context(PostgresServer())
        self._watch.add("PostgreSQL", self.postgres.process)
        self.say("starting a Kafka-compatible broker")
        self.broker = self._stack.enter_context(Broker())
        self._watch.add("the broker", self.broker.process)
        self.broker.create_topic(TOPIC)
        self.say("creating the shop's database with the outbox schema")
        self.postgres.create_database(DATABASE)
        dsn = self.postgres.dsn(DATABASE)
        migrate(dsn)
        self.database = ShopDatabase(dsn)
        self.database.prepare()
        self._processes = ShopProcesses(
            self._stack, self._directory, dsn, self.broker.bootstrap, with_trouble=with_page
        )
        self.say("starting two relays, a Kafka consumer and a webhook receiver")
        kafka, webhook = self.destinations
        self._endpoints = [
            self._add(self._processes.consumer(kafka.journal)),
            self._add(self._processes.receiver(webhook.journal, self.broken)),
        ]
        self.add_relay("relay-1")
        self.add_relay("relay-2")
        if not self.wait(self.all_owned, READY_SECONDS):
            raise ProcessFailed(f"the relays share the shards: not within {READY_SECONDS:g} s{self._watch.log_tails()}")
        return self._open_page() if with_page else None

    def _open_page(self) -> str:
        """Serve the page, and give it something to show: events that a destination refuses. Return its address."""
        process, address = self._processes.page()
        self._add(process)
        self.database.emit_invoices(INVOICES)
        self.say(f"the page is at {address}; sink invoices is in trouble, for you to look at")
        return address

    def open_shop(self, seconds: float) -> None:
        """Start the load, of which a line per second is shown from now on."""
        self.say(f"the shop opens for {seconds:g} s: {WRITERS} writers, orders and events in one transaction")
        self._shop = self._add(self._processes.shop(self.summary))

    def close_shop(self) -> None:
        """Stop the load."""
        self.say("the shop closes")
        if self._shop is not None:
            self._stop(self._shop)
            self._shop = None

    def stop(self) -> None:
        """Stop relays and destinations, and read what arrived."""
        self.say("stopping the relays, then reading both destinations to the end")
        for process in (*self._relays, *self._endpoints):
            self._stop(process)
        for destination in self.destinations:
            destination.read()

    # -- faults -------------------------------------------------------------------------------------------------

    def add_relay(self, name: str) -> None:
        """Start a relay without waiting until it is ready."""
        self._relays.append(self._add(self._processes.relay(name)))

    def kill_relay(self) -> None:
        """Kill the first relay."""
        relay = self._relays.pop(0)
        self._watch.remove(relay.name)
        relay.kill()

    def kill_database(self) -> None:
        """Kill PostgreSQL."""
        self._watch.remove("PostgreSQL")
        self.postgres.kill()

    def start_database(self) -> None:
        """Start PostgreSQL again and wait until it answers."""
        self.postgres.start()
        self._watch.add("PostgreSQL", self.postgres.process)

    def freeze_broker(self) -> None:
        """Stop the broker without ending its connections."""
        self.broker.process.send(signal.SIGSTOP)

    def thaw_broker(self) -> None:
        """Let the broker go on."""
        self.broker.process.send(signal.SIGCONT)

    def retry_dead(self) -> None:
        """Run `outbox-relay dead retry`, as an operator does. Raise :class:`ProcessFailed` if it fails."""
        command = ["outbox_relay", "dead", "retry", "--sink", WEBHOOK, "--yes", "--dsn", self.database.dsn]
        retry = PythonProcess("dead-retry", command, self._directory)
        if retry.wait(STATEMENT_SECONDS) != 0:
            raise ProcessFailed(f"dead retry ended with {retry.exit_code}: {retry.log_tail()}")

    # -- waiting ------------------------------------------------------------------------------------------------

    def say(self, message: str) -> None:
        """Write a message with the elapsed time to stderr, unless a signal was received."""
        self._watch.check()
        write_line(f"{time.monotonic() - self._began:6.1f} s  {message}")

    def wait(self, fact: Callable[[], object], seconds: float) -> bool:
        """Watch until `fact` returns a true value; return False if that takes more than `seconds`."""
        deadline = time.monotonic() + seconds
        while not fact():
            if time.monotonic() > deadline:
                return False
            self._watch.check()
            for destination in self.destinations:
                destination.read()
            if self._shop is not None and time.monotonic() >= self._shown_at + LINE_SECONDS:
                self._show()
            time.sleep(POLL_SECONDS)
        return True

    def all_owned(self) -> bool:
        """Return True if every relay owns shards, and all of them together own every shard of each sink."""
        owned = [relay.shards() or {} for relay in self._relays]
        return all(
            all(shards.get(one.name) for shards in owned) and sum(shards.get(one.name, 0) for shards in owned) == SHARDS
            for one in self.destinations
        )

    def _show(self) -> None:
        self._shown_at = time.monotonic()
        committed = self.database.count()
        arrived = ", ".join(f"{one.name} {one.distinct:,}" for one in self.destinations)
        self.say(f"committed {committed:,}, arrived: {arrived}")

    def _add(self, process: P) -> P:
        self._watch.add(process.name, process)
        return process

    def _stop(self, process: PythonProcess) -> None:
        self._watch.remove(process.name)
        process.stop()
