"""Watches processes, relays and destinations, updates the screen and sets the shop's emit rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from outbox_relay.domain.event import SHARDS
from outbox_relay.workbench.demo.rate_control import EmitRate
from outbox_relay.workbench.demo.screen import DemoState, DestinationState, RelayState, Screen
from outbox_relay.workbench.embedded.process import ProcessFailed, WatchedProcess
from outbox_relay.workbench.processes import PythonProcess, RelayProcess
from outbox_relay.workbench.shop.destinations import MonitoredDestination
from outbox_relay.workbench.shop.figures import RateMeter
from outbox_relay.workbench.shop.orders import ShopDatabase
from outbox_relay.workbench.signals import Signals
from outbox_relay.workbench.watch import ProcessWatch

POLL_SECONDS = 0.25
QUERY_SECONDS = 1.0
"""Interval between queries to relays and database."""
CATCH_UP_SECONDS = 4.0
"""Period after a takeover in which the emit rate is not changed."""


class Monitor:
    """Polls the demo four times a second while a caller waits.

    Waiting methods raise :class:`Interrupted` after a signal and :class:`ProcessFailed` if a process has exited.
    """

    def __init__(
        self, signals: Signals, screen: Screen, destinations: Sequence[MonitoredDestination], load_seconds: float
    ) -> None:
        self._watch = ProcessWatch(signals)
        self._screen = screen
        self._destinations = destinations
        self._load_seconds = load_seconds
        self._relays: dict[RelayProcess, RelayState] = {}
        self._database: ShopDatabase | None = None
        self._emit_rate = EmitRate()
        self._committed = 0
        self._commit_rate = RateMeter()
        self._queried_at = 0.0
        self._opened_at: float | None = None
        self._killed_at: float | None = None
        self._taken_over_at: float | None = None

    # -- processes ----------------------------------------------------------------------------------------------

    def add_server(self, name: str, server: WatchedProcess) -> None:
        """Watch a server."""
        self._watch.add_server(name, server)

    def add(self, process: PythonProcess) -> None:
        """Watch a process until it is stopped."""
        self._watch.add(process)
        if isinstance(process, RelayProcess):
            self._relays[process] = RelayState(process.name, "starting")

    def stop(self, process: PythonProcess) -> None:
        """Stop a process gracefully."""
        self._watch.remove(process)
        process.stop()

    def kill(self, relay: RelayProcess) -> int:
        """Kill a relay and return the number of shards of the first sink that it owned."""
        owned = self._relays[relay].shards.get(self._destinations[0].name, 0)
        self._watch.remove(relay)
        self._killed_at = time.monotonic()
        relay.kill()
        self._relays[relay] = RelayState(relay.name, "killed")
        return owned

    def open_shop(self, database: ShopDatabase) -> None:
        """Start the clock of the load; query the shop's database and control its emit rate from now on."""
        self._database = database
        self._opened_at = time.monotonic()

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def elapsed_seconds(self) -> float:
        """Return the time since the shop opened, 0 before that."""
        return 0.0 if self._opened_at is None else time.monotonic() - self._opened_at

    @property
    def takeover_seconds(self) -> float | None:
        """Return the time from the kill until the other relays owned every shard; None before that."""
        if self._killed_at is None or self._taken_over_at is None:
            return None
        return self._taken_over_at - self._killed_at

    def all_ready(self) -> bool:
        """Return True if all living relays are ready."""
        return all(relay.state in ("ready", "killed") for relay in self._relays.values())

    def all_owned(self) -> bool:
        """Return True if living relays own every shard of every sink."""
        living = [relay.shards for relay in self._relays.values() if relay.state != "killed"]
        return all(sum(shards.get(one.name, 0) for shards in living) == SHARDS for one in self._destinations)

    # -- waiting ------------------------------------------------------------------------------------------------

    def say(self, message: str) -> None:
        """Show a message, unless a signal was received."""
        self._watch.check_signals()
        self._screen.say(message)

    def wait(self, fact: Callable[[], bool], seconds: float) -> bool:
        """Poll until `fact` returns True. Return False if that takes more than `seconds`."""
        deadline = time.monotonic() + seconds
        while not fact():
            if time.monotonic() > deadline:
                return False
            self._poll()
        return True

    def require(self, fact: Callable[[], bool], seconds: float, what: str) -> None:
        """Poll until `fact` returns True. Raise :class:`ProcessFailed` with the ends of all logs after `seconds`."""
        if not self.wait(fact, seconds):
            raise ProcessFailed(f"{what}: not within {seconds:g} s; the ends of the logs:{self._watch.log_tails()}")

    def _poll(self) -> None:
        self._watch.check()
        for destination in self._destinations:
            destination.read()
        if time.monotonic() >= self._queried_at + QUERY_SECONDS:
            self._queried_at = time.monotonic()
            self._query_relays()
            self._query_shop()
        self._screen.show(self._state())
        time.sleep(POLL_SECONDS)

    def _query_relays(self) -> None:
        for relay, before in self._relays.items():
            if before.state != "killed":
                self._relays[relay] = self._queried(relay, before)
        if self._killed_at and not self._taken_over_at and self.all_owned():
            self._taken_over_at = time.monotonic()
            self.say(f"all shards are owned again, {self.takeover_seconds:.1f} s after the kill")

    def _queried(self, relay: RelayProcess, before: RelayState) -> RelayState:
        shards = relay.shards()
        if shards is None:
            return RelayState(relay.name, "starting" if before.state == "starting" else "no answer", before.shards)
        if before.state == "starting":
            self.say(f"{relay.name} is ready")
        return RelayState(relay.name, "ready", shards)

    def _query_shop(self) -> None:
        """Query the number of committed events and adjust the emit rate to the slowest destination."""
        if self._database is None:
            return
        self._committed = self._database.count()
        if not self._is_recovering():
            self._emit_rate = self._emit_rate.adjusted(max(self._backlog(one) for one in self._destinations))
            self._database.set_emit_rate(self._emit_rate.events_per_second)

    def _is_recovering(self) -> bool:
        """Return True if a backlog is due to the killed relay, not to a slow machine."""
        if self._killed_at is None:
            return False
        return self._taken_over_at is None or time.monotonic() < self._taken_over_at + CATCH_UP_SECONDS

    def _backlog(self, destination: MonitoredDestination) -> int:
        return max(0, self._committed - destination.distinct)

    def _state(self) -> DemoState:
        monotonic, wall = time.monotonic(), time.time()
        return DemoState(
            elapsed_seconds=self.elapsed_seconds,
            load_seconds=self._load_seconds,
            committed=self._committed,
            per_second=self._commit_rate.per_second(monotonic, self._committed),
            allowed_per_second=self._emit_rate.events_per_second,
            destinations=[
                DestinationState(
                    one.name,
                    one.kind,
                    one.distinct,
                    one.per_second(monotonic),
                    self._backlog(one),
                    one.recent_latency(wall),
                )
                for one in self._destinations
            ],
            relays=list(self._relays.values()),
        )
