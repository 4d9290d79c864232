"""The relay's only way to the database: one method per statement file in ``sql/``, every one with a deadline.

Every call is one statement in a transaction of its own, so one round trip and no session state: nothing
changes behind a transaction-pooling proxy, and no client that vanishes leaves a transaction open.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib import resources
from typing import Any, LiteralString, NamedTuple, TypeVar, cast
from uuid import UUID

import psycopg
from psycopg import AsyncConnection, AsyncCursor
from psycopg.rows import AsyncRowFactory, namedtuple_row, tuple_row
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from outbox_relay.cancelling import heeded
from outbox_relay.connection import Connection
from outbox_relay.dberrors import ANOTHER_SERVER, explain
from outbox_relay.errors import DatabaseLost, LeaseLost, Unusable
from outbox_relay.event import Event
from outbox_relay.policy import Attempt, printable
from outbox_relay.window import FOR_EVER, Position, Tick

T = TypeVar("T")
TUPLES: AsyncRowFactory[Any] = cast(Any, tuple_row)

CONNECT_SECONDS = 5
"""Longest wait for a new connection."""
CALL_SECONDS = 10.0
"""Longest wait for the answer to a statement, COMMIT included: no setting of the server bounds a COMMIT that
waits for a synchronous standby."""
TICK_SECONDS = 5.0
"""The same for a tick, which reads next to nothing: the first to notice a connection that was lost without a word, so
that the relay delivers again within 20 s. To give up takes the driver up to 10 s more."""
CONNECTION_LOST = ("08", "57P")
"""SQLSTATEs with which a session ends."""
CONNECTION_DEFAULTS: Mapping[str, str | int] = {
    "connect_timeout": CONNECT_SECONDS,
    "tcp_user_timeout": 15_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
"""A peer that vanished without a word is noticed in 15 to 25 s, not in the kernel's 15 minutes."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one tick saw: the tick, the server's incarnation, its WAL position in bytes and its clock.

    ``generations`` is the sum over all sinks: it differs once any sink has another configuration.
    """

    tick: Tick
    incarnation: str
    wal: int
    now: datetime
    generations: int


class Claimed(NamedTuple):
    """A shard that is ours: its epoch, and how often its lease lapsed since its position last moved."""

    shard: int
    epoch: int
    crashes: int


class SinkRow(NamedTuple):
    """What the database says of a sink; ``free`` shards have no owner.

    ``in_flight_limit``: how many requests a relay may have under way, nothing: as many as its settings say.
    """

    name: str
    generation: int
    paused: bool
    circuit: str
    in_flight_limit: int | None
    free: int


class Share(NamedTuple):
    """How many live relays serve a sink, and how many of them come before this one."""

    sink: str
    relays: int
    before: int


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row of ``delivery`` to be made of an event of the log.

    ``due_in`` is in seconds from now; without it the row is due at the event's ``deliver_at``, or now. A row
    that is made leased (its request is under way) has ``lease`` and ``lease_for`` seconds.
    """

    id: int
    shard: int
    state: str
    ordered: bool
    due_in: float | None = None
    attempts: int = 0
    claims: int = 0
    lease: UUID | None = None
    lease_for: float | None = None
    error: str | None = None
    status: int | None = None
    attempt: Attempt | None = None


class ClaimedRow(NamedTuple):
    """A leased row of ``delivery``: its event, what was counted so far, and the fence of its settlement.

    ``ordered``: it takes part in the order of its key, and rows behind it wait for it.
    """

    event: Event
    ordered: bool
    attempts: int
    claims: int
    lease: UUID


@dataclass(frozen=True, slots=True)
class RowBack:
    """What becomes of a leased row that was not delivered.

    ``state`` and ``due_in`` (seconds) stay as they are when nothing; ``attempts`` is the new count.
    """

    id: int
    lease: UUID
    attempts: int
    state: str | None = None
    due_in: float | None = None
    error: str | None = None
    status: int | None = None
    attempt: Attempt | None = None


def statements() -> dict[str, LiteralString]:
    """The text of every statement file, by its name without ``.sql``."""
    folder = resources.files("outbox_relay") / "sql"
    return {
        f.name.removesuffix(".sql"): cast(LiteralString, f.read_text(encoding="utf-8"))
        for f in folder.iterdir()
        if f.name.endswith(".sql")
    }


def event_row(_cursor: AsyncCursor[Any]) -> Callable[[Sequence[Any]], Event]:
    """Row factory: columns in the order of ``Event``. Called for every event: a partial is one call without a frame."""
    return partial(cast(Any, tuple).__new__, Event)


class Store:
    """A bounded pool of connections and the statements of the relay.

    Raises ``DatabaseLost`` when a statement got no answer in time or the connection broke: whether it took
    effect is then unknown. Raises ``Unusable`` for what waiting does not mend.

    ``server`` is the incarnation of the server that the caller's ticks are from: any other refuses the statement,
    with ``IncarnationChanged``. Nothing: whichever answers.
    """

    def __init__(
        self, dsn: Callable[[], str], *, pooler: bool, connections: int, call_seconds: float = CALL_SECONDS
    ) -> None:
        self._dsn = dsn
        self._sql = statements()
        self._prepare_after = None if pooler else 2
        self._connections = connections
        self._call_seconds = call_seconds
        self._pool: AsyncConnectionPool[Connection] | None = None
        self.connection_losses = 0
        """Raised whenever a call failed for its connection, or came to another server: whoever holds what was read
        compares it."""

    async def open(self) -> None:
        """Connect once, to learn what is wrong if anything is, and keep a pool from then on."""
        await self.close()
        try:
            async with asyncio.timeout(CONNECT_SECONDS * 2):
                await (await self._connect()).close()
        except TimeoutError:
            raise DatabaseLost(f"the database did not answer within {CONNECT_SECONDS * 2} s") from None
        self._pool = AsyncConnectionPool(
            connection_class=Connection,
            conninfo=self._dsn,
            min_size=1,
            max_size=self._connections,
            timeout=CONNECT_SECONDS,
            max_lifetime=3600,
            reconnect_timeout=CONNECT_SECONDS,
            kwargs={**CONNECTION_DEFAULTS, "autocommit": True},
            configure=self._configure,
            open=False,
        )
        await self._pool.open()

    async def close(self) -> None:
        """Give back every connection, waiting a moment for those in use."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await pool.close(timeout=1.0)

    async def mend(self) -> None:
        """Make every connection anew, after one was found to be broken.

        What the others are worth is not asked: one that is lost without a word never answers, and the pool's ``check``
        can swallow the end of the time that it is given.
        """
        if self._pool is not None:
            await self._pool.drain()

    async def _connect(self) -> Connection:
        try:
            return await Connection.connect(self._dsn(), autocommit=True, **cast(Any, CONNECTION_DEFAULTS))
        except psycopg.Error as error:
            raise explain(error) from None

    async def _configure(self, connection: Connection) -> None:
        connection.prepare_threshold = self._prepare_after

    @asynccontextmanager
    async def _connection(self, deadline: float) -> AsyncGenerator[AsyncConnection[Any]]:
        if self._pool is None:
            raise DatabaseLost("there is no connection to the database")
        try:
            with heeded():
                async with (
                    asyncio.timeout(deadline),
                    self._pool.connection(timeout=min(deadline, CONNECT_SECONDS)) as connection,
                ):
                    yield connection
        except (PoolTimeout, PoolClosed):
            self.connection_losses += 1
            raise DatabaseLost("no connection to the database could be had") from None
        except TimeoutError:
            self.connection_losses += 1
            raise DatabaseLost(f"the database did not answer within {deadline:g} s") from None
        except psycopg.Error as error:
            # A statement that was refused, for a lock say, says nothing about the server.
            self.connection_losses += not error.sqlstate or error.sqlstate.startswith(
                (*CONNECTION_LOST, ANOTHER_SERVER)
            )
            raise explain(error) from None

    async def _rows(
        self,
        name: str,
        parameters: Mapping[str, Any],
        row_factory: AsyncRowFactory[T] = TUPLES,
        deadline: float | None = None,
    ) -> list[T]:
        async with self._connection(deadline or self._call_seconds) as connection:
            cursor = connection.cursor(binary=True, row_factory=row_factory)
            await cursor.execute(self._sql[name], parameters)
            return await cursor.fetchall()

    async def _do(self, name: str, parameters: Mapping[str, Any], deadline: float | None = None) -> int:
        async with self._connection(deadline or self._call_seconds) as connection:
            return (await connection.execute(self._sql[name], parameters)).rowcount

    async def named(self, name: str, parameters: Mapping[str, Any], deadline: float | None = None) -> list[Any]:
        """The rows of a statement file as named tuples: for people's questions, not for the data path."""
        return await self._rows(name, parameters, cast(Any, namedtuple_row), deadline)

    @asynccontextmanager
    async def transaction(self, deadline: float = CALL_SECONDS) -> AsyncGenerator[AsyncConnection[Any]]:
        """A connection in a transaction that ends with the block: for an emit, never for the data path."""
        async with self._connection(deadline) as connection, connection.transaction():
            yield connection

    # -- what the schema and the server are ---------------------------------------------------------------

    async def schema(self) -> tuple[int, int]:
        """(version of the schema, oldest version that a relay may have been made for)."""
        return (await self._rows("schema", {}))[0]

    async def max_payload_bytes(self) -> int | None:
        """The largest payload that applications may emit, in bytes; nothing if what is set is no number."""
        [(found,)] = await self._rows("max_payload", {})
        return found

    async def floor(self) -> int:
        """The floor of the numbering (see ``outbox.rebase``).

        Raises ``Unusable`` when ids or xids are stored that the server has not given out yet.
        """
        [(floor, ids_ahead, highest_xid)] = await self._rows("sane", {})
        if ids_ahead or highest_xid > (await self.tick()).tick.next_xid:
            raise Unusable(
                "the log holds ids or transaction numbers that this server has not given out yet, as after a restore "
                "into another cluster: stop every relay, then run outbox-relay rebase"
            )
        return floor

    # -- the log ------------------------------------------------------------------------------------------

    async def tick(self) -> Look:
        """Take a tick."""
        deadline = min(TICK_SECONDS, self._call_seconds)
        [(seq, snapshot, next_xid, incarnation, wal, now, generations)] = await self._rows("tick", {}, TUPLES, deadline)
        return Look(Tick(seq, snapshot, next_xid), incarnation, wal, now, int(generations))

    async def read_rest(
        self,
        shards: Sequence[int],
        types: Sequence[str] | None,
        a: Tick,
        b: Tick,
        after: int,
        upto: int,
        rows: int,
        payload_bytes: int,
        *,
        most_payload: int | None = None,
        server: str | None = None,
    ) -> list[Event]:
        """Events of the window from ``a`` to ``b`` with ids in (``after``, ``upto``] above ``a.seq``, in id order.

        At most ``rows``, and no more after ``payload_bytes``. ``types`` are SQL LIKE patterns.

        With ``most_payload`` an event with a larger payload comes with a ``fault`` and without the payload, and
        ``payload_bytes`` bounds payloads, keys and headers together; without, it bounds payloads alone.
        """
        return await self._rows(
            "read_rest",
            {
                "shards": shards,
                "types": None if types is None else list(types),
                "a": a.snapshot,
                "b": b.snapshot,
                "after": after,
                "upto": upto,
                "rows": rows,
                "bytes": payload_bytes,
                "most_payload": most_payload,
                "server": server,
            },
            event_row,
        )

    async def read_late(
        self,
        shards: Sequence[int],
        types: Sequence[str] | None,
        a: Tick,
        b: Tick,
        after: int,
        upto: int,
        rows: int,
        payload_bytes: int,
        *,
        most_payload: int | None = None,
        server: str | None = None,
    ) -> list[Event]:
        """The latecomers of the window from ``a`` to ``b``, otherwise as ``read_rest``.

        With ``most_payload`` the read may be incomplete: see ``event.looked_through``.
        """
        return await self._rows(
            "read_late",
            {
                "shards": shards,
                "types": None if types is None else list(types),
                "a": a.snapshot,
                "a_next": a.next_xid,
                "b": b.snapshot,
                "after": after,
                "upto": upto,
                "rows": rows,
                "bytes": payload_bytes,
                "most_payload": most_payload,
                "server": server,
            },
            event_row,
        )

    async def settle(
        self,
        sink: str,
        owner: UUID,
        positions: Mapping[int, tuple[int, Position]],
        rows: Sequence[NewRow],
        epochs: Mapping[int, int],
        *,
        server: str | None = None,
    ) -> None:
        """Write ``positions`` (shard → epoch, position) and ``rows``, whole or not at all.

        The rows are fenced: only if each of their shards is still ``owner``'s at its epoch of ``epochs``. Else
        raises ``LeaseLost`` and nothing was written.
        """
        parameters = {"sink": sink, "owner": owner, **_positions(positions), **_new_rows(rows, epochs)}
        [(mine,)] = await self._rows("settle", {**parameters, "server": server})
        if not mine:
            raise LeaseLost(f"sink {sink}: a shard with rows to settle has another owner")

    # -- sinks and shards -----------------------------------------------------------------------------------

    async def register_sinks(
        self, wanted: Iterable[tuple[str, Sequence[str], str | None]], tick: Tick, *, server: str | None = None
    ) -> dict[str, int]:
        """Make sinks (name, patterns, start) known; returns the generations under which this relay serves them.

        ``tick`` is where a new sink may begin.
        """
        sinks = [{"name": name, "patterns": list(patterns), "start": start} for name, patterns, start in wanted]
        parameters = {
            "wanted": json.dumps(sinks),
            "seq": tick.seq,
            "snapshot": tick.snapshot,
            "next": tick.next_xid,
            "server": server,
        }
        return dict(await self._rows("register_sinks", parameters))

    async def sinks(self, names: Iterable[str]) -> list[SinkRow]:
        """What the database says of these sinks."""
        return [SinkRow(*row) for row in await self._rows("sinks", {"sinks": list(names)})]

    async def claim_shards(
        self, sink: str, owner: UUID, generation: int, lease_seconds: float, most: int, unowned_for: float = 0.0
    ) -> list[Claimed]:
        """Claim up to ``most`` shards that nobody has owned for ``unowned_for`` seconds."""
        parameters = {
            "sink": sink,
            "owner": owner,
            "generation": generation,
            "lease": lease_seconds,
            "most": most,
            "free_for": unowned_for,
            "lapsed_for": unowned_for,
        }
        return [Claimed(*row) for row in await self._rows("claim_shards", parameters)]

    async def reclaim_shards(self, sink: str, owner: UUID, lease_seconds: float) -> list[Claimed]:
        """New epochs for what ``owner`` owns, so that nothing settled under the old ones can still come."""
        parameters = {"sink": sink, "owner": owner, "lease": lease_seconds}
        return [Claimed(*row) for row in await self._rows("reclaim_shards", parameters)]

    async def renew_shards(
        self, owner: UUID, held: Sequence[tuple[str, int, int]], lease_seconds: float, deadline: float
    ) -> set[tuple[str, int, int]]:
        """Renew the leases of ``held`` (sink, shard, epoch); returns those that are still ours."""
        parameters = {
            "owner": owner,
            "sinks": [h[0] for h in held],
            "shards": [h[1] for h in held],
            "epochs": [h[2] for h in held],
            "lease": lease_seconds,
        }
        return set(await self._rows("renew_shards", parameters, deadline=deadline))

    async def release_shards(self, sink: str, owner: UUID, held: Mapping[int, int]) -> None:
        """Give up shards (shard → epoch)."""
        await self._do("release_shards", {"sink": sink, "owner": owner, **_shards(held)})

    async def reset_crashes(self, sink: str, owner: UUID, held: Mapping[int, int]) -> None:
        """Forget the crashes of shards (shard → epoch) whose position has moved."""
        await self._do("reset_crashes", {"sink": sink, "owner": owner, **_shards(held)})

    async def positions(self, sink: str, shards: Iterable[int], *, server: str | None = None) -> dict[int, Position]:
        """Where these shards stand in the ledger."""
        found: dict[int, Position] = {}
        parameters = {"sink": sink, "shards": list(shards), "server": server}
        for shard, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last in await self._rows(
            "positions", parameters
        ):
            b = None if b_seq is None else Tick(b_seq, b_snapshot, b_next)
            found[shard] = Position(Tick(a_seq, a_snapshot, a_next), b, last)
        return found

    async def record_circuit(
        self, sink: str, circuit: str, error: str | None, in_flight_limit: int | None, pause_after_seconds: float
    ) -> None:
        """Write what was found out about the destination, for people.

        ``in_flight_limit`` is how many requests may be under way at once since it asked for less; nothing: as many as
        the settings say. If it was down for ``pause_after_seconds`` (0: never) the sink is paused.
        """
        found = {"sink": sink, "circuit": circuit, "error": error, "in_flight_limit": in_flight_limit}
        await self._do("record_circuit", found | {"pause_after": int(pause_after_seconds)})

    async def pause_gone(self, sink: str, reason: str) -> None:
        """The destination says that it will never be back: pause the sink, for ``reason``."""
        await self._do("pause_gone", {"sink": sink, "reason": reason})

    # -- relays -----------------------------------------------------------------------------------------------

    async def heartbeat(self, relay: UUID, name: str, version: str, sinks: Sequence[str], deadline: float) -> None:
        """This relay is alive and serves ``sinks``."""
        parameters = {"id": relay, "name": name, "version": version, "sinks": list(sinks)}
        await self._do("heartbeat", parameters, deadline)

    async def shares(self, relay: UUID, sinks: Sequence[str], lease_seconds: float) -> list[Share]:
        """How the live relays share these sinks."""
        parameters = {"id": relay, "sinks": list(sinks), "lease": lease_seconds}
        return [Share(*row) for row in await self._rows("shares", parameters)]

    async def forget_relay(self, relay: UUID) -> None:
        """This relay has left."""
        await self._do("forget_relay", {"id": relay})

    # -- rows of delivery -------------------------------------------------------------------------------------

    async def blocked_keys(
        self, sink: str, shards: Iterable[int], hold: bool, *, server: str | None = None
    ) -> list[tuple[str, int]]:
        """(key, shard) of the keys of these shards with rows that take part in their order."""
        parameters = {"sink": sink, "shards": list(shards), "hold": hold, "server": server}
        return await self._rows("blocked_keys", parameters)

    async def still_blocked(self, sink: str, keys: Sequence[str], hold: bool, *, server: str | None = None) -> set[str]:
        """Which of these keys still have such rows."""
        parameters = {"sink": sink, "keys": keys, "hold": hold, "server": server}
        return {key for (key,) in await self._rows("still_blocked", parameters)}

    async def claim_rows(
        self,
        sink: str,
        owner: UUID,
        lease: UUID,
        lease_seconds: float,
        rows: int,
        payload_bytes: int,
        *,
        hold: bool,
        keys: Sequence[str] = (),
        sweep: bool = False,
        suspects: bool = False,
        with_followers: bool = False,
    ) -> list[ClaimedRow]:
        """Claim rows that are due, in id order: see ``outbox.claim_rows`` in the schema."""
        parameters = {
            "sink": sink,
            "owner": owner,
            "lease": lease,
            "lease_for": lease_seconds,
            "rows": rows,
            "bytes": payload_bytes,
            "hold": hold,
            "keys": list(keys),
            "sweep": sweep,
            "suspects": suspects,
            "with_followers": with_followers,
        }
        claimed = await self._rows("claim_rows", parameters)
        claimed.sort(key=lambda row: row[0])
        return [ClaimedRow._make((Event(*row[:-3]), *row[-3:], lease)) for row in claimed]

    async def standing(self, sink: str, most: int) -> tuple[int, bool]:
        """How many events of the sink stand as rows to be delivered, counted up to ``most`` of each sort of rows.

        And whether one of them came back without an attempt being counted: it waits for a destination or part of one.
        """
        [(count, waiting)] = await self._rows("standing", {"sink": sink, "most": most})
        return count, waiting

    async def give_rows_back(self, sink: str, owner: UUID) -> int:
        """End the leases of rows that ``owner`` claimed and does not deliver any more; returns how many."""
        return await self._do("give_rows_back", {"sink": sink, "owner": owner})

    async def rows_done(self, sink: str, done: Sequence[tuple[int, UUID]]) -> set[int]:
        """Remove delivered rows (id, lease); returns the ids whose lease was still ours."""
        parameters = {"sink": sink, "ids": [d[0] for d in done], "leases": [d[1] for d in done]}
        return {row_id for (row_id,) in await self._rows("rows_done", parameters)}

    async def rows_back(self, sink: str, back: Sequence[RowBack]) -> set[int]:
        """Give back rows that were not delivered; returns the ids whose lease was still ours."""
        parameters = {
            "sink": sink,
            "ids": [r.id for r in back],
            "leases": [r.lease for r in back],
            "states": [r.state for r in back],
            "due_in": [r.due_in for r in back],
            "attempts": [r.attempts for r in back],
            "errors": [r.error for r in back],
            "statuses": [r.status for r in back],
            "last_attempts": [_attempt(r.attempt) for r in back],
        }
        return {row_id for (row_id,) in await self._rows("rows_back", parameters)}

    # -- housekeeping -----------------------------------------------------------------------------------------

    async def make_partitions(self) -> int:
        """Make the partitions that are missing ahead; returns how many were made."""
        [(made,)] = await self._rows("make_partitions", {})
        return made

    async def trim_progress(self) -> int:
        """Remove outranked rows of the ledger; returns how many."""
        return await self._do("trim_progress", {})

    async def trim_relays(self) -> int:
        """Remove relays that were last seen long ago; returns how many."""
        return await self._do("trim_relays", {})


def _shards(held: Mapping[int, int]) -> dict[str, Any]:
    return {"shards": list(held.keys()), "epochs": list(held.values())}


def _positions(positions: Mapping[int, tuple[int, Position]]) -> dict[str, Any]:
    """Each position once, and for each shard which of them is its."""
    at = list(dict.fromkeys(position for _, position in positions.values()))
    places = {position: place for place, position in enumerate(at, 1)}
    return {
        "shards": list(positions),
        "epochs": [epoch for epoch, _ in positions.values()],
        "places": [places[position] for _, position in positions.values()],
        "a_seqs": [p.a.seq for p in at],
        "a_snapshots": [p.a.snapshot for p in at],
        "a_nexts": [p.a.next_xid for p in at],
        "b_seqs": [p.b.seq if p.b else None for p in at],
        "b_snapshots": [p.b.snapshot if p.b else None for p in at],
        "b_nexts": [p.b.next_xid if p.b else None for p in at],
        "lasts": [min(p.last, FOR_EVER) for p in at],
    }


def _attempt(attempt: Attempt | None) -> str | None:
    """What is kept of an attempt, as a JSON object; what is not known is left out."""
    if attempt is None:
        return None
    answer = None if attempt.answer is None else printable(attempt.answer)
    known = {"code": attempt.code, "seconds": attempt.seconds, "answer": answer, "steps": dict(attempt.steps)}
    return json.dumps({name: value for name, value in known.items() if value not in (None, {})})


def _new_rows(rows: Sequence[NewRow], epochs: Mapping[int, int]) -> dict[str, Any]:
    fence = sorted({row.shard for row in rows})
    return {
        "ids": [r.id for r in rows],
        "states": [r.state for r in rows],
        "ordereds": [r.ordered for r in rows],
        "due_in": [r.due_in for r in rows],
        "attempts": [r.attempts for r in rows],
        "claims": [r.claims for r in rows],
        "leases": [r.lease for r in rows],
        "lease_for": [r.lease_for for r in rows],
        "errors": [r.error for r in rows],
        "statuses": [r.status for r in rows],
        "last_attempts": [_attempt(r.attempt) for r in rows],
        "fence_shards": fence,
        "fence_epochs": [epochs.get(shard, -1) for shard in fence],
    }
