"""The parts of a drill: database, broker, destinations, shop and relays, started and watched."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from psycopg.conninfo import make_conninfo

from outbox_relay.domain.event import SHARDS
from outbox_relay.postgres.migrations import migrate
from outbox_relay.workbench.drill.database import DrillDatabase
from outbox_relay.workbench.drill.observer import Observer
from outbox_relay.workbench.embedded.broker import Broker
from outbox_relay.workbench.embedded.ports import LOOPBACK
from outbox_relay.workbench.embedded.postgres import PostgresServer
from outbox_relay.workbench.embedded.process import ProcessFailed
from outbox_relay.workbench.embedded.standby import NAME, StandbyServer
from outbox_relay.workbench.processes import PythonProcess, RelayProcess
from outbox_relay.workbench.shop.checker import Identity
from outbox_relay.workbench.shop.journal import Arrival, JournalReader
from outbox_relay.workbench.shop.processes import KAFKA, TOPIC, WEBHOOK, ShopProcesses
from outbox_relay.workbench.signals import Signals
from outbox_relay.workbench.watch import ProcessWatch

P = TypeVar("P", bound=PythonProcess)

DATABASE = "shop"
EVENTS_PER_SECOND = 200.0
POLL_SECONDS = 0.1
READY_SECONDS = 60.0


def write_line(line: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class Arrivals:
    """The arrivals at one destination, read from its journal as it grows."""

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self.all: list[Arrival] = []
        self.refused = 0
        """Number of requests with an invalid signature."""
        self._reader = JournalReader(journal)
        self._seen: set[Identity] = set()

    def read(self) -> None:
        """Read the new entries of the journal."""
        while entries := self._reader.read():
            arrived = [entry for entry in entries if entry is not None]
            self.refused += len(entries) - len(arrived)
            self.all += arrived
            self._seen |= {(each.key, each.number, each.uid) for each in arrived}

    def missing(self, committed: AbstractSet[Identity]) -> int:
        """Return the number of committed events that have not arrived yet."""
        return len(committed - self._seen)


class DrillEnvironment:
    """Everything that runs during a drill; closing `stack` ends it.

    Waiting methods raise :class:`~outbox_relay.workbench.signals.Interrupted` after a signal, and
    :class:`ProcessFailed` if a process has exited by itself.
    """

    def __init__(self, stack: ExitStack, signals: Signals, *, quick: bool) -> None:
        self.quick = quick
        self.observed: list[str] = []
        """Every line that was said, with its time."""
        self._stack = stack
        self._began = time.monotonic()
        self._directory = Path(tempfile.mkdtemp(prefix="outbox-drill-"))
        stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
        self._broken = self._directory / "broken"
        self.arrivals: Mapping[str, Arrivals] = {
            name: Arrivals(self._directory / f"{name}.journal") for name in (KAFKA, WEBHOOK)
        }
        self._watch = ProcessWatch(signals)
        self._relays: dict[str, RelayProcess] = {}
        self._standby: StandbyServer | None = None

    def pick(self, full: float, quick: float) -> float:
        """Return the value for this form of the drill."""
        return quick if self.quick else full

    def say(self, message: str) -> None:
        """Write a message with the elapsed time to stderr, unless a signal was received."""
        self._watch.check_signals()
        self.observed.append(f"{time.monotonic() - self._began:6.1f} s  {message}")
        write_line(self.observed[-1])

    # -- parts --------------------------------------------------------------------------------------------------

    def open(self, *, standby: bool) -> None:
        """Start all parts, and return when the relays own every shard."""
        self.say(f"starting PostgreSQL{', its synchronous standby' if standby else ''}, a broker and destinations")
        dsn = self._start_database(standby=standby)
        broker = self._stack.enter_context(Broker())
        self._watch.add_server("the broker", broker.process)
        broker.create_topic(TOPIC)
        self.database = DrillDatabase(dsn)
        self.database.prepare(EVENTS_PER_SECOND)
        self._processes = ShopProcesses(self._stack, self._directory, dsn, broker.bootstrap)
        self._consumer = self._add(self._processes.consumer(self.arrivals[KAFKA].journal))
        self.start_receiver()
        self.say("starting two relays and the shop")
        self.start_relay("relay-1")
        self.start_relay("relay-2")
        self.observer = Observer(lambda: list(self._relays.values()), dsn, self.say)
        self.require(self.shards_shared, READY_SECONDS, "the relays share the shards")
        summary = self._directory / "shop.json"
        self._shop = self._add(self._processes.shop(summary, "--reconnects", "--long-share", "0"))

    def _start_database(self, *, standby: bool) -> str:
        """Start the server or servers and return the connection string of the shop's database."""
        self._primary = self._stack.enter_context(PostgresServer(fsync=True))
        self._watch.add_server("PostgreSQL", self._primary.process)
        self._primary.create_database(DATABASE)
        migrate(self._primary.dsn(DATABASE))
        if not standby:
            return self._primary.dsn(DATABASE)
        self._standby = self._stack.enter_context(StandbyServer(self._primary, fsync=True))
        self._watch.add_server("the standby", self._standby.process)
        database = DrillDatabase(self._primary.dsn(DATABASE))
        database.wait_for_standby(NAME)
        self.require(lambda: database.is_synchronous(NAME), READY_SECONDS, "the standby is synchronous")
        ports = f"{self._primary.port},{self._standby.port}"
        return make_conninfo(
            self._primary.dsn(DATABASE), host=f"{LOOPBACK},{LOOPBACK}", port=ports, target_session_attrs="read-write"
        )

    def fail_over(self) -> tuple[float, float]:
        """Kill the primary and promote the standby; return both times, in seconds since 1970."""
        if self._standby is None:
            raise RuntimeError("this drill has no standby")
        self._watch.remove_server("PostgreSQL")
        killed = time.time()
        self._primary.kill()
        self._standby.promote()
        return killed, time.time()

    def start_relay(self, name: str) -> None:
        """Start a relay without waiting until it is ready."""
        self._relays[name] = self._add(self._processes.relay(name))

    def kill_relay(self, name: str) -> float:
        """Kill a relay and return the time, in seconds since 1970. It is scraped until it is replaced."""
        relay = self._relays[name]
        self._watch.remove(relay)
        at = time.time()
        relay.kill()
        return at

    def replace_relay(self, name: str, successor: str) -> None:
        """Start a relay in the place of one that was killed."""
        del self._relays[name]
        self.start_relay(successor)

    def start_receiver(self) -> float:
        """Start the receiver and return the time since which it listens, in seconds since 1970."""
        self._receiver = self._add(self._processes.receiver(self.arrivals[WEBHOOK].journal, self._broken))
        return time.time()

    def kill_receiver(self) -> float:
        """Kill the receiver and return the time, in seconds since 1970."""
        self._watch.remove(self._receiver)
        at = time.time()
        self._receiver.kill()
        return at

    def break_receiver(self) -> None:
        """Let the receiver refuse damaged orders from now on."""
        self._broken.touch()

    def mend_receiver(self) -> None:
        """Let it accept them again."""
        self._broken.unlink()

    def close_shop(self) -> None:
        """Stop the load."""
        self._stop(self._shop)

    def stop_all(self) -> None:
        """Stop relays and destinations, and read what arrived."""
        for process in (*self._relays.values(), self._consumer, self._receiver):
            self._stop(process)
        for each in self.arrivals.values():
            each.read()

    def shards_shared(self) -> bool:
        """Return True if every relay owns shards, and all of them together own every shard of each sink."""
        owned = [relay.shards() or {} for relay in self._relays.values()]
        return all(
            all(shards.get(sink) for shards in owned) and sum(shards.get(sink, 0) for shards in owned) == SHARDS
            for sink in (KAFKA, WEBHOOK)
        )

    def _add(self, process: P) -> P:
        self._watch.add(process)
        return process

    def _stop(self, process: PythonProcess) -> None:
        self._watch.remove(process)
        process.stop()

    # -- waiting ------------------------------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        """Observe for some time."""
        self.wait(lambda: False, seconds)

    def wait(self, fact: Callable[[], object], seconds: float) -> bool:
        """Observe until `fact` returns a true value; return False if that takes more than `seconds`."""
        deadline = time.monotonic() + seconds
        while not fact():
            if time.monotonic() > deadline:
                return False
            self._watch.check()
            for each in self.arrivals.values():
                each.read()
            self.observer.poll()
            time.sleep(POLL_SECONDS)
        return True

    def require(self, fact: Callable[[], object], seconds: float, what: str) -> None:
        """Wait without observing. Raise :class:`ProcessFailed` with the ends of all logs after `seconds`."""
        deadline = time.monotonic() + seconds
        while not fact():
            self._watch.check()
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{what}: not within {seconds:g} s{self._watch.log_tails()}")
            time.sleep(POLL_SECONDS)
