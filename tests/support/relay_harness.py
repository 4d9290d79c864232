"""A relay inside the test: the parts that the service composes, with any sink, on a real database."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import psycopg
import structlog

from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.errors import DatabaseUnavailable, RelayError, SessionReset, StatementFailed
from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.in_flight import BlockedKeys, ShardGroup
from outbox_relay.domain.outcomes import RetryPolicy
from outbox_relay.domain.window import Tick, nothing_new
from outbox_relay.postgres.connection import Connection, direct
from outbox_relay.postgres.database import CALL_SECONDS
from outbox_relay.postgres.listener import CommitListener
from outbox_relay.postgres.store import Store
from outbox_relay.relay.chores import ScheduledEvents
from outbox_relay.relay.keeper import Keeper
from outbox_relay.relay.loop import SURVIVED, SinkLoop
from outbox_relay.relay.outcomes import Parts
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.sink_spec import PARK_AFTER_SECONDS, SinkSpec
from outbox_relay.relay.ticks import Ticks
from outbox_relay.service.replays import Replays
from outbox_relay.service.sinks import ServedSink
from outbox_relay.service.supervisor import Supervisor
from outbox_relay.sinks.calls import Sink
from outbox_relay.sinks.posting import EventLoopThread, PostingSink
from outbox_relay.sinks.settings import SinkSettings
from tests.support.memory_sink import OrderedSink
from tests.support.wait import until

RETRY = RetryPolicy(attempts=5, base_seconds=0.02, max_seconds=0.1, jitter=0.2)
CIRCUIT = CircuitPolicy(open_after=20, probe_seconds=0.05, probe_max_seconds=0.2)
LOST = frozenset({"connection_lost", "incarnation"})
"""Why sessions end after a connection was lost: the one that met it, and all others."""
AGAIN_SECONDS = 0.02
"""Pause before a part that ended begins again."""
JOIN_SECONDS = 15.0
"""Longest wait for the end of a thread."""


class Crashed(BaseException):
    """The relay has crashed: its threads end without another statement."""


class CountingStore(Store):
    """A store that counts its statements by name, and those that the server ended for their time."""

    def __init__(
        self, dsn: str, connections: int = 9, call_seconds: float = CALL_SECONDS, *, pooler: bool = False
    ) -> None:
        super().__init__(lambda: dsn, pooler=pooler, connections=connections, call_seconds=call_seconds)
        self.calls: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()
        """The number of rows that statements returned, by name."""
        self.timed_out: Counter[str] = Counter()
        self.windows = True
        """False where a test makes reads fail, which looks with windows would go round."""
        self._counts = threading.Lock()
        self._crashed = False

    def crash(self) -> None:
        """Raise ``Crashed`` in every statement, also in those under way, which the server may still carry out."""
        self._crashed = True
        self.give_up_at = 0.0

    def database_identity(self) -> tuple[str, int]:
        """See ``Database``. The thread that asks survives no ``Crashed``."""
        try:
            return super().database_identity()
        except Crashed:
            raise DatabaseUnavailable("the relay has crashed") from None

    def end_of_log(self) -> Tick:
        """Take a tick that is not counted."""
        [row] = super()._run("tick", {"known": None}, None)[0]
        return Tick(row.seq, row.snapshot, row.next_xid)

    @contextmanager
    def _connection(self, name: str, deadline: float | None = None, grant: str | None = None) -> Generator[Connection]:
        try:
            self._end_if_crashed()
            with super()._connection(name, deadline, grant) as connection:
                yield connection
        finally:
            self._end_if_crashed()

    def _end_if_crashed(self) -> None:
        if self._crashed:
            raise Crashed

    def _run(self, name: str, *arguments: Any, **options: Any) -> tuple[list[Any], int]:
        with self._counting(name):
            rows, count = super()._run(name, *arguments, **options)
        with self._counts:
            self.returned[name] += len(rows)
        return rows, count

    def look(self, request: Any) -> Any:
        """Look without a window if the test wants that."""
        return super().look(request if self.windows else None)

    @contextmanager
    def _counting(self, name: str) -> Generator[None]:
        with self._counts:
            self.calls[name] += 1
        try:
            yield
        except StatementFailed as error:
            with self._counts:
                self.timed_out[name] += "due to statement timeout" in str(error)
            raise


class HarnessLoop(SinkLoop):
    """A loop that records the errors that end its sessions."""

    harness: RelayHarness

    def _serve(self) -> Iterator[None]:
        try:
            yield from super()._serve()
        except SURVIVED as error:
            self.harness.ended.append(error)
            raise


class HarnessSupervisor(Supervisor):
    """Runs the parts that others start in threads of the harness."""

    def __init__(self, harness: RelayHarness) -> None:
        self._harness = harness
        self.stopping = harness.stopping

    def start(self, name: str, part: Callable[[], None], *, sink: str | None = None) -> threading.Thread:
        """Run `part` in a thread."""
        del sink
        return self._harness.start_part(name, part)


def spec(
    name: str,
    *,
    patterns: tuple[str, ...] = ("*",),
    hold: bool = False,
    park_after_seconds: float = PARK_AFTER_SECONDS,
    **settings: Any,
) -> SinkSpec:
    """Return a sink with quick retries."""
    values: dict[str, Any] = {"type": "memory", "retry": RETRY, "circuit": CIRCUIT, "start": "beginning", **settings}
    values["when_dead"] = "hold" if hold else "skip"
    return SinkSpec(name, patterns, SinkSettings(**values), park_after_seconds=park_after_seconds)


@dataclass(eq=False)
class RelayHarness:
    """One relay process' worth of parts, in threads of the test.

    A client, whose methods are coroutines, is wrapped in a ``PostingSink``. `expects` are the reasons
    (:attr:`RelayError.reason`) for which the test makes parts end. At its end any other is an error.
    """

    dsn: str
    sinks: Sequence[tuple[SinkSpec, Any]]
    lease_seconds: float = 15.0
    listen: bool = True
    pooler: bool = False
    call_seconds: float = CALL_SECONDS
    relay: UUID = field(default_factory=uuid4)
    expects: Collection[str] = ()
    replay_client: Callable[[str, int, int], Any] | None = None
    """Makes the clients of replays; None if this relay serves none."""
    ended: list[RelayError] = field(default_factory=list[RelayError])
    """The errors that ended sessions or parts, which began again."""
    broken: list[BaseException] = field(default_factory=list[BaseException])
    """The errors that ended parts and that no service survives."""

    def __post_init__(self) -> None:
        self._log = log = structlog.get_logger("harness")
        self.store = CountingStore(self.dsn, call_seconds=self.call_seconds, pooler=self.pooler)
        self._listener = CommitListener((lambda: self.dsn) if self.listen else None, None, log)
        self.ticks = Ticks(self.store.tick, self._listener, log)
        self.keeper = Keeper(self.store, self.relay, "harness", "0", self.lease_seconds, log)
        self.served: dict[str, ServedSink] = {}
        """The sinks by name, in the order of `sinks`."""
        self.threads: dict[str, threading.Thread] = {}
        """The threads by name: "keeper", "watchdog", "waiter", "scheduled events", "sink NAME" and "replay NUMBER"."""
        self.stopping = threading.Event()
        self._over = threading.Event()
        self._event_loop = EventLoopThread()
        self._supervisor = HarnessSupervisor(self)
        self.replays: Replays | None = None
        if (replay_client := self.replay_client) is not None:
            self.replays = Replays(
                *(self.store, self.keeper, self.ticks, self.served),
                lambda name, replay, slots: self.as_sink(replay_client(name, replay, slots)),
                *(self._supervisor, log),
            )

    @property
    def loops(self) -> list[SinkLoop]:
        """The present loops of the sinks."""
        return [served.loop for served in self.served.values()]

    def leases(self, sink: str) -> SinkLeases:
        """Return the leases of `sink` in this relay."""
        return self.loop(sink).parts.leases

    def loop(self, sink: str) -> SinkLoop:
        """Return the loop of `sink`."""
        return next(loop for loop in self.loops if loop.parts.spec.name == sink)

    @property
    def groups(self) -> list[Sequence[ShardGroup]]:
        """The shard groups of each sink's session, with their positions; none without a session."""
        return [loop.session.in_flight.groups if loop.session else () for loop in self.loops]

    # -- start --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Register the sinks and begin to work."""
        self.store.open()
        specs = [sink_spec for sink_spec, _ in self.sinks]
        generations = self.store.register_sinks(
            [(s.name, s.patterns, s.settings.start) for s in specs],
            self.store.tick().tick,
            queued=[s.name for s in specs if s.queued],
        )
        self.store.state_limits({s.name: s.limits for s in specs})
        for sink_spec, client in self.sinks:
            leases = self.keeper.add(
                sink_spec.name, generations[sink_spec.name], limits=sink_spec.limits, routes=sink_spec.routes
            )
            sink = self.as_sink(client)
            sink.open()
            self.served[sink_spec.name] = ServedSink(sink_spec, sink, leases, self.keeper, self._new_loop)
        for name, served in self.served.items():
            self.start_part(f"sink {name}", served.run)
        self.start_part("keeper", self.keeper.run)
        self.start_part("watchdog", self.keeper.watch)
        self.start_part("waiter", self.ticks.run)
        self.start_part("scheduled events", self._enter_scheduled)
        if self.replays is not None:
            self.start_part("replays", self.replays.run)

    def _new_loop(self, served: ServedSink) -> SinkLoop:
        parts = Parts(
            *(served.spec, served.sink, self.store, served.leases, self.relay, self._log), measures=served.measures
        )
        loop = HarnessLoop(parts, self.keeper, self.ticks, restarts=served.restarts)
        loop.harness = self
        return loop

    def as_sink(self, client: Any) -> Sink:
        """Return `client` as a sink."""
        if isinstance(client, Sink):
            return client
        return (OrderedSink if client.keeps_order else PostingSink)(client, self._event_loop)

    def start_part(self, name: str, part: Callable[[], None]) -> threading.Thread:
        """Run `part` in a thread."""
        thread = threading.Thread(target=self._keep, args=(name, part), name=f"harness {name}", daemon=True)
        self.threads[name] = thread
        thread.start()
        return thread

    def _keep(self, name: str, part: Callable[[], None]) -> None:
        while True:
            try:
                part()
            except Crashed:
                return
            except SURVIVED as error:
                self.ended.append(error)
                self._log.warning("a part ended", part=name, reason=str(error))
                if self._over.wait(AGAIN_SECONDS):
                    return
            except BaseException as error:
                self.broken.append(error)
                return
            else:
                return

    def _enter_scheduled(self) -> None:
        scheduled, pause = ScheduledEvents(self.store), 0.0
        while not self._over.wait(pause):
            try:
                pause = scheduled.look()
            except RelayError:
                pause = 0.1

    # -- facts --------------------------------------------------------------------------------------------------

    def settled(self, seconds: float = 20) -> None:
        """Wait until every shard stands at the end of the log and no row waits to be delivered."""
        end = self.store.end_of_log()

        def fact() -> bool:
            return self._at(end) and not self._rows_wait() and self._at(end)

        until(fact, seconds=seconds, what="everything is delivered or dead")

    def _at(self, end: Tick) -> bool:
        """Return True if every shard stands at `end`, and every new row is in the database.

        A relay that has just begun may own no shard yet, while it already delivers rows.
        """
        self._raise_broken()
        sessions = [loop.session for loop in self.loops if loop.session]
        unwritten = any(session.settler.unsettled or _settles(session.in_flight.blocked) for session in sessions)
        return not unwritten and all(
            groups and all(group.idle and nothing_new(group.position.a, end) for group in groups)
            for groups in self.groups
        )

    def _rows_wait(self) -> bool:
        """Return True if a row or a scheduled event is due within a minute."""
        dsn = self.dsn if self.pooler else direct(self.dsn)
        with psycopg.connect(dsn, autocommit=True) as connection:
            cursor = connection.execute(
                "(select from outbox.delivery where state <> 'dead' and due_at < now() + interval '1 minute' limit 1) "
                "union all (select from outbox.scheduled where deliver_at < now() + interval '1 minute' limit 1)"
            )
            return cursor.fetchone() is not None

    def owns_all(self, seconds: float = 30) -> None:
        """Wait until this relay owns every shard of its sinks, each in a session that has begun.

        Before that, a session gives its shards new epochs, and one that was taken meanwhile is not a loss.
        """

        def fact() -> bool:
            self._raise_broken()
            begun = all(loop.session is not None for loop in self.loops)
            return begun and all(count == SHARDS for count in self.keeper.held.values())

        until(fact, seconds=seconds, what="every shard is owned")

    def _raise_broken(self) -> None:
        assert not self.broken, f"parts died of what a service does not survive: {self.broken[:5]!r}"

    # -- the end ------------------------------------------------------------------------------------------------

    def stop(self, seconds: float = 20) -> None:
        """Do as at SIGTERM: wait until the relay has finished, settled, released and left."""
        self.stopping.set()
        self.keeper.stop()
        for served in self.served.values():
            served.stop()
        for name in [*(f"sink {name}" for name in self.served), *(["replays"] if self.replays else [])]:
            self.threads[name].join(seconds)
            assert not self.threads[name].is_alive(), f"{name} did not stop"
        self.keeper.leave()
        self.crash()

    def judge(self) -> None:
        """Raise AssertionError when a part ended for a reason that the test did not declare."""
        self._raise_broken()
        undeclared = [f"{error.reason}: {error}" for error in self.ended if error.reason not in self.expects]
        assert not undeclared, f"sessions ended that this test did not cause: {undeclared[:5]}"

    def crash(self, *, unjudged: bool = False) -> None:
        """End at once, releasing nothing, and :meth:`judge`, unless the test does that later."""
        if not self._over.is_set():
            self._crash()
        if not unjudged:
            self.judge()

    def _crash(self) -> None:
        self._over.set()
        self.stopping.set()
        self.store.crash()
        self.keeper.end()
        self.ticks.stop()
        sinks = [served.sink for served in self.served.values()]
        sinks += [served.sink for served in self.replays.sinks.values()] if self.replays else []
        for sink in sinks:
            sink.completed = _crash  # an attribute of this sink, in the way of the method
            sink.wake()
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in self.threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        for sink in sinks:
            vars(sink).pop("completed", None)
            with suppress(SessionReset):
                sink.withdraw()
            sink.close()
        self._listener.close()
        self._event_loop.stop()
        self.store.close()
        alive = [name for name, thread in self.threads.items() if thread.is_alive()]
        assert not alive, f"threads did not end: {alive}"


def _settles(numbers: BlockedKeys) -> bool:
    """Return True while a settlement is being written."""
    return numbers.committed != numbers.collecting - 1


def _crash(seconds: float) -> Any:
    del seconds
    raise Crashed


@contextmanager
def running(dsn: str, *sinks: tuple[SinkSpec, Any], **options: Any) -> Generator[RelayHarness]:
    """Yield a harness that ends with the block. A failure of the block names the parts that ended."""
    harness = RelayHarness(dsn, list(sinks), **options)
    try:
        harness.start()
        yield harness
    except BaseException as error:
        harness.crash(unjudged=True)
        error.add_note(f"parts of the relay that died: {harness.broken!r}; that ended: {harness.ended!r}")
        raise
    harness.crash(unjudged=True)
    harness.judge()


def owns(harness: RelayHarness, count: int, seconds: float = 15) -> None:
    """Wait until `harness` owns `count` shards of its sink."""
    until(lambda: harness.keeper.held["s"] == count, seconds=seconds, what=f"{count} shards are owned")
