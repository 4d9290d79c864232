"""Statements that wait for their turn: the product's store, of one worker, each statement when the test says so.

Everything a worker does runs in a named lane, one thing at a time. In a lane it goes on until it wants to send a
statement; then it stands there until it gets its turn. A settlement takes two: its statement, and its COMMIT.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID

import psycopg
from psycopg import AsyncConnection
from psycopg.rows import AsyncRowFactory

from outbox_relay.postgres.database import TUPLES
from outbox_relay.postgres.errors import explain
from outbox_relay.postgres.looks import look_parameters, tick_of, window_of
from outbox_relay.postgres.rows import Look, WindowRequest
from outbox_relay.postgres.store import Store

LANE: ContextVar[str] = ContextVar("LANE")
"""The lane of the task that runs."""
STILL_ROUNDS = 20
"""Rounds of the event loop after which every task waits for a statement or an answer. Tasks that wait for a probe of
another one poll without end."""
LOCK_TIMEOUT = "set lock_timeout = '2s'"
"""No statement here ever waits for a lock. One that does, because a rule was broken, fails."""
OWNERS_CHANGE = frozenset({"claim_shards", "reclaim_shards", "release_shards", "release_unknown_shards"})
WAITS_FOR_SHARDS = frozenset(
    {"renew_shards", "reclaim_shards", "release_shards", "release_unknown_shards", "reset_crashes"}
)
"""Statements that wait for the end of a settlement under way of their own worker."""

OWNERS = "select shard, owner, epoch from outbox.shard where sink = %s"
SHARDS_OF_OTHERS = """
select s::text from outbox.shard s where s.sink = %s and s.shard = any (%s::smallint[]) order by s.shard"""
ROWS_OF_OTHERS = """
select d.id from outbox.delivery d
 where d.sink = %s and d.id = any (%s::bigint[]) and not exists (
    select from unnest(%s::bigint[], %s::uuid[]) r (id, lease) where r.id = d.id and r.lease = d.lease)"""
"""Rows that a statement names under no lease that they have. One may be named twice, also under a lease that ended: its
worker has claimed it again before the outcome of the first time was written."""
ROWS = "select d::text from outbox.delivery d where d.sink = %s and d.id = any (%s::bigint[]) order by d.id"
OVERTAKING = """
select d.id from outbox.delivery d
 where d.sink = %(sink)s and d.lease = %(lease)s and d.ordered and exists (
    select from outbox.delivery f
     where f.sink = d.sink and f.key = d.key and f.id < d.id and f.ordered and (f.state <> 'dead' or %(hold)s)
       and (f.lease is distinct from d.lease or not %(with_followers)s))"""
"""Rows of a claim that come after another of their key: one that was not claimed with them or, if the rows of a key are
not delivered in order, any."""
WRITTEN = """
select (select count(*) from outbox.progress p where p.sink = %s),
       (select string_agg(d::text, ',' order by d.id) from outbox.delivery d where d.sink = %s)"""
NEWEST_EPOCHS = """
select shard, max(epoch)
  from outbox.progress, unnest(shards, epochs) u (shard, epoch)
 where sink = %s and shard = any (%s::smallint[]) group by shard"""


async def stillness() -> None:
    """Let everything go on that can."""
    loop = cast(Any, asyncio.get_running_loop())
    for _ in range(STILL_ROUNDS):
        await asyncio.sleep(0)
        timers = loop._scheduled
        if not loop._ready and not (timers and timers[0].when() <= loop.time()):
            return


@dataclass
class Scheduler:
    """The tasks that wait to send a statement, by lane. While ``free``, none waits."""

    free: bool = False
    waiting: dict[str, asyncio.Future[None]] = field(default_factory=dict[str, "asyncio.Future[None]"])
    _sent: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    async def turn(self) -> None:
        """Wait for the turn of this lane."""
        if self.free:
            return
        lane = LANE.get()
        assert lane not in self.waiting, f"two statements at once in lane {lane}"
        self.waiting[lane] = turn = asyncio.get_running_loop().create_future()
        try:
            await turn
        finally:
            del self.waiting[lane]

    @asynccontextmanager
    async def sent(self) -> AsyncGenerator[None]:
        """Send a statement that runs inside the block."""
        self._sent += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._sent -= 1
            if not self._sent:
                self._idle.set()

    async def still(self) -> None:
        """Wait until no statement is under way and nothing else can go on."""
        await stillness()
        while self._sent:
            await self._idle.wait()
            await stillness()

    async def give(self, lane: str) -> bool:
        """Give one turn to ``lane`` and return True if it waited for one. Afterwards all stand still again."""
        if (turn := self.waiting.get(lane)) is None:
            return False
        turn.set_result(None)
        await self.still()
        return True


@dataclass
class Held:
    """A settlement whose statement is done and whose COMMIT is not. ``fence``: shard → (owner, epoch) of its rows."""

    connection: AsyncConnection[Any]
    fence: dict[int, tuple[UUID, int]]
    open: bool = True

    async def end(self, *, committed: bool) -> None:
        """Commit, or else roll back, unless the transaction has ended."""
        if self.open:
            self.open = False
            await (self.connection.commit() if committed else self.connection.rollback())


@dataclass
class Bench:
    """The parts that all workers share: a database, and the connections that their statements take in turn."""

    dsn: str
    shared: AsyncConnection[Any]
    watching: AsyncConnection[Any]
    spare: list[AsyncConnection[Any]] = field(default_factory=list[AsyncConnection[Any]])
    held: list[Held] = field(default_factory=list[Held])
    broken: list[str] = field(default_factory=list[str])
    """Changes by statements that their fences forbid."""
    refused: Counter[str] = field(default_factory=Counter[str])
    """Writes behind their fence, which changed nothing, by statement."""
    _owners: dict[str, dict[int, tuple[UUID | None, int]]] = field(default_factory=dict[str, Any])

    async def connection(self) -> AsyncConnection[Any]:
        """Return a connection for a transaction that stays open, to be given back to ``spare``."""
        return self.spare.pop() if self.spare else await connected(self.dsn, autocommit=False)

    async def end_held(self) -> None:
        """Commit the settlement that is held open, if any."""
        for held in list(self.held):
            await held.end(committed=True)

    async def ask(self, query: str, *parameters: Any, **named: Any) -> list[Any]:
        """Return the rows of a query of the test itself."""
        return await (await self.watching.execute(query.encode(), named or parameters)).fetchall()

    async def owners(self, sink: str) -> dict[int, tuple[UUID | None, int]]:
        """Return shard → (owner, epoch), as committed."""
        if sink not in self._owners:
            self._owners[sink] = {shard: (owner, epoch) for shard, owner, epoch in await self.ask(OWNERS, sink)}
        return self._owners[sink]

    def owners_changed(self) -> None:
        """Some statement may have changed who owns what."""
        self._owners.clear()

    def owners_are_known(self) -> bool:
        """Return True if no statement may have changed the owners since they were asked for."""
        return bool(self._owners)

    async def close(self) -> None:
        """Close every connection."""
        for connection in (self.shared, self.watching, *self.spare):
            await connection.close()


async def connected(dsn: str, *, autocommit: bool = True) -> AsyncConnection[Any]:
    """Return a connection on which no statement waits long for a lock."""
    connection = await AsyncConnection.connect(dsn, autocommit=True)
    await connection.execute(LOCK_TIMEOUT)
    await connection.set_autocommit(autocommit)
    return connection


class SteppedStore(Store):
    """The store of one worker on the bench's connections; every fenced write is checked against what it changed."""

    def __init__(self, bench: Bench, sink: str, scheduler: Scheduler) -> None:
        super().__init__(lambda: bench.dsn, pooler=False, connections=1)
        self._bench = bench
        self._sink = sink
        self._scheduler = scheduler
        self.commits_are_lost = False
        """Return True if a COMMIT under way when the worker ends becomes a ROLLBACK."""

    @asynccontextmanager
    async def _connection(self, deadline: float, name: str = "") -> AsyncGenerator[AsyncConnection[Any]]:
        del deadline, name
        try:
            yield self._bench.shared
        except psycopg.Error as error:
            raise explain(error) from error

    async def _rows(
        self,
        name: str,
        parameters: Mapping[str, Any],
        row_factory: AsyncRowFactory[Any] = TUPLES,
        deadline: float | None = None,
    ) -> list[Any]:
        if name == "settle":
            return await self._settle(parameters)
        async with self._turn(name, parameters):
            return await super()._rows(name, parameters, row_factory, deadline)

    async def _look(self, request: WindowRequest | None, deadline: float, patience: float, is_news: object) -> Look:
        """Look once, as a step: the thread has a connection and a clock of its own."""
        del deadline, patience, is_news
        rows = await self._rows("look", {**look_parameters(request), "known": None})
        result = tick_of(rows[0])
        return Look(result, window_of(rows, result.tick, request), time.monotonic(), (0.0,))

    def prepare_look(self) -> bool:
        """Return True: a look is a step on the shared connection."""
        return True

    async def _mark(self, deadline: float) -> None:
        await self._rows("arm", {}, deadline=deadline)

    async def _do(self, name: str, parameters: Mapping[str, Any], deadline: float | None = None) -> int:
        async with self._turn(name, parameters):
            return await super()._do(name, parameters, deadline)

    @asynccontextmanager
    async def _turn(self, name: str, parameters: Mapping[str, Any]) -> AsyncGenerator[None]:
        """Wait for the turn; the statement in the block must not change what its fence keeps from this worker."""
        await self._scheduler.turn()
        async with self._scheduler.sent():
            if name in WAITS_FOR_SHARDS:
                await self._bench.end_held()
            query = await self._of_others(name, parameters)
            before = await self._bench.ask(*query) if query else []
            if name in OWNERS_CHANGE:
                self._bench.owners_changed()
            yield
            if name == "claim_rows" and not self._scheduler.free:
                await self._judge_claim(parameters)
            if before:
                self._bench.refused[name] += 1
                if await self._bench.ask(*query) != before:
                    self._bench.broken.append(f"{name} changed what is another's")

    async def _judge_claim(self, parameters: Mapping[str, Any]) -> None:
        """Record rows that were claimed although an earlier one of their key is not done."""
        if early := await self._bench.ask(OVERTAKING, **parameters):
            self._bench.broken.append(f"rows {early} were claimed before earlier ones of their keys")

    async def _of_others(self, name: str, parameters: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the changes that ``name`` is asked to make on rows of others, as a query; none without a fence."""
        if name in {"delete_rows", "update_rows"}:
            ids = await self._rows_of_others(parameters["ids"], parameters["leases"])
            return (ROWS, self._sink, ids) if ids else ()
        if name in {"renew_shards", "release_shards", "reset_crashes"}:
            stale = await self._stale(parameters["owner"], parameters["shards"], parameters["epochs"])
            return (SHARDS_OF_OTHERS, self._sink, stale) if stale else ()
        return ()

    async def _rows_of_others(self, ids: list[int], leases: list[UUID]) -> list[int]:
        """Return those of the rows ``ids`` that are under none of the leases that go with them."""
        return [row_id for (row_id,) in await self._bench.ask(ROWS_OF_OTHERS, self._sink, ids, ids, leases)]

    async def _stale(self, owner: UUID, shards: list[int], epochs: list[int]) -> list[int]:
        """Return those of ``shards`` that are not ``owner``'s at their epoch of ``epochs``."""
        now = await self._bench.owners(self._sink)
        return [shard for shard, epoch in zip(shards, epochs, strict=True) if now[shard] != (owner, epoch)]

    # -- a settlement in two turns ----------------------------------------------------------------------------

    async def _settle(self, parameters: Mapping[str, Any]) -> list[Any]:
        await self._scheduler.turn()
        async with self._scheduler.sent():
            standing = await self._outranked(parameters)
            held, answer = await self._begin_settling(parameters)
        try:
            await self._scheduler.turn()
        except asyncio.CancelledError:
            if self.commits_are_lost:
                await held.end(committed=False)
            raise
        finally:
            async with self._scheduler.sent():
                await self._end_settling(held)
                if standing and await self._positions(standing) != standing:
                    self._bench.broken.append(f"a late position of shards {sorted(standing)} outranks the new owner's")
        return answer

    async def _begin_settling(self, parameters: Mapping[str, Any]) -> tuple[Held, list[Any]]:
        """Execute the settlement in a transaction that stays open, unless its fence must fail."""
        bench, owner = self._bench, parameters["owner"]
        shards, epochs = parameters["fence_shards"], parameters["fence_epochs"]
        stale = await self._stale(owner, shards, epochs) if shards else []
        before = await bench.ask(WRITTEN, self._sink, self._sink) if stale else []
        held = Held(await bench.connection(), {s: (owner, e) for s, e in zip(shards, epochs, strict=True)})
        bench.held.append(held)
        try:
            cursor = held.connection.cursor(binary=True)
            await cursor.execute(self._sql["settle"], parameters)
            answer = await cursor.fetchall()
        except psycopg.Error as error:
            await held.end(committed=False)
            await self._end_settling(held)
            raise explain(error) from error
        if stale:
            await held.end(committed=True)
            bench.refused["settle, rows"] += 1
            if answer != [(False,)] or await bench.ask(WRITTEN, self._sink, self._sink) != before:
                bench.broken.append(f"a settlement with rows took effect though shards {stale} are another's")
        return held, answer

    async def _end_settling(self, held: Held) -> None:
        bench = self._bench
        if held.open and held.fence:
            now = await bench.owners(self._sink)
            if any(now[shard] != at for shard, at in held.fence.items()):
                bench.broken.append(f"shards {sorted(held.fence)} changed hands under a settlement of their rows")
        await held.end(committed=True)
        bench.held.remove(held)
        bench.spare.append(held.connection)

    async def _outranked(self, parameters: Mapping[str, Any]) -> dict[int, Any]:
        """Return the positions of shards to be settled for which a newer epoch has settled already."""
        epochs = dict(zip(parameters["shards"], parameters["epochs"], strict=True))
        newest = await self._bench.ask(NEWEST_EPOCHS, self._sink, list(epochs)) if epochs else []
        late = [shard for shard, epoch in newest if epoch > epochs[shard]]
        self._bench.refused["settle, positions"] += len(late)
        return await self._positions(late) if late else {}

    async def _positions(self, shards: Mapping[int, Any] | list[int]) -> dict[int, Any]:
        rows: list[Any] = await super()._rows("positions", {"sink": self._sink, "shards": list(shards), "server": None})
        return {row[0]: row for row in rows}
