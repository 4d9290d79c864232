"""Positions, rows, owners and relays as a relay would write them, put where a test wants them."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.window import Position, Tick
from outbox_relay.postgres.rows import NewRow
from outbox_relay.postgres.store import Store
from tests.support.database import Database, query

ALL = range(SHARDS)


@dataclass
class Ledger:
    """One relay's hand on a database, over a store of its own."""

    database: Database
    store: Store
    relay: UUID = field(default_factory=uuid4)
    epochs: dict[str, dict[int, int]] = field(default_factory=dict[str, dict[int, int]])
    generations: dict[str, int] = field(default_factory=dict[str, int])
    _shards: dict[int, int] = field(default_factory=dict[int, int])

    def register(self, *sinks: tuple[str, list[str], str]) -> None:
        """Make sinks (name, patterns, start) known."""
        for name, generation in self.store.register_sinks(sinks, self.tick()).items():
            self.generations[name] = generation
            self.know_epochs(name)

    def know_epochs(self, sink: str) -> None:
        """Write positions of `sink` at the epochs that its shards have now."""
        self.epochs[sink] = dict(self.query("select shard, epoch from outbox.shard where sink = %s", sink))

    def _generation(self, sink: str) -> int:
        if sink not in self.generations:
            self.generations[sink] = self.store.sinks([sink])[0].generation
        return self.generations[sink]

    def tick(self) -> Tick:
        """Return a tick that is taken now."""
        return self.store.tick().tick

    def live(self, name: str, *sinks: str, version: str = "1.2.3") -> None:
        """Register this relay under ``name``, alive and serving ``sinks``."""
        self.store.heartbeat(self.relay, name, version, sinks, 5.0)

    def _known(self, sink: str) -> list[int]:
        """Return the shards that this relay owns now."""
        text = "select shard from outbox.owned where sink = %s and owner = %s"
        return [shard for (shard,) in self.query(text, sink, self.relay)]

    def own(self, sink: str, most: int = SHARDS, lease_seconds: float = 60.0) -> list[int]:
        """Claim up to `most` shards; returns those that are claimed now."""
        known = self._known(sink)
        self.store.renew_sessions(self.relay, [sink], lease_seconds)
        claimed = self.store.claim_shards(sink, self.relay, self._generation(sink), most, known=known)
        self.epochs.setdefault(sink, {}).update({c.shard: c.epoch for c in claimed})
        return [c.shard for c in claimed]

    def lapse(self) -> None:
        """Let the leases of this relay end now."""
        self.do("update outbox.session set lease_until = clock_timestamp() where owner = %s", self.relay)

    def place(self, sink: str, position: Position, shards: Iterable[int] = ALL) -> None:
        """Set the shards of ``sink`` to ``position``."""
        epochs = self.epochs.get(sink, {})
        self.store.settle(sink, self.relay, {s: (epochs.get(s, 0), position) for s in shards}, [], {})

    def catch_up(self, sink: str) -> None:
        """Put every position of a sink behind everything that is committed now."""
        self.place(sink, Position(self.tick()))

    def park(self, sink: str, *rows: NewRow) -> None:
        """Make rows of events; their shards must be owned."""
        self.store.settle(sink, self.relay, {}, rows, self.epochs[sink])

    def emit(self, *keys: str | None, type: str = "test.event", **options: Any) -> list[int]:  # noqa: A002 - emit's name
        """Emit an event per key in one transaction; returns their ids. `options` go to outbox.emit_raw."""
        with self.database.connect() as connection:
            return [emit(connection, key, type, **options) for key in keys]

    def schedule(self, key: str | None, at: Any, type: str = "test.event") -> str:  # noqa: A002 - emit's name
        """Emit an event that is scheduled for ``at``; return its uid."""
        text = "select outbox.emit(%s, '{}', key => %s, deliver_at => %s)::text"
        [(uid,)] = self.query(text, type, key, at)
        return uid

    def row(self, event_id: int, state: str = "waiting", **values: Any) -> NewRow:
        """Return a row to park, of an event of the log."""
        if event_id not in self._shards:
            self._shards.update(self.query("select id, shard from outbox.event"))
        return NewRow(event_id, self._shards[event_id], state, values.pop("ordered", True), **values)

    def uid(self, event_id: int) -> str:
        """Return an event's uid."""
        [(uid,)] = self.query("select uid::text from outbox.event where id = %s", event_id)
        return uid

    def query(self, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run a query as superuser and return its rows."""
        return query(self.database, text, *parameters)

    def do(self, text: str, *parameters: Any) -> None:
        """Execute a statement without rows, as superuser."""
        query(self.database, text, *parameters)


EMIT = """with emitted as (select outbox.emit_raw(%s, %s, key => %s, deliver_at => %s, headers => %s::jsonb) as uid)
select currval('outbox.event_id_seq') from emitted where uid is not null"""


def emit(
    connection: Any,
    key: str | None,
    type: str = "test.event",  # noqa: A002 - emit's name
    payload: bytes = b"{}",
    deliver_at: Any = None,
    headers: str | None = None,
) -> int:
    """Emit one event on `connection`, in its transaction; returns the id."""
    return connection.execute(EMIT, (type, payload, key, deliver_at, headers)).fetchone()[0]


@contextmanager
def ledger(database: Database) -> Generator[Ledger]:
    """Yield a ledger of ``database``, which is closed at the end."""
    store = Store(lambda: database.dsn, pooler=False, connections=2)
    store.open()
    try:
        yield Ledger(database, store)
    finally:
        store.close()
