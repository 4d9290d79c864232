"""One schedule: relays, writers, people, a destination and faults, a step at a time in the order of a seed.

The product's own loop, keeper, watchdog and waiter run, each in a greenlet of its own, on the database of ``database``.
A step ends at each call of the database, before it takes effect and again before its answer is there, and at each wait.
So a crash, a freeze of one thread alone or anything that another relay does falls between any two of them.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from unittest.mock import patch
from uuid import UUID

import structlog
from greenlet import greenlet

from outbox_relay.domain import sink_limits
from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.errors import DatabaseUnavailable, IncarnationChanged, RelayError, StatementFailed
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Refused, RetryPolicy, Unavailable, Verdict
from outbox_relay.domain.sink_limits import NO_LIMITS, SinkLimits
from outbox_relay.relay import keeper, limits, settle, sink_leases, ticks
from outbox_relay.relay.calls import RowWork, SentCall
from outbox_relay.relay.keeper import Keeper
from outbox_relay.relay.loop import SinkLoop
from outbox_relay.relay.outcomes import Parts
from outbox_relay.relay.sink_spec import SinkSpec
from outbox_relay.relay.ticks import Ticks
from outbox_relay.sinks.calls import Call, Sink
from outbox_relay.sinks.settings import SinkSettings
from tests.simulation.database import SHARDS, Contents, MemoryDatabase, Transaction

LEASE_SECONDS = 6.0
KINDS = ("batches", "requests", "queue")
MOST_TURNS = 50
"""Turns of a loop without a wait, a statement or a verdict after which it spins."""
REST_SECONDS = 300.0
"""Time after the last fault in which everything has to come to rest."""
SETTLES = ("settle", "park_window", "delete_rows")
ACTS = ("stop", "reload", "configure", "pause", "resume", "resume", "retry", "retry", "discard", "down", "stall")
"""The actions of people, deployments and destinations."""
QUIET = cast(Any, structlog.make_filtering_bound_logger(50))(structlog.PrintLogger(), (), {})
EVERY, FEWER = ("*",), ("a.b",)
"""The patterns of two configurations."""


class Violation(AssertionError):
    """A broken promise."""


class Crash(BaseException):
    """The process ends here."""


@dataclass
class Faults:
    """The probabilities of faults: per statement, per event, per step, and of the last two per thing that people do."""

    crash: float = 0.0005
    unavailable: float = 0.005
    zombie: float = 0.5
    """Of the statements that failed, the part that takes effect later."""
    hidden: float = 0.3
    """Of the changes of the server, the part that a proxy hides."""
    freeze: float = 0.001
    lost_answer: float = 0.01
    restore: float = 0.1
    seek: float = 0.1


class SimulatedLock:
    """A lock on which a thread of the simulation waits in steps."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held = False

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock."""
        while self._held and blocking:
            self._world.pause(0.001)
        taken, self._held = not self._held, True
        return taken

    def release(self) -> None:
        """Give it back."""
        self._held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(eq=False)
class Thread:
    """A thread of a relay, which stands between two steps."""

    name: str
    steps: greenlet
    at: float = 0.0
    """When it goes on."""
    frozen_until: float = 0.0
    ended: bool = False

    @property
    def due(self) -> float:
        """When its next step may be done."""
        return float("inf") if self.ended else max(self.at, self.frozen_until)


@dataclass
class SimulatedClock:
    """The clocks of one process, which run with the database's."""

    database: MemoryDatabase
    rng: random.Random

    def monotonic(self) -> float:
        """Return the time."""
        return self.database.time

    lease = monotonic

    def noise(self) -> float:
        """Return jitter."""
        return self.rng.uniform(-1, 1)


class SimulatedStore:
    """The database as one process sees it: calls may fail, lose their answer, or take effect after they failed."""

    pooler = False

    def __init__(self, world: World, relay: Relay) -> None:
        self._world = world
        self._relay = relay
        self.connection_losses = 0
        self._server = world.database.incarnation

    def as_sink(self, *, replay: bool) -> None:
        """Do nothing: connections are not counted."""

    def __getattr__(self, name: str) -> Any:
        method: Callable[..., Any] = getattr(self._world.database, name)

        def call(*args: Any, **named: Any) -> Any:
            return self._call(name, lambda: method(*args, **named))

        return call

    def _call(self, name: str, method: Callable[[], Any]) -> Any:
        world, faults, rng = self._world, self._world.faults, self._world.rng
        world.note(self._relay, f"asks {name}")
        for sink in self._relay.sinks:
            sink.turns = 0
        world.pause(rng.choice((0.0, 0.0, 0.001, 0.01)))
        if self._server != world.database.incarnation:
            self._server = world.database.incarnation
            if rng.random() >= faults.hidden:
                self._lose("the server is another one")
        luck = rng.random()
        if luck < faults.unavailable:
            if luck < faults.unavailable / 3:
                raise StatementFailed("it had to wait", "55P03")
            if rng.random() < faults.zombie:
                world.zombies.append((world.database.time + rng.expovariate(0.5), method))
                world.zombies.sort(key=lambda each: each[0])
            self._lose("the connection was lost")
        try:
            answer = method()
        except IncarnationChanged:
            self.connection_losses += 1
            raise
        if name in SETTLES:
            world.look_what_is_settled()
        if world.is_noted:
            world.note(self._relay, f"{name}: {answer!r:.300}")
        world.pause(0.0)
        if rng.random() < faults.unavailable:
            self._lose("the answer was lost")
        return answer

    def _lose(self, why: str) -> None:
        self.connection_losses += 1
        raise DatabaseUnavailable(why)


class SimulatedSink(Sink):
    """A client with a queue: what was passed to it is sent later, whether or not its loop runs."""

    timeout_seconds = 3.0
    max_in_flight = 3

    def __init__(self, world: World, relay: Relay) -> None:
        self._world = world
        self._relay = relay
        self.keeps_order = world.kind == "batches"
        self.max_batch = 4 if self.keeps_order else 1
        self._verdicts: dict[Call, list[Verdict | None]] = {}
        """The verdicts so far of the calls in flight, by event."""
        self._passed: list[tuple[Call, int]] = []
        """The events that the client has, and sends without looking at a lease."""
        self._ended: list[Call] = []
        self._broken: dict[str, Unavailable] = {}
        """The keys of which an event was not delivered, with what becomes of the later ones."""
        self.thread: Thread | None = None
        self.frozen_until = 0.0
        self.turns = 0
        """The number of consecutive turns of the loop that waited for nothing and did nothing."""

    @property
    def works(self) -> bool:
        """True if a call is in flight, unless the process stands still."""
        return bool(self._verdicts) and self._world.database.time >= self.frozen_until

    def submit(self, call: Call) -> None:
        """Queue a call."""
        self._world.note(self._relay, f"submits {[event.id for event in call.events]}")
        self._verdicts[call] = [None] * len(call.events)

    def work(self) -> None:
        """Pass one event to the client, or let that send one."""
        rng = self._world.rng
        waiting = [(call, n) for call, verdicts in self._verdicts.items() for n, v in enumerate(verdicts) if v is None]
        waiting = [each for each in waiting if each not in self._passed]
        if self._passed and (not waiting or rng.random() < 0.5):
            place = 0 if self.keeps_order else rng.randrange(len(self._passed))
            call, index = self._passed.pop(place)
            self._answer(call, index, self._world.arrive(call, call.events[index], self._relay))
        elif waiting:
            call, index = waiting[0 if self.keeps_order else rng.randrange(len(waiting))]
            self._pass(call, index)

    def _pass(self, call: Call, index: int) -> None:
        event = call.events[index]
        if self._world.database.time >= call.until:
            self._answer(call, index, Unavailable("the lease has ended", untouched=isinstance(_work(call), RowWork)))
        elif event.key is not None and event.key in self._broken:
            self._answer(call, index, self._broken[event.key])
        elif self.keeps_order:
            self._passed.append((call, index))
        else:  # a request is on its way at once
            self._answer(call, index, self._world.arrive(call, event, self._relay))

    def _answer(self, call: Call, index: int, verdict: Verdict) -> None:
        event = call.events[index]
        if self.keeps_order and isinstance(verdict, Failed):
            verdict = Unavailable(verdict.reason)  # such a client tries again by itself, or gives up in order
        stops = isinstance(verdict, Unavailable) or (self._world.hold and isinstance(verdict, Refused))
        if self.keeps_order and stops and event.key is not None:
            self._broken[event.key] = late = Unavailable("an earlier one stops it", behind=isinstance(verdict, Refused))
            behind = [each for each in self._passed if each[0].events[each[1]].key == event.key]
            self._passed = [each for each in self._passed if each not in behind]
            for other, place in behind:
                self._verdicts[other][place] = late
        self._verdicts[call][index] = verdict
        if verdict is not DELIVERED:
            self._world.note(self._relay, f"{event.id} {event.key}: {verdict!r:.200}")
        for each in [each for each, verdicts in self._verdicts.items() if None not in verdicts]:
            verdicts = cast(list[Verdict], self._verdicts.pop(each))
            each.end(None if all(v is DELIVERED for v in verdicts) else verdicts)
            self._ended.append(each)
            self.wake()

    def completed(self, seconds: float) -> Sequence[Call]:
        """Return the calls that have ended, after a wait."""
        self.turns = self.turns + 1 if seconds <= 0 and not self._ended else 0
        if self.turns > MOST_TURNS:
            raise Violation(f"the loop of {self._relay.name} spins")
        if not self._ended:
            self._world.pause(seconds)
        ended, self._ended = self._ended, []
        if not self._verdicts:
            self._broken.clear()
        return ended

    def wake(self) -> None:
        """End the wait."""
        if self.thread is not None:
            self.thread.at = min(self.thread.at, self._world.database.time)

    def withdraw(self) -> None:
        """Forget all calls."""
        self._verdicts.clear()
        self._passed.clear()
        self._ended.clear()
        self._broken.clear()

    def purge(self) -> None:
        """Send nothing that is in the queue of the client."""
        if passed := self._passed:
            self._world.note(self._relay, "purges")
            self._passed = []
            for call, index in passed:
                if self._verdicts[call][index] is None:
                    self._answer(call, index, Unavailable("the lease has ended"))

    def close(self) -> None:
        """Send nothing more."""
        self.withdraw()


def _work(call: Call) -> object:
    return cast(SentCall, call).work[0]


class NoListener:
    """Nothing wakes an idle relay but its own ticks."""

    def begin_listening(self) -> bool:
        """Do nothing: there is no connection."""
        return False

    def sleep(self, seconds: float) -> bool:
        """Do nothing: this is not called."""
        return False

    def stop_listening(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Relay:
    """One relay process, and its threads."""

    def __init__(self, world: World, number: int, patterns: tuple[str, ...]) -> None:
        self._world = world
        self.name = f"relay {number}"
        self.id = UUID(int=world.rng.getrandbits(128))
        self.patterns = patterns
        self.store = store = cast(Any, SimulatedStore(world, self))
        clock = self._clock = SimulatedClock(world.database, world.rng)
        self.keeper = Keeper(store, self.id, self.name, "0", LEASE_SECONDS, QUIET, clock=clock.lease)
        self.keeper._refreshing = cast(Any, SimulatedLock(world))  # pyright: ignore[reportPrivateUsage]
        self.keeper._registering = cast(Any, SimulatedLock(world))  # pyright: ignore[reportPrivateUsage]
        self.ticks = Ticks(store.tick, NoListener(), QUIET, clock=clock.monotonic)
        self.stopping = self.crashed = False
        self.sinks: list[SimulatedSink] = []
        self.loop: SinkLoop
        self.threads: list[Thread] = []
        self._begin("keeper", self._keep)
        self._begin("watchdog", self._watch)
        self._begin("waiter", self._tick)
        self.serve(world.database.register(patterns))

    def _begin(self, name: str, run: Callable[[], None]) -> Thread:
        thread = Thread(name, greenlet(run, parent=self._world.scheduler))
        self.threads.append(thread)
        return thread

    def serve(self, generation: int) -> None:
        """Serve the sink with another loop. One that served it before has left."""
        world = self._world
        sink = SimulatedSink(world, self)
        spec = world.spec(self.patterns)
        leases = self.keeper.add("a", generation, limits=world.limits, routes=spec.routes)
        leases.claiming = cast(Any, SimulatedLock(world))
        parts = Parts(spec, sink, self.store, leases, self.id, QUIET, self._clock)
        self.loop = SinkLoop(parts, self.keeper, self.ticks)
        self.sinks = [sink]
        self.threads = [thread for thread in self.threads if not thread.ended]
        self.loop_thread = sink.thread = self._begin("loop", self.loop.run)

    def stop(self) -> None:
        """Do as at SIGTERM."""
        self.stopping = True
        self.keeper.stop()
        self.loop.stop()

    def reload(self, patterns: tuple[str, ...]) -> None:
        """Use another configuration, with another loop once the present one has left."""
        self.patterns = patterns
        self.loop.stop()

    def _keep(self) -> None:
        while not self.keeper._over.is_set():  # pyright: ignore[reportPrivateUsage]
            try:
                self.keeper.round()
            except RelayError as error:
                self._world.note(self, f"keeper: {error}")
            self._world.pause(0.8)

    def _watch(self) -> None:
        while True:
            self._world.pause(max(0.01, self.keeper.purge_lapsed()))

    def _tick(self) -> None:
        while True:
            try:
                self.ticks.poll()
            except RelayError as error:
                self._world.note(self, f"waiter: {error}")
            self._world.pause(0.4)

    def end(self) -> None:
        """End the process: nothing of it does another step, and nothing is sent."""
        self.crashed = True
        for sink in self.sinks:
            sink.withdraw()
        for thread in self.threads:
            thread.ended = True


@dataclass
class World:
    """The state of a schedule, and what has arrived."""

    seed: int
    kind: str | None = None
    """The kind of sink; None for that of the seed."""
    holds: bool | None = None
    """True if dead letters hold their keys; None means as the seed says."""
    given_faults: Faults | None = None
    """The faults; None for those of the seed."""
    acts: Sequence[str] = ACTS
    events: int = 80
    is_noted: bool = False
    notes: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.kind = self.kind or KINDS[self.seed % 3]
        self.faultless = self.given_faults is None and rng.random() < 0.25
        self.faults = self.given_faults or (Faults(*[0.0] * 8) if self.faultless else Faults())
        if self.given_faults is None and rng.random() < 0.5:
            self.faults.restore = self.faults.seek = 0.0
        self.hold = self.kind != "queue" and rng.random() < 0.3 if self.holds is None else self.holds
        self.limits = NO_LIMITS
        if rng.random() < 0.3:
            self.limits = SinkLimits(max_in_flight_total=4, spread_seconds=rng.choice((None, 2.0)))
        self.database = MemoryDatabase("rows" if self.kind == "queue" else "log", hold=self.hold, limits=self.limits)
        self.scheduler = greenlet(self._schedule)
        self.thread: Thread | None = None
        self.zombies: list[tuple[float, Callable[[], Any]]] = []
        self.saved: Contents | None = None
        self.down_until = 0.0
        self.arrived: Counter[str] = Counter()
        self.routed: dict[str, bool] = {}
        """By uid, true for an event that must arrive: one of a type that every configuration of its time routes."""
        self.others: list[str] = []
        """The events of the type that one configuration does not route."""
        self.phantoms: set[str] = set()
        self.discarded: set[str] = set()
        self.poison: set[str] = set()
        """The events that fail always."""
        self.died: set[str] = set()
        self.refused: set[str] = set()
        self.repeated: set[str] = set()
        """The events that a statement passed which took effect after it was given up."""
        self.settled: set[str] = set()
        """The events that a position has passed, and of which no row is left."""
        self.writers: dict[str, Transaction] = {}
        self.write_at = self.meddle_at = 0.0
        self.count = 0
        self.relays: list[Relay] = []

    def spec(self, patterns: tuple[str, ...]) -> SinkSpec:
        """Return the sink as the configuration with these patterns has it."""
        settings = SinkSettings(
            type="memory",
            claim="rows" if self.kind == "queue" else "log",
            start="beginning",
            when_dead="hold" if self.hold else "skip",
            retry=RetryPolicy(attempts=4, base_seconds=0.2, max_seconds=2.0),
            circuit=CircuitPolicy(open_after=5, probe_seconds=0.2, probe_max_seconds=2.0),
            max_in_flight_total=self.limits.max_in_flight_total or 0,
            spread_seconds=self.limits.spread_seconds or 0.0,
        )
        return SinkSpec("a", patterns, settings, park_after_seconds=0.5)

    def _new_relay(self, patterns: tuple[str, ...]) -> None:
        self.count += 1
        self.relays.append(Relay(self, self.count, patterns))

    def note(self, relay: Relay | None, what: str) -> None:
        """Keep a line of the schedule."""
        if self.is_noted:
            who = f"{relay.name} {self.thread.name if self.thread else '-'}" if relay else "-"
            self.notes.append(f"{self.database.time:9.3f} {who}: {what}")

    # -- steps --------------------------------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        """End the step of the present thread, which goes on after ``seconds``, or when it is woken."""
        thread = self.thread
        if thread is None:  # a part of the world itself
            return
        thread.at = self.database.time + seconds
        self.scheduler.switch()

    def run(self) -> None:
        """Run the schedule to its end, and judge it."""
        with self._clocks():
            self.scheduler.switch()

    @contextmanager
    def _clocks(self) -> Generator[None]:
        """Give the product this world's time, fewer shards, and fewer looks than a second has."""
        with ExitStack() as stack:
            stack.enter_context(patch.object(time, "monotonic", lambda: self.database.time))
            stack.enter_context(patch.object(time, "sleep", self.pause))
            stack.enter_context(patch.object(ticks, "PACE_SECONDS", 0.005))
            for module in (keeper, limits, sink_leases, settle, sink_limits):
                stack.enter_context(patch.object(module, "SHARDS", SHARDS))
            yield

    def _schedule(self) -> None:
        patterns = self.rng.choice((EVERY, EVERY, FEWER))
        for _ in range(2):
            self._new_relay(patterns)
        while self.database.emitted < self.events or self.writers:
            self._act()
        self.faults = Faults(*[0.0] * 8)
        self.down_until = 0.0
        self.database.contents.paused = False
        for relay in self.relays:
            if relay.patterns != EVERY:
                relay.reload(EVERY)
        self.note(None, "no faults from here on")
        until = self.database.time + REST_SECONDS
        while left := self._left():
            for _ in range(50):
                self._act()
            if self.database.time > until:
                raise Violation(f"stuck: {left[:5]}")
        self._judge()

    def _act(self) -> None:
        """Let one thread, writer, client or person do one thing."""
        rng, now = self.rng, self.database.time
        if self.zombies and self.zombies[0][0] <= now:
            self._revive()
        due: list[tuple[Relay, Thread]] = []
        sinks: list[SimulatedSink] = []
        ahead = self.write_at if self.write_at > now else now
        for relay in self.relays:
            for thread in relay.threads:
                at = thread.due
                if at <= now:
                    due.append((relay, thread))
                else:
                    ahead = min(ahead, at) if ahead > now else at
            sinks += [sink for sink in relay.sinks if sink.works]
        luck = rng.random()
        if luck < 0.3 and now >= self.write_at:
            self._write()
        elif sinks and (luck < 0.5 or not due):
            rng.choice(sinks).work()
        elif due:
            self._step(*rng.choice(due))
        else:
            self.database.time = max(now, ahead)
        self.database.time += rng.choice((0.0, 0.0, 0.0005, 0.002))
        if now >= self.meddle_at and self.database.emitted < self.events:
            self.meddle_at = now + rng.expovariate(0.7)
            self._meddle()
        self._mend()

    def _step(self, relay: Relay, thread: Thread) -> None:
        faults, rng = self.faults, self.rng
        luck = rng.random()
        if luck < faults.crash:
            self.note(relay, "crashes")
            relay.end()
            return
        if luck < faults.crash + faults.freeze:
            self._freeze(relay, thread)
            return
        self.thread = thread
        thread.at = float("inf")
        try:
            thread.steps.switch()
        finally:
            self.thread = None
        if thread.steps.dead:
            thread.ended = True

    def _freeze(self, relay: Relay, thread: Thread) -> None:
        """Freeze one thread, or the whole process with its client, for up to two leases."""
        until = self.database.time + self.rng.uniform(0, 2 * LEASE_SECONDS)
        whole = thread.name == "watchdog"  # alone, nothing would look at the clock
        self.note(relay, f"{'all' if whole else thread.name} freezes until {until:.3f}")
        for each in relay.threads if whole else [thread]:
            each.frozen_until = until
        for sink in relay.sinks if whole or self.rng.random() < 0.3 else ():
            sink.frozen_until = max(sink.frozen_until, until if whole else self.database.time + self.rng.uniform(0, 8))

    def _revive(self) -> None:
        """Let a statement take effect whose caller has given it up."""
        _, statement = self.zombies.pop(0)
        self.note(None, "a statement that was given up takes effect")
        before = {event.uid for _, event in self.database.contents.log if self.database.passed(event)}
        try:
            statement()
        except RelayError:
            return
        passed = {event.uid for _, event in self.database.contents.log if self.database.passed(event)}
        self.repeated |= passed - before  # its owner began behind it, and may have them in hand

    def _mend(self) -> None:
        """Begin what has to begin: another relay for one that ended, another loop for one that left."""
        if self.database.contents.patterns != EVERY and self.others:
            self.routed.update(dict.fromkeys(self.others, False))
            self.others.clear()
        for relay in list(self.relays):
            loop = relay.loop_thread
            if loop.ended and relay.stopping:
                self._check_left(relay)
                relay.end()
            elif loop.ended and not relay.crashed:
                relay.keeper.discard("a")
                relay.serve(self.database.register(relay.patterns))
            if relay.crashed:
                self.relays.remove(relay)
                self._new_relay(self.database.contents.patterns)

    def _check_left(self, relay: Relay) -> None:
        contents = self.database.contents
        if not self.faultless:
            return
        if any(shard.owner == relay.id for shard in contents.shards):
            raise Violation(f"{relay.name} left and owns shards")
        if any(row.owner == relay.id and row.state != "dead" for row in contents.rows.values()):
            raise Violation(f"{relay.name} left and has rows")
        self.database.forget_relay(relay.id)

    # -- writers and people ---------------------------------------------------------------------------------------

    def _write(self) -> None:
        """Let a writer begin, emit or end. Writers of one key exclude each other."""
        rng, database = self.rng, self.database
        if database.emitted >= self.events and not self.writers:
            self.write_at = float("inf")
            return
        self.write_at = database.time + (rng.uniform(0, 3) if rng.random() < 0.07 else rng.uniform(0, 0.005))
        key = rng.choice("abcdefgh")
        if key not in self.writers:
            if database.emitted < self.events:
                self.writers[key] = database.begin()
            return
        if rng.random() < 0.4:
            transaction = self.writers.pop(key)
            commit = rng.random() < 0.9
            database.end(transaction, commit=commit)
            # A type that the newest configuration does not route may or may not arrive.
            is_routed = database.contents.patterns == EVERY
            for event in transaction.events if commit else ():
                if rng.random() < 0.02:
                    self.poison.add(event.uid)
                self.routed[event.uid] = event.type == "a.b" or is_routed
                if event.type != "a.b":
                    self.others.append(event.uid)
        else:
            database.emit(
                self.writers[key],
                None if key == "h" else key,
                scheduled=rng.random() < 0.05,
                fault="too large" if rng.random() < 0.01 else None,
                type=rng.choice(("a.b", "a.b", "c.d")),
            )

    def _meddle(self) -> None:
        """Let a person, a deployment or an operator do something."""
        rng, database = self.rng, self.database
        relay = rng.choice(self.relays)
        what = rng.choice(self.acts)
        self.note(relay, what)
        match what:
            case "stop" if not relay.stopping:
                relay.stop()
            case "reload" if not relay.stopping:
                relay.reload(relay.patterns)
            case "configure" if not relay.stopping and relay.patterns == FEWER:
                relay.reload(EVERY)
            case "pause":
                database.contents.paused = True
            case "resume":
                database.contents.paused = False
            case "retry":
                database.retry(rng)
            case "discard":
                if (uid := database.discard(rng)) is not None:
                    self.discarded.add(uid)
            case "stall":
                relay.sinks[0].frozen_until = database.time + rng.uniform(0, 8)
            case "down":
                self.down_until = database.time + rng.uniform(0, 5)
            case _:
                pass
        if rng.random() < 0.1:
            self.saved = database.save()
        luck = rng.random()
        if luck < self.faults.restore and self.saved is not None:
            self._restore(self.saved)
        elif luck < self.faults.restore + self.faults.seek:
            self.note(None, "all positions are set back")
            self.settled.clear()
            database.seek()

    def _restore(self, saved: Contents) -> None:
        """Go back to a copy of the database. What was emitted since was never committed."""
        self.note(None, "the database is restored")
        before = {event.uid for _, event in self.database.contents.log}
        self.database.restore(saved)
        self.writers.clear()
        self.settled.clear()
        self.phantoms |= before - {event.uid for _, event in saved.log}
        self.discarded = set(saved.discarded.values())

    # -- the destination ------------------------------------------------------------------------------------------

    def arrive(self, call: Call, event: StoredEvent, relay: Relay) -> Verdict:
        """Return the answer to one event, which arrives unless the destination is down or refuses it."""
        session = relay.loop.session
        is_stale = session is not None and session.settler.server != self.database.incarnation
        self._check_leases(cast(SentCall, call), event, relay)
        if event.uid in self.settled and not is_stale:
            raise Violation(f"{event.id} arrives, which was settled before")
        if self.database.time < self.down_until:
            return Unavailable("down")
        luck = self.rng.random()
        if event.uid in self.poison:
            self.refused.add(event.uid)
            return Refused("always") if self.kind == "batches" else Failed("always")
        if luck < 0.005:
            self.refused.add(event.uid)
            return Refused("never")
        if luck < 0.03:
            return Failed("failed")
        self.note(relay, f"arrives {event.id} {event.key}")
        self._check_order(event)
        self.arrived[event.uid] += 1
        if self.rng.random() < self.faults.lost_answer:
            return Unavailable("no answer") if self.rng.random() < 0.5 else Failed("no answer")
        return DELIVERED

    def _check_leases(self, call: SentCall, event: StoredEvent, relay: Relay) -> None:
        """Check that a lease is valid at each arrival: of the shard, or of the row that the call has."""
        session = relay.loop.session
        if session is None or session.settler.server != self.database.incarnation:
            return  # it does not know of the other server yet
        now, contents = self.database.time, self.database.contents
        shard, row, work = contents.shards[event.shard], contents.rows.get(event.id), _work(call)
        if shard.owner == relay.id and self.database.lives(relay.id) and (call.slow or not isinstance(work, RowWork)):
            return
        rows = work.rows if isinstance(work, RowWork) else ()
        leases = {each.lease for each in rows if each.event.id == event.id}
        if row is not None and row.lease in leases and row.lease_until > now:
            return
        if row is not None and row.state == "dead" and row.lease is None:
            return
        raise Violation(f"{relay.name} sends {event.id} of shard {event.shard} without a lease")

    def look_what_is_settled(self) -> None:
        """Note which events are over for good."""
        database = self.database
        for _, event in database.contents.log:
            is_left = event.uid in self.repeated or event.id in database.contents.rows
            if event.uid not in self.settled and not is_left and database.passed(event):
                self.settled.add(event.uid)

    def _check_order(self, event: StoredEvent) -> None:
        if event.fault is not None:
            raise Violation(f"{event.id} arrived, which cannot be delivered")
        if event.uid in self.phantoms:
            return
        if event.uid not in self.routed:
            raise Violation(f"{event.id} arrived and is not committed")
        if event.uid in self.discarded:
            raise Violation(f"{event.id} arrived and was discarded")
        if self.faultless and self.arrived[event.uid]:
            raise Violation(f"{event.id} arrived twice")
        if event.key is None or self.kind == "queue" or self.arrived[event.uid] or event.deliver_at is not None:
            return
        contents = self.database.contents
        dead = {row.event.uid for row in contents.rows.values() if row.state == "dead"}
        self.died |= dead
        excused = self.discarded if self.hold else self.discarded | self.died | self.refused
        order = contents.commits[event.key]
        by_uid = {logged.uid: logged for _, logged in contents.log}
        for uid in order[: order.index(event.uid)]:
            earlier = by_uid[uid]
            is_bound = self.routed[uid] and earlier.fault is None and earlier.deliver_at is None
            if is_bound and not self.arrived[uid] and uid not in excused:
                raise Violation(f"{event.id} of key {event.key} arrived before {earlier.id}")

    # -- the end --------------------------------------------------------------------------------------------------

    def _left(self) -> list[int]:
        """Return the ids of events that have neither arrived nor died, or whose rows are to be delivered."""
        contents = self.database.contents
        self.died |= {row.event.uid for row in contents.rows.values() if row.state == "dead"}
        dead_keys = {row.event.key for row in contents.rows.values() if self.hold and row.state == "dead"}
        left: list[int] = []
        for _, event in contents.log:
            row = contents.rows.get(event.id)
            is_waiting = row is not None and row.state != "dead" and (event.key is None or event.key not in dead_keys)
            is_over = (
                self.arrived[event.uid] or event.uid in self.discarded or event.uid in self.died or row is not None
            )
            if is_waiting or (self.routed[event.uid] and not is_over):
                left.append(event.id)
        return left

    def _judge(self) -> None:
        if self.faultless:
            never = self.discarded | self.died
            wrong = [u for u, routed in self.routed.items() if routed and self.arrived[u] != 1 and u not in never]
            wrong = [uid for uid in wrong if any(event.uid == uid for _, event in self.database.contents.log)]
            if wrong and not self.hold:
                raise Violation(f"arrived other than once: {wrong[:5]}")


def run_seed(seed: int) -> None:
    """Run the schedule of a seed. Raise if it breaks a promise, or if anything ends that should not."""
    World(seed).run()


__all__ = ["DELIVERED", "Thread", "Violation", "World", "defaultdict", "run_seed"]
