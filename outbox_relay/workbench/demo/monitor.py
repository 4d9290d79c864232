"""The monitor: are all parts alive, what has arrived, who owns what; shows it, and sets the shop's pace by it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from outbox_relay.domain.event import SHARDS
from outbox_relay.workbench.demo.destinations import MonitoredDestination
from outbox_relay.workbench.demo.figures import RateMeter
from outbox_relay.workbench.demo.rate_control import EmitRate
from outbox_relay.workbench.demo.screen import DemoState, DestinationState, RelayState, Screen
from outbox_relay.workbench.demo.shop import ShopDatabase
from outbox_relay.workbench.embedded.process import ProcessFailed, WatchedProcess
from outbox_relay.workbench.processes import PythonProcess, RelayProcess
from outbox_relay.workbench.signals import Signals

LOOK_SECONDS = 0.25
ASK_SECONDS = 1.0
"""How often relays and database are asked."""
CATCH_UP_SECONDS = 4.0
"""How long after a take-over the shop's pace is left as it is."""


class Monitor:
    """Everything that runs, looked at four times a second for as long as somebody waits for something.

    Whatever waits here raises :class:`Interrupted` after a signal and :class:`ProcessFailed` when a part has ended.
    """

    def __init__(
        self, signals: Signals, screen: Screen, destinations: Sequence[MonitoredDestination], load_seconds: float
    ) -> None:
        self._signals = signals
        self._screen = screen
        self._destinations = destinations
        self._load_seconds = load_seconds
        self._servers: dict[str, WatchedProcess] = {}
        self._processes: list[PythonProcess] = []
        self._relays: dict[RelayProcess, RelayState] = {}
        self._books: ShopDatabase | None = None
        self._pace = EmitRate()
        self._committed = 0
        self._rate = RateMeter()
        self._asked_at = 0.0
        self._opened_at: float | None = None
        self._killed_at: float | None = None
        self._taken_over_at: float | None = None

    # -- what is looked at --------------------------------------------------------------------------------------

    def add_server(self, name: str, server: WatchedProcess) -> None:
        """A server that must not end."""
        self._servers[name] = server

    def add(self, process: PythonProcess) -> None:
        """A part that must not end until it is stopped."""
        self._processes.append(process)
        if isinstance(process, RelayProcess):
            self._relays[process] = RelayState(process.name, "starting")

    def stop(self, process: PythonProcess) -> None:
        """Stop a process in order."""
        self._processes.remove(process)
        process.stop()

    def kill(self, relay: RelayProcess) -> int:
        """Kill a relay; returns how many shards of the first sink it owned."""
        owned = self._relays[relay].shards.get(self._destinations[0].name, 0)
        self._processes.remove(relay)
        self._killed_at = time.monotonic()
        relay.kill()
        self._relays[relay] = RelayState(relay.name, "killed")
        return owned

    def open(self, books: ShopDatabase) -> None:
        """The shop opens: from now on its books are asked and its pace is set."""
        self._books = books
        self._opened_at = time.monotonic()

    # -- what is known ------------------------------------------------------------------------------------------

    @property
    def passed_seconds(self) -> float:
        """How long the shop has been open."""
        return 0.0 if self._opened_at is None else time.monotonic() - self._opened_at

    @property
    def takeover_seconds(self) -> float | None:
        """How long after the kill living relays were seen to own every shard again; None before that."""
        if self._killed_at is None or self._taken_over_at is None:
            return None
        return self._taken_over_at - self._killed_at

    def all_ready(self) -> bool:
        """Are all living relays ready?"""
        return all(relay.state in ("ready", "killed") for relay in self._relays.values())

    def all_owned(self) -> bool:
        """Do living relays own every shard of every sink?"""
        living = [relay.shards for relay in self._relays.values() if relay.state != "killed"]
        return all(sum(shards.get(one.name, 0) for shards in living) == SHARDS for one in self._destinations)

    # -- waiting ------------------------------------------------------------------------------------------------

    def say(self, news: str) -> None:
        """Show what happens next; between two such steps there is a look at the signals."""
        self._signals.check()
        self._screen.say(news)

    def wait(self, fact: Callable[[], bool], seconds: float) -> bool:
        """Look until `fact` is true; False when `seconds` have passed before that."""
        deadline = time.monotonic() + seconds
        while not fact():
            if time.monotonic() > deadline:
                return False
            self._look()
        return True

    def require(self, fact: Callable[[], bool], seconds: float, what: str) -> None:
        """Look until `fact` is true; raises :class:`ProcessFailed` with the ends of all logs when it is not in time."""
        if not self.wait(fact, seconds):
            logs = "".join(f"\n{process.name}: {process.log_tail()}" for process in self._processes)
            raise ProcessFailed(f"{what}: not within {seconds:g} s; the ends of the logs:{logs}")

    def _look(self) -> None:
        self._check()
        for destination in self._destinations:
            destination.read()
        if time.monotonic() >= self._asked_at + ASK_SECONDS:
            self._asked_at = time.monotonic()
            self._ask_relays()
            self._ask_shop()
        self._screen.show(self._now())
        time.sleep(LOOK_SECONDS)

    def _check(self) -> None:
        self._signals.check()
        for name, server in self._servers.items():
            if not server.alive:
                raise ProcessFailed(f"{name} ended by itself; the end of its log:\n{server.log_tail()}")
        for process in self._processes:
            process.check()

    def _ask_relays(self) -> None:
        for relay, before in self._relays.items():
            if before.state != "killed":
                self._relays[relay] = self._asked(relay, before)
        if self._killed_at and not self._taken_over_at and self.all_owned():
            self._taken_over_at = time.monotonic()
            self.say(f"every shard has a living owner again, {self.takeover_seconds:.1f} s after the kill")

    def _asked(self, relay: RelayProcess, before: RelayState) -> RelayState:
        shards = relay.shards()
        if shards is None:
            return RelayState(relay.name, "starting" if before.state == "starting" else "no answer", before.shards)
        if before.state == "starting":
            self.say(f"{relay.name} is ready")
        return RelayState(relay.name, "ready", shards)

    def _ask_shop(self) -> None:
        """Ask what is committed, and let the shop be as fast as the slowest destination."""
        if self._books is None:
            return
        self._committed = self._books.count()
        if not self._is_recovering():
            self._pace = self._pace.adjusted(max(self._behind(one) for one in self._destinations))
            self._books.set_rate(self._pace.events_per_second)

    def _is_recovering(self) -> bool:
        """Is a destination behind because a relay was killed, and not because this machine is slow?"""
        if self._killed_at is None:
            return False
        return self._taken_over_at is None or time.monotonic() < self._taken_over_at + CATCH_UP_SECONDS

    def _behind(self, destination: MonitoredDestination) -> int:
        return max(0, self._committed - destination.distinct)

    def _now(self) -> DemoState:
        clock, wall = time.monotonic(), time.time()
        return DemoState(
            passed_seconds=self.passed_seconds,
            load_seconds=self._load_seconds,
            committed=self._committed,
            per_second=self._rate.per_second(clock, self._committed),
            pace=self._pace.events_per_second,
            destinations=[
                DestinationState(
                    one.name, one.kind, one.distinct, one.per_second(clock), self._behind(one), one.recent(wall)
                )
                for one in self._destinations
            ],
            relays=list(self._relays.values()),
        )
