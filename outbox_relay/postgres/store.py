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
from psycopg.pq import ConnStatus, TransactionStatus
from psycopg.rows import AsyncRowFactory, namedtuple_row, tuple_row
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from outbox_relay.domain.cancellation import propagate_cancellation
from outbox_relay.domain.errors import (
    DatabaseUnavailable,
    DatabaseUnusable,
    IncarnationChanged,
    LeaseLost,
    PositionsMissing,
    StatementFailed,
)
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Attempt, printable
from outbox_relay.domain.window import MAX_ID, Position, Tick
from outbox_relay.postgres.connection import Connection, direct, fix_settings, place
from outbox_relay.postgres.connection_slots import TICKS, ConnectionSlots, caller
from outbox_relay.postgres.errors import encoding_fault, explain, explain_statement
from outbox_relay.postgres.session_settings import Misfit, complaint, misfits, wanted

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
OUT_OF_TIME = "57014"
"""The SQLSTATE of a statement that was cancelled, by the server's timeout too."""
NEWEST_SERVER = 1_000_000
"""A ``server_version_num`` at which every setting exists."""
MOST_PAYLOAD = 1 << 30
"""More than any payload has: the ceiling of the schema alone counts."""
CONNECTION_DEFAULTS: Mapping[str, str | int] = {
    "connect_timeout": CONNECT_SECONDS,
    "tcp_user_timeout": 15_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}
"""A peer that vanished without a word is noticed in 15 to 25 s, not in the kernel's 15 minutes."""


@dataclass(frozen=True, slots=True)
class TickResult:
    """What one tick saw: the tick, the server's incarnation, its WAL position in bytes and its clock.

    ``config_versions`` counts changes of the configuration and of positions: it is higher after each.
    """

    tick: Tick
    incarnation: str
    wal: int
    now: datetime
    config_versions: int


class Claimed(NamedTuple):
    """A shard that is ours: its epoch, and how often its lease lapsed since its position last moved."""

    shard: int
    epoch: int
    crashes: int


class SinkRow(NamedTuple):
    """What the database says of a sink; ``free`` shards have no owner, ``patterns`` are those of its generation.

    ``in_flight_limit``: how many requests a relay may have under way, nothing: as many as its settings say.
    """

    name: str
    generation: int
    paused: bool
    circuit: str
    in_flight_limit: int | None
    free: int
    patterns: Sequence[str]


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

    event: StoredEvent
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
    folder = resources.files("outbox_relay.postgres") / "sql"
    return {
        f.name.removesuffix(".sql"): cast(LiteralString, f.read_text(encoding="utf-8"))
        for f in folder.iterdir()
        if f.name.endswith(".sql")
    }


def event_row(_cursor: AsyncCursor[Any]) -> Callable[[Sequence[Any]], StoredEvent]:
    """Row factory: columns in the order of ``StoredEvent``. Called for every event: a partial is one call without a
    frame.
    """
    return partial(cast(Any, tuple).__new__, StoredEvent)


class Store:
    """A bounded pool of connections and the statements of the relay.

    Raises ``DatabaseUnavailable`` when a connection was lost with a statement: whether it took effect is then unknown.
    Raises ``StatementFailed`` when the statement failed and its connection did not, which concerns the caller alone,
    and ``DatabaseUnusable`` for what waiting does not mend.

    ``server`` is the incarnation of the server that the caller's ticks are from: any other refuses the statement,
    with ``IncarnationChanged``. Nothing: whichever answers.
    """

    def __init__(
        self, dsn: Callable[[], str], *, pooler: bool, connections: int, call_seconds: float = CALL_SECONDS
    ) -> None:
        self._dsn = dsn
        self._sql = statements()
        self._pooler = pooler
        self._prepare_after = None if pooler else 2
        self._connections = connections
        self._slots = ConnectionSlots(connections)
        self._mended_losses = 0
        self._call_seconds = call_seconds
        self._pool: AsyncConnectionPool[Connection] | None = None
        self.connection_losses = 0
        """Incremented when a call loses its connection or reaches another server. Readers compare it to detect stale
        data."""

    async def open(self) -> None:
        """Connect once, to learn what is wrong if anything is, and keep a pool from then on."""
        await self.close()
        try:
            async with asyncio.timeout(CONNECT_SECONDS * 2):
                connection = await self._connect()
                problem = encoding_fault(connection.info)
                try:
                    await self._try(connection)
                finally:
                    await connection.close()
        except TimeoutError:
            raise DatabaseUnavailable(f"the database did not answer within {CONNECT_SECONDS * 2} s") from None
        if problem:
            raise DatabaseUnusable(problem)
        self._pool = AsyncConnectionPool(
            connection_class=Connection,
            conninfo=self._conninfo,
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
        """Replace every connection if one was lost since the last time.

        The others are not checked: one that is lost without a word never answers, and the pool's ``check`` can swallow
        the end of the time that it is given.
        """
        if self._pool is not None and self.connection_losses != self._mended_losses:
            self._mended_losses = self.connection_losses
            await self._pool.drain()

    def _conninfo(self) -> str:
        return self._dsn() if self._pooler else direct(self._dsn())

    async def _connect(self) -> Connection:
        try:
            return await Connection.connect(self._conninfo(), autocommit=True, **cast(Any, CONNECTION_DEFAULTS))
        except psycopg.Error as error:
            raise explain(error) from None

    async def _try(self, connection: Connection) -> None:
        """Raise what is wrong with a connection that was just made."""
        try:
            await self._configure(connection)
            if self._pooler:
                cursor = await connection.execute(self._sql["session_settings"], {"names": list(wanted(NEWEST_SERVER))})
                self._judge(await cursor.fetchall())
        except psycopg.Error as error:
            short = TOO_SHORT.get(error.sqlstate or "") if self._pooler else None
            raise (DatabaseUnusable(complaint([short])) if short else explain(error)) from None

    async def _configure(self, connection: Connection) -> None:
        connection.prepare_threshold = self._prepare_after
        if self._pooler:
            return
        try:
            await fix_settings(connection)
        except BaseException:
            await connection.close()
            raise

    @asynccontextmanager
    async def _connection(self, deadline: float, name: str = "transaction") -> AsyncGenerator[AsyncConnection[Any]]:
        """Lend a connection for at most ``deadline`` seconds, after at most as long a wait for a free slot."""
        if self._pool is None:
            raise DatabaseUnavailable("there is no connection to the database")
        lent = alive = False
        try:
            with propagate_cancellation():
                async with (
                    self._slots.taken(TICKS if name in ("tick", "arm") else caller.get(), name, deadline),
                    asyncio.timeout(deadline),
                    self._pool.connection(timeout=min(deadline, CONNECT_SECONDS)) as connection,
                ):
                    lent = True
                    try:
                        yield connection
                    except BaseException:
                        alive = _alive(connection)
                        raise
        except (PoolTimeout, PoolClosed):
            raise DatabaseUnavailable("no connection to the database could be had") from None
        except TimeoutError:
            self.connection_losses += lent and not alive
            said = f"the database did not answer within {deadline:g} s"
            raise (
                StatementFailed(f"{said}: statement {name}", OUT_OF_TIME) if alive else DatabaseUnavailable(said)
            ) from None
        except psycopg.Error as error:
            explained = explain_statement(error, name) if alive else explain(error)
            self.connection_losses += isinstance(explained, DatabaseUnavailable | IncarnationChanged)
            raise explained from None

    async def _rows(
        self,
        name: str,
        parameters: Mapping[str, Any],
        row_factory: AsyncRowFactory[T] = TUPLES,
        deadline: float | None = None,
    ) -> list[T]:
        async with self._connection(deadline or self._call_seconds, name) as connection:
            cursor = connection.cursor(binary=True, row_factory=row_factory)
            try:
                await cursor.execute(self._sql[name], parameters)
                return await cursor.fetchall()
            except (MemoryError, ValueError, ArithmeticError) as error:  # a value that cannot be sent, or loaded
                raise explain_statement(error, name) from None

    async def _do(self, name: str, parameters: Mapping[str, Any], deadline: float | None = None) -> int:
        async with self._connection(deadline or self._call_seconds, name) as connection:
            try:
                return (await connection.execute(self._sql[name], parameters)).rowcount
            except (MemoryError, ValueError, ArithmeticError) as error:
                raise explain_statement(error, name) from None

    async def named(self, name: str, parameters: Mapping[str, Any], deadline: float | None = None) -> list[Any]:
        """The rows of a statement file as named tuples: for people's questions, not for the data path."""
        return await self._rows(name, parameters, cast(Any, namedtuple_row), deadline)

    @asynccontextmanager
    async def transaction(self, deadline: float = CALL_SECONDS) -> AsyncGenerator[AsyncConnection[Any]]:
        """A connection in a transaction that ends with the block: for an emit, never for the data path."""
        async with self._connection(deadline) as connection, connection.transaction():
            yield connection

    # -- what the schema and the server are ---------------------------------------------------------------

    async def check_session(self) -> None:
        """Raise ``DatabaseUnusable`` when a session behind a pooler has settings that the relay cannot work with.

        A direct connection sets them itself.
        """
        if not self._pooler:
            return
        try:
            self._judge(await self._rows("session_settings", {"names": list(wanted(NEWEST_SERVER))}))
        except StatementFailed as error:
            if (short := TOO_SHORT.get(error.sqlstate or "")) is None:
                raise
            raise DatabaseUnusable(complaint([short])) from None

    def _judge(self, found: Sequence[Any]) -> None:
        if wrong := misfits(found):
            raise DatabaseUnusable(complaint(wrong))

    async def place(self) -> tuple[int, int]:
        """Return what tells this database from all others: the cluster's system identifier, the database's oid."""
        async with self._connection(self._call_seconds, "place") as connection:
            return await place(connection)

    async def arm(self) -> None:
        """Mark the server, so that a restart after the crash of one of its processes shows: see ``outbox.arm``."""
        await self._rows("arm", {}, deadline=min(TICK_SECONDS, self._call_seconds))

    async def schema(self) -> tuple[int, int]:
        """(version of the schema, oldest version that a relay may have been made for)."""
        return (await self._rows("schema", {}))[0]

    async def max_payload_bytes(self) -> int | None:
        """The largest payload that applications may emit, in bytes; nothing if what is set is no number."""
        [(found,)] = await self._rows("max_payload", {})
        return found

    async def floor(self) -> int:
        """The floor of the numbering (see ``outbox.rebase``).

        Raises ``DatabaseUnusable`` when the log comes from another cluster, or ids or xids are stored that the server
        has not given out yet.
        """
        [(floor, ids_ahead, highest_xid, elsewhere)] = await self._rows("sane", {})
        if elsewhere:
            raise DatabaseUnusable(
                "the log comes from another cluster, as after a restore, a move or pg_upgrade: stop every relay, then "
                "run outbox-relay rebase"
            )
        if ids_ahead or highest_xid > (await self.tick()).tick.next_xid:
            raise DatabaseUnusable(
                "the log holds ids or transaction numbers that this server has not given out yet, as after a restore "
                "into another cluster: stop every relay, then run outbox-relay rebase"
            )
        return floor

    # -- the log ------------------------------------------------------------------------------------------

    async def tick(self) -> TickResult:
        """Take a tick."""
        deadline = min(TICK_SECONDS, self._call_seconds)
        [(seq, snapshot, next_xid, incarnation, wal, now, versions)] = await self._rows("tick", {}, TUPLES, deadline)
        return TickResult(Tick(seq, snapshot, next_xid), incarnation, wal, now, int(versions))

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
    ) -> list[StoredEvent]:
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
    ) -> list[StoredEvent]:
        """The latecomers of the window from ``a`` to ``b``, otherwise as ``read_rest``.

        With ``most_payload`` the read may be incomplete: see ``event.pop_scan_end``.
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

    async def reregister_sink(
        self, name: str, patterns: Sequence[str], generation: int, tick: Tick, *, server: str | None = None
    ) -> int | None:
        """Give a sink these patterns if ``generation`` is still its newest, or if they are in force already.

        Returns the generation under which the sink has them; None when another configuration is in force by now.
        """
        parameters = {
            "wanted": json.dumps([{"name": name, "patterns": list(patterns)}]),
            "seq": tick.seq,
            "snapshot": tick.snapshot,
            "next": tick.next_xid,
            "only_from": generation,
            "patterns": list(patterns),
            "server": server,
        }
        rows = await self._rows("reregister_sink", parameters)
        return rows[0][0] if rows else None

    async def sinks(self, names: Iterable[str], deadline: float | None = None) -> list[SinkRow]:
        """What the database says of these sinks."""
        return [SinkRow(*row) for row in await self._rows("sinks", {"sinks": list(names)}, deadline=deadline)]

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

    async def release_unknown_shards(self, sink: str, owner: UUID, known: Iterable[int]) -> int:
        """Give up the shards that ``owner`` owns and that are not ``known`` to it; returns how many."""
        return await self._do("release_unknown", {"sink": sink, "owner": owner, "known": list(known)})

    async def reset_crashes(self, sink: str, owner: UUID, held: Mapping[int, int]) -> None:
        """Forget the crashes of shards (shard → epoch) whose position has moved."""
        await self._do("reset_crashes", {"sink": sink, "owner": owner, **_shards(held)})

    async def positions(self, sink: str, shards: Iterable[int], *, server: str | None = None) -> dict[int, Position]:
        """Return where these shards stand in the ledger.

        Raises ``PositionsMissing`` when one of them has no position.
        """
        found: dict[int, Position] = {}
        wanted = list(shards)
        parameters = {"sink": sink, "shards": wanted, "server": server}
        for shard, a_seq, a_snapshot, a_next, b_seq, b_snapshot, b_next, last in await self._rows(
            "positions", parameters
        ):
            b = None if b_seq is None else Tick(b_seq, b_snapshot, b_next)
            found[shard] = Position(Tick(a_seq, a_snapshot, a_next), b, last)
        if missing := sorted(set(wanted) - found.keys()):
            raise PositionsMissing(missing_positions(sink, missing))
        return found

    async def missing_positions(self) -> dict[str, list[int]]:
        """Return the shards without a position, by the names of their sinks; sinks that have all are left out."""
        return dict(await self._rows("missing_positions", {}))

    async def record_circuit(
        self, sink: str, circuit: str, error: str | None, in_flight_limit: int | None, pause_after_seconds: float
    ) -> None:
        """Write what was found out about the destination, for people.

        ``in_flight_limit`` is how many requests may be under way at once since it asked for less; nothing: as many as
        the settings say. If it was down for ``pause_after_seconds`` (0: never) the sink is paused.
        """
        found = {"sink": sink, "circuit": circuit, "error": error, "in_flight_limit": in_flight_limit}
        await self._do("record_circuit", found | {"pause_after": int(pause_after_seconds)})

    async def record_trouble(self, sink: str, error: str | None) -> None:
        """Write what the client of the sink has found out without an event; None clears what was written so."""
        await self._do("record_trouble", {"sink": sink, "error": error})

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
        suspects: bool = False,
        with_followers: bool = False,
        most_payload: int = MOST_PAYLOAD,
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
            "suspects": suspects,
            "with_followers": with_followers,
            "most_payload": most_payload,
        }
        claimed = await self._rows("claim_rows", parameters)
        claimed.sort(key=lambda row: row[0])
        return [ClaimedRow._make((StoredEvent(*row[:-3]), *row[-3:], lease)) for row in claimed]

    async def row_payload(self, sink: str, event_id: int, lease: UUID) -> tuple[bytes | None, str | None] | None:
        """Return the payload of a row that is under ``lease``, or why it is above the ceiling of the schema.

        None if there is no such row, or it has no payload.
        """
        found = await self._rows("row_payload", {"sink": sink, "id": event_id, "lease": lease})
        return found[0] if found else None

    async def held_keys(self, sink: str, after: str | None, most: int) -> list[str]:
        """Return the next keys with held rows behind ``after`` (None: from the first one), at most ``most``."""
        return [key for (key,) in await self._rows("held_keys", {"sink": sink, "after": after, "most": most})]

    async def standing(self, sink: str, most: int, *, trouble: bool) -> tuple[int, bool]:
        """Count the events of the sink that are rows to be delivered, up to ``most`` of each sort of rows.

        Also say whether one of them came back without an attempt being counted, so waits for a part of the destination,
        if asked for ``trouble``.
        """
        parameters = {"sink": sink, "most": most, "trouble": trouble}
        [(count, waiting)] = await self._rows("standing", parameters)
        return count, waiting

    async def give_rows_back(self, sink: str, owner: UUID) -> int:
        """End the leases of rows that ``owner`` claimed and does not deliver any more; returns how many."""
        [(count,)] = await self._rows("give_rows_back", {"sink": sink, "owner": owner})
        return count

    async def give_leases_back(self, sink: str, leases: Sequence[UUID]) -> int:
        """End these leases of rows, which were claimed and not tried; returns how many rows there were."""
        [(count,)] = await self._rows("give_leases_back", {"sink": sink, "leases": list(leases)})
        return count

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

    async def trim_progress(self, most: int) -> int:
        """Remove outranked rows among the ``most`` oldest ones of each sink in the ledger; returns how many."""
        return await self._do("trim_progress", {"most": most})

    async def trim_relays(self) -> int:
        """Remove relays that were last seen long ago; returns how many."""
        return await self._do("trim_relays", {})


def missing_positions(sink: str, shards: Sequence[int]) -> str:
    """Return what to say of ``shards`` of ``sink`` that have no position: an error message with its fix."""
    some = ", ".join(map(str, shards[:8])) + (", …" if len(shards) > 8 else "")
    return (
        f"sink {sink}: {len(shards)} of its shards have no position ({some}): rows of outbox.progress were deleted. "
        "Stop every relay, then run outbox-relay rebase, which has them read the log from its beginning"
    )


TOO_SHORT = {
    OUT_OF_TIME: Misfit("statement_timeout", "shorter than a statement takes", "9s"),
    "57P05": Misfit("idle_session_timeout", "shorter than a moment", "0"),
    "25P04": Misfit("transaction_timeout", "shorter than a statement takes", "0"),
}
"""SQLSTATE → the setting that ended the question what the settings are."""


def _alive(connection: AsyncConnection[Any]) -> bool:
    """Whether the server has answered the last statement on this connection, be it by refusing or cancelling it."""
    unanswered = (TransactionStatus.ACTIVE, TransactionStatus.UNKNOWN)
    return connection.pgconn.status == ConnStatus.OK and connection.pgconn.transaction_status not in unanswered


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
        "lasts": [min(p.last, MAX_ID) for p in at],
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
