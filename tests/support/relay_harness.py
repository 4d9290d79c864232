"""A relay inside the test: the parts that `app` composes, with any sink, on a real database."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import structlog
from psycopg import AsyncConnection
from psycopg.rows import AsyncRowFactory

from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.errors import DatabaseUnavailable, DatabaseUnusable, RelayError, SessionReset, StatementFailed
from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.in_flight import ShardGroup
from outbox_relay.domain.retry import RetryPolicy
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.connection import direct
from outbox_relay.postgres.database import CALL_SECONDS, TUPLES
from outbox_relay.postgres.listener import CommitListener
from outbox_relay.postgres.rows import Look, TickResult, WindowRequest
from outbox_relay.postgres.store import Store
from outbox_relay.relay.leases import LeaseManager
from outbox_relay.relay.scheduled_events import ScheduledEvents
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.sink_relay import SinkRelay
from outbox_relay.relay.ticker import Ticker
from outbox_relay.service.replays import MakeClient, ReplayRelays
from outbox_relay.sinks import Sink
from tests.support.wait import auntil

RETRY = RetryPolicy(attempts=5, base_seconds=0.02, max_seconds=0.1, jitter=0.2)
SURVIVED = (DatabaseUnavailable, StatementFailed, SessionReset, DatabaseUnusable)
"""As ``app`` has it, which imports settings and sinks."""
LOST = frozenset({"connection_lost", "incarnation"})
"""Why sessions end after a connection was lost: the one that met it, and all others."""
CIRCUIT = CircuitPolicy(open_after=20, probe_seconds=0.05, probe_max_seconds=0.2)


class CountingStore(Store):
    """A store that counts its statements by name, and those that the server ended for their time."""

    def __init__(
        self, dsn: str, connections: int = 9, call_seconds: float = CALL_SECONDS, *, pooler: bool = False
    ) -> None:
        super().__init__(lambda: dsn, pooler=pooler, connections=connections, call_seconds=call_seconds)
        self.calls: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()
        """The number of rows that statements returned, by name."""
        self.windows = True
        """False where a test makes reads fail, which ticks with windows would go round."""
        self.timed_out: Counter[str] = Counter()

    async def _rows(
        self,
        name: str,
        parameters: Mapping[str, Any],
        row_factory: AsyncRowFactory[Any] = TUPLES,
        deadline: float | None = None,
    ) -> list[Any]:
        self.calls[name] += 1
        with self._counting(name):
            rows = await super()._rows(name, parameters, row_factory, deadline)
        self.returned[name] += len(rows)
        return rows

    async def _do(self, name: str, parameters: Mapping[str, Any], deadline: float | None = None) -> int:
        self.calls[name] += 1
        with self._counting(name):
            return await super()._do(name, parameters, deadline)

    async def _look(
        self,
        request: WindowRequest | None,
        deadline: float,
        patience: float,
        is_news: Callable[[TickResult, float], bool],
    ) -> Look:
        look = await super()._look(request if self.windows else None, deadline, patience, is_news)
        self.calls["look"] += len(look.seconds)
        return look

    @contextmanager
    def _counting(self, name: str) -> Generator[None]:
        try:
            yield
        except StatementFailed as error:
            self.timed_out[name] += "due to statement timeout" in str(error)
            raise


def spec(name: str, **changes: Any) -> SinkSpec:
    """Return a sink that takes every event, with quick retries."""
    values: dict[str, Any] = {
        "patterns": ("*",),
        "types": None,
        "retry": RETRY,
        "circuit": CIRCUIT,
        "start": "beginning",
    }
    return SinkSpec(name=name, **{**values, **changes})


@dataclass
class RelayHarness:
    """One relay process' worth of parts, run in this event loop.

    `expects` are the reasons (:attr:`RelayError.reason`) for which the test makes parts end. At its end any other
    is an error.
    """

    dsn: str
    sinks: list[tuple[SinkSpec, Sink]]
    lease_seconds: float = 15.0
    listen: bool = True
    pooler: bool = False
    call_seconds: float = CALL_SECONDS
    relay: UUID = field(default_factory=uuid4)
    expects: Collection[str] = ()
    replay_client: MakeClient | None = None
    """Makes the clients of replays; None if this relay serves none."""
    ended: list[RelayError] = field(default_factory=list[RelayError])

    def __post_init__(self) -> None:
        log = structlog.get_logger("harness")
        self.store = CountingStore(self.dsn, call_seconds=self.call_seconds, pooler=self.pooler)
        wakeup = CommitListener((lambda: self.dsn) if self.listen else None, self.store.database_identity, log)
        self.ticker = Ticker(self.store, wakeup, self.lease_seconds, log)
        self.lease_manager = LeaseManager(self.store, self.relay, "harness", "0", self.lease_seconds, log)
        self.stopping = asyncio.Event()
        self.relays: list[SinkRelay] = []
        self._targets: dict[str, SinkRelay] = {}
        self.replays: ReplayRelays | None = None
        if self.replay_client is not None:
            self.replays = ReplayRelays(
                *(self.store, self.ticker, self.lease_manager, self._targets, self.replay_client, log, self.stopping)
            )
        self._log = log
        self._crashed = False
        self.broken: list[BaseException] = []
        """The errors that ended parts and that no service survives. Set at the end."""
        self.tasks: list[asyncio.Task[None]] = []
        """The lease manager, the ticker, one per sink, one per sink for its limits, then the replays, if any."""

    def leases(self, sink: str) -> SinkLeases:
        """Return the leases of `sink` in this relay."""
        return next(relay.leases for relay in self.relays if relay.spec.name == sink)

    @property
    def groups(self) -> list[Sequence[ShardGroup]]:
        """The shard groups of each sink's session, with their positions; none without a session."""
        return [relay.session.in_flight.groups if relay.session else () for relay in self.relays]

    async def start(self) -> None:
        """Register the sinks and begin to work."""
        await self.store.open()
        tick = (await self.ticker.refresh()).tick
        specs = [sink_spec for sink_spec, _ in self.sinks]
        generations = await self.store.register_sinks(
            [(s.name, s.patterns, s.start) for s in specs],
            tick,
            queued=[s.name for s in specs if s.queued],
        )
        await self.store.state_limits({s.name: s.limits for s in specs})
        for sink_spec, sink in self.sinks:
            await sink.open()
            generation = generations[sink_spec.name]
            leases = self.lease_manager.add(
                sink_spec.name, generation, limits=sink_spec.limits, routes=sink_spec.routes
            )
            self.relays.append(
                SinkRelay(
                    sink_spec, sink, self.store, self.ticker, self.lease_manager, leases, self._log, self.stopping
                )
            )
        self._targets.update((relay.spec.name, relay) for relay in self.relays)
        parts = [
            *(self.lease_manager.run, self.ticker.run),
            *(relay.run for relay in self.relays),
            ScheduledEvents(self.store, self._log).run,
        ]
        self.tasks = [asyncio.create_task(self._keep(part)) for part in parts]
        if self.replays is not None:
            self.tasks.append(asyncio.create_task(self.replays.run(self._supervise)))

    async def _supervise(self, _name: str, part: Any) -> None:
        await self._keep(part)

    async def _keep(self, part: Any) -> None:
        while True:
            try:
                await part()
            except SURVIVED as error:
                self.ended.append(error)
                self._log.warning("a part ended", reason=str(error))
                if self._crashed:  # a part that ends by an error forgets that it was cancelled
                    return
                await asyncio.sleep(0.02)
            else:
                return

    async def settled(self, seconds: float = 20) -> None:
        """Wait until every shard stands at the end of the log and no row waits to be delivered."""

        async def fact() -> bool:
            return self._at_end() and not await self._rows_wait() and self._at_end()

        await auntil(fact, seconds=seconds, what="everything is delivered or dead")

    def _at_end(self) -> bool:
        """Return True if every shard stands at the end of the log, and every new row is in the database.

        A relay that has just begun may own no shard yet, while it already delivers rows.
        """
        end = self.ticker.latest.seq if self.ticker.latest else 0
        unwritten = sum(relay.session.settler.unsettled for relay in self.relays if relay.session)
        return not unwritten and all(
            groups and all(group.idle and group.position.a.seq >= end for group in groups) for groups in self.groups
        )

    async def _rows_wait(self) -> bool:
        """Return True if a row or a scheduled event is due within a minute."""
        dsn = self.dsn if self.pooler else direct(self.dsn)
        async with await AsyncConnection.connect(dsn, autocommit=True) as connection:
            cursor = await connection.execute(
                "(select from outbox.delivery where state <> 'dead' and due_at < now() + interval '1 minute' limit 1) "
                "union all (select from outbox.scheduled where deliver_at < now() + interval '1 minute' limit 1)"
            )
            return await cursor.fetchone() is not None

    async def owns_all(self, seconds: float = 30) -> None:
        """Wait until this relay owns every shard of its sinks, each in a session that has begun.

        Before that, a session gives its shards new epochs, and one that was taken meanwhile is not a loss.
        """

        async def fact() -> bool:
            begun = all(relay.session is not None for relay in self.relays)
            return begun and all(count == SHARDS for count in self.lease_manager.held.values())

        await auntil(fact, seconds=seconds, what="every shard is owned")

    async def stop(self, seconds: float = 20) -> None:
        """Send SIGTERM, and wait until the relay has finished, settled, released and left."""
        await self.lease_manager.stop()
        self.stopping.set()
        if self.replays is not None:
            await asyncio.wait_for(self.replays.stop(), seconds)
            await self.replays.leave()
        await asyncio.wait_for(asyncio.gather(*self.tasks[2 : 2 + len(self.relays)]), seconds)
        await self.lease_manager.leave()
        await self.crash()

    def judge(self) -> None:
        """Raise AssertionError when a part ended for a reason that the test did not declare."""
        undeclared = [f"{error.reason}: {error}" for error in self.ended if error.reason not in self.expects]
        assert not self.broken, f"parts died of what a service does not survive: {self.broken[:5]!r}"
        assert not undeclared, f"sessions ended that this test did not cause: {undeclared[:5]}"

    async def crash(self, *, unjudged: bool = False) -> None:
        """End at once, releasing nothing, and :meth:`judge`, unless the test does that later."""
        self._crashed = True
        self.broken = [error for task in self.tasks if (error := _broke(task)) is not None]
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for _, sink in self.sinks:
            await sink.reset()
            await sink.close()
        await self.store.close()
        if not unjudged:
            self.judge()


def _broke(task: asyncio.Task[None]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


@asynccontextmanager
async def running(dsn: str, *sinks: tuple[SinkSpec, Sink], **options: Any) -> AsyncGenerator[RelayHarness]:
    """Yield a harness that ends with the block. A failure of the block names the parts that ended."""
    harness = RelayHarness(dsn, list(sinks), **options)
    await harness.start()
    try:
        yield harness
    except BaseException as error:
        await harness.crash(unjudged=True)
        error.add_note(f"parts of the relay that died: {harness.broken!r}")
        raise
    await harness.crash(unjudged=True)
    harness.judge()


async def owns(harness: RelayHarness, count: int, seconds: float = 15) -> None:
    """Wait until `harness` owns `count` shards of its sink."""

    async def fact() -> bool:
        return harness.lease_manager.held["s"] == count

    await auntil(fact, seconds=seconds, what=f"{count} shards are owned")
