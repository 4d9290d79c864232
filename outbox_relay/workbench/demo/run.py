"""Runs the demo: starts everything, kills and replaces one relay under load, and checks the deliveries."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from outbox_relay.domain.errors import RelayError
from outbox_relay.domain.event import SHARDS
from outbox_relay.postgres.migrations import migrate
from outbox_relay.workbench.demo import rate_control
from outbox_relay.workbench.demo.monitor import Monitor
from outbox_relay.workbench.demo.report import DemoReport, DestinationResult
from outbox_relay.workbench.demo.screen import Screen, open_screen
from outbox_relay.workbench.embedded.broker import Broker
from outbox_relay.workbench.embedded.postgres import PostgresServer
from outbox_relay.workbench.guard import SHOP_MODULES, require_modules, run_guarded
from outbox_relay.workbench.processes import PythonProcess, RelayProcess
from outbox_relay.workbench.shop.checker import Identity
from outbox_relay.workbench.shop.destinations import MonitoredDestination
from outbox_relay.workbench.shop.orders import WRITERS, ShopDatabase
from outbox_relay.workbench.shop.processes import KAFKA, TOPIC, WEBHOOK, ShopProcesses
from outbox_relay.workbench.signals import Signals

READY_SECONDS = 60.0
ARRIVE_SECONDS = 60.0
"""Time limit for the arrival of all events after the end of the load."""
UNDISTURBED_SECONDS = 1.0
"""Events emitted this long before the kill are expected to arrive before it."""
DATABASE = "shop"
PAGE_MODULES = ("starlette", "uvicorn", "jinja2")
INVOICES = 12
"""Number of events that a destination refuses, for the page."""
STAY_SECONDS = 600.0
"""Time for which the page stays open after the end of the load, at a terminal."""


class DemoFailed(RelayError):
    """The demo failed; the message names the failed process and contains the end of its log."""


def run_demo(load_seconds: float, *, with_page: bool = False) -> DemoReport:
    """Run the demo with `load_seconds` of load and return its report. No process is left running.

    `with_page` also serves the page, with a sink in trouble, and at a terminal lets it stay open for `STAY_SECONDS`.

    Raise :class:`DemoFailed`, ImportError if the extra `demo` is not installed, or SystemExit with 128 plus its number
    after a signal.
    """
    require_modules([*SHOP_MODULES, *PAGE_MODULES] if with_page else SHOP_MODULES)
    screen = open_screen()

    def run(stack: ExitStack, signals: Signals) -> DemoReport:
        with screen:
            return DemoRun(load_seconds, stack, signals, screen, with_page=with_page).run()

    return run_guarded(run, screen.say, DemoFailed)


class DemoRun:
    """One run of the demo; closing `stack` ends everything that it started."""

    def __init__(
        self, load_seconds: float, stack: ExitStack, signals: Signals, screen: Screen, *, with_page: bool
    ) -> None:
        self._load_seconds = load_seconds
        self._with_page = with_page
        self._stack = stack
        self._directory = Path(tempfile.mkdtemp(prefix="outbox-demo-"))
        stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
        self._kafka = MonitoredDestination(KAFKA, "kafka", self._directory / "consumer.journal")
        self._webhook = MonitoredDestination(WEBHOOK, "webhook", self._directory / "receiver.journal")
        self._destinations = (self._kafka, self._webhook)
        self._monitor = Monitor(signals, screen, self._destinations, load_seconds)

    def run(self) -> DemoReport:
        """Run the demo from the first server to the report."""
        database, processes = self._start_servers()
        endpoints, relays = self._start_processes(processes)
        address = self._serve_page(database, processes) if self._with_page else None
        undisturbed_until, rolled_back = self._run_load(database, processes, relays)
        committed = database.committed()
        self._wait_for_arrival(committed)
        if address is not None and sys.stdin.isatty():
            minutes = f"{STAY_SECONDS / 60:g} min"
            self._monitor.say(f"the page stays open for {minutes}: {address} (Ctrl-C ends the demo without its report)")
            self._monitor.wait(lambda: False, STAY_SECONDS)
        self._monitor.say("stopping the relays, then reading both destinations to the end")
        for process in (*relays, *endpoints):
            self._monitor.stop(process)
        for one in self._destinations:
            one.read()
        return DemoReport(
            [_destination_result(one, committed, undisturbed_until) for one in self._destinations],
            load_seconds=self._load_seconds,
            rolled_back=rolled_back,
            takeover_seconds=self._monitor.takeover_seconds,
        )

    def _start_servers(self) -> tuple[ShopDatabase, ShopProcesses]:
        """Start database and broker, and create the shop's database and the topic."""
        monitor = self._monitor
        monitor.say("starting PostgreSQL")
        postgres = self._stack.enter_context(PostgresServer())
        monitor.add_server("PostgreSQL", postgres.process)
        monitor.say("starting a Kafka-compatible broker")
        broker = self._stack.enter_context(Broker())
        monitor.add_server("the broker", broker.process)
        broker.create_topic(TOPIC)
        monitor.say("creating the shop's database with the outbox schema")
        postgres.create_database(DATABASE)
        dsn = postgres.dsn(DATABASE)
        migrate(dsn)
        database = ShopDatabase(dsn)
        self._stack.callback(database.close)
        database.prepare(rate_control.INITIAL)
        return database, ShopProcesses(
            self._stack, self._directory, dsn, broker.bootstrap, with_trouble=self._with_page
        )

    def _serve_page(self, database: ShopDatabase, processes: ShopProcesses) -> str:
        """Serve the page, and give it something to show: events that a destination refuses. Return its address."""
        process, address = processes.page()
        self._monitor.add(process)
        database.emit_invoices(INVOICES)
        self._monitor.say(f"the page is at {address}; sink invoices is in trouble, for you to look at")
        return address

    def _start_processes(self, processes: ShopProcesses) -> tuple[list[PythonProcess], list[RelayProcess]]:
        """Start consumer, receiver and two relays, and wait until the relays own every shard."""
        self._monitor.say("starting two relays, a Kafka consumer and a webhook receiver")
        endpoints = [processes.consumer(self._kafka.journal), processes.receiver(self._webhook.journal)]
        relays = [processes.relay("relay-1"), processes.relay("relay-2")]
        for process in (*endpoints, *relays):
            self._monitor.add(process)
        self._monitor.require(self._is_ready, READY_SECONDS, "the relays share the shards")
        return endpoints, relays

    def _is_ready(self) -> bool:
        return self._monitor.all_ready() and self._monitor.all_owned()

    def _run_load(
        self, database: ShopDatabase, processes: ShopProcesses, relays: list[RelayProcess]
    ) -> tuple[float, int]:
        """Run the load, kill a relay half-way and replace it in `relays`.

        Return the time until which deliveries were undisturbed, and the number of events that were rolled back.
        """
        monitor = self._monitor
        monitor.say(
            f"the shop opens for {self._load_seconds:g} s: {WRITERS} writers, orders and events in one transaction"
        )
        summary = self._directory / "shop.json"
        shop = processes.shop(summary)
        monitor.add(shop)
        monitor.open_shop(database)
        monitor.wait(lambda: monitor.elapsed_seconds >= self._load_seconds / 2, self._load_seconds)

        undisturbed_until = time.time() - UNDISTURBED_SECONDS
        owned = monitor.kill(relays.pop(0))
        monitor.say(f"relay-1 was killed with SIGKILL while it owned {owned} of {SHARDS} shards; relay-3 replaces it")
        relays.append(processes.relay("relay-3"))
        monitor.add(relays[-1])
        monitor.wait(lambda: monitor.elapsed_seconds >= self._load_seconds, self._load_seconds)

        monitor.say("the shop closes")
        monitor.stop(shop)
        return undisturbed_until, int(json.loads(summary.read_text())["rolled_back"])

    def _wait_for_arrival(self, committed: set[Identity]) -> None:
        """Wait until all events have arrived and all relays are ready to be stopped, at most ``ARRIVE_SECONDS``."""
        monitor = self._monitor
        monitor.say(f"{len(committed):,} events were committed; waiting for the last ones to arrive")
        monitor.wait(lambda: monitor.all_ready() and not self._any_missing(committed), ARRIVE_SECONDS)
        for one in self._destinations:
            if missing := one.missing(committed):
                monitor.say(f"{missing:,} events did not arrive at {one.name} within {ARRIVE_SECONDS:g} s")

    def _any_missing(self, committed: set[Identity]) -> bool:
        """Return True if an event has not arrived. The cheap comparison of counts comes first."""
        return any(one.distinct < len(committed) or one.missing(committed) for one in self._destinations)


def _destination_result(
    one: MonitoredDestination, committed: set[Identity], undisturbed_until: float
) -> DestinationResult:
    return DestinationResult(
        name=one.name,
        kind=one.kind,
        check=one.result(committed),
        refused_signatures=one.refused,
        latency=one.latency(),
        latency_before_kill=one.latency(emitted_before=undisturbed_until),
    )
