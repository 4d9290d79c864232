"""What applications put in: events that no sink can take, odd ones, transactions that are huge or long."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psycopg
from psycopg import errors

from tests.chaos.nemesis import Nemesis, Strike
from tests.chaos.truth import Intended, TruthFile
from tests.chaos.writer import LOCK, RAISE, payload_of, type_of

Connection = psycopg.Connection[tuple[object, ...]]
Emit = Callable[[Connection], list[Intended]]

POISON, ODD = "poison", "odd"
"""What the payload of an event says under `kind`: it must end dead; it may end dead or arrive."""
BIG_BYTES = 2 << 20
"""Above the ceiling of payloads."""
TRY_SECONDS = 600.0
"""How long a transaction is tried again: a restore takes the database away, and a huge one seldom ends between two
faults of the database."""
AGAIN_SECONDS = 1.0
HUGE_EVENTS, LONG_EVENTS = 20_000, 20
HUGE_SECONDS, LONG_SECONDS = (2.0, 4.0), (12.0, 20.0)
"""How long such a transaction stays open behind its last event."""
OWN_KEYS = 400
"""Keys of those transactions alone: the writers would wait for them. They lie above the writers' keys."""
FAR_TIMES = ("20000-01-01 00:00:00+00", "0044-03-15 00:00:00+00 BC", "9999-12-31 23:59:59+00")
KINDS: Sequence[tuple[str, Mapping[str, object]]] = (
    *((POISON, {"deliver_at": at}) for at in FAR_TIMES),
    (POISON, {"pad": BIG_BYTES}),
    (ODD, {"headers": '{"number": 1}'}),
    (ODD, {"headers": '["a", null]'}),
    (ODD, {"headers": '{"outbox-type": "forged", "id": "forged", "content-length": "1"}'}),
    (ODD, {"content_type": "a\r\nb"}),
)
INSERT = b"""insert into outbox.event (uid, type, key, payload, content_type, headers, deliver_at)
values (%s, %s, %s, %s, %s, %s, %s)"""
MANY = b"""select e.key, e.n, outbox.emit(e.type, jsonb_build_object('key', e.key, 'n', e.n, 'at', %s::float8),
    key => 'key-' || e.key)::text
  from unnest(%s::int[], %s::bigint[], %s::text[]) e (key, n, type)"""


class Emitting:
    """Transactions that are written down as the writers' are: on disk before COMMIT is sent."""

    def __init__(self, dsn: str, truth: Path) -> None:
        self._dsn = dsn
        self._truth = TruthFile(truth)
        self._number = 0
        self._lock = threading.Lock()

    def commit(self, emit: Emit, seconds: float = 0.0) -> None:
        """Commit what `emit` does, `seconds` after it was done; again when a server failed. Raise when none is left."""
        deadline = time.monotonic() + TRY_SECONDS
        while True:
            try:
                return self._transact(emit, seconds)
            except psycopg.Error as error:
                if time.monotonic() > deadline:
                    raise AssertionError(f"nothing was committed within {TRY_SECONDS:g} s") from error
            time.sleep(AGAIN_SECONDS)  # the server is restarting

    def _transact(self, emit: Emit, seconds: float) -> None:
        with self._lock, psycopg.connect(self._dsn, connect_timeout=5) as connection:
            self._number += 1
            intended = emit(connection)
            time.sleep(seconds)  # the fault itself: it stays open
            self._truth.intend(self._number, intended)
            try:
                connection.commit()
            except psycopg.Error:
                self._truth.end(self._number, "unknown")
                raise
            self._truth.end(self._number, "ok")


@dataclass
class Poison:
    """Events that cannot be delivered and odd ones, among keys that the writers use: their neighbours must flow.

    `emit` must refuse what lies outside its bounds, so these are inserted by the owner of the log.
    """

    emitting: Emitting
    keys: int
    fault: str = "poison"

    def strike(self, rng: random.Random) -> Strike:
        """Insert one of each kind, in one transaction."""
        keys = rng.sample(range(self.keys), len(KINDS))
        began = time.monotonic()
        self.emitting.commit(lambda connection: _insert(connection, keys))
        return Strike(self.fault, began, time.monotonic(), f"{len(KINDS)} events")


def _insert(connection: Connection, keys: list[int]) -> list[Intended]:
    _refused(connection)
    connection.execute(LOCK, (keys,))
    intended: list[Intended] = []
    for (key, number), (kind, odd) in zip(connection.execute(RAISE, (keys,)).fetchall(), KINDS, strict=True):
        assert isinstance(key, int)
        assert isinstance(number, int)
        payload = {**payload_of(key, number), "kind": kind, "pad": "x" * int(str(odd.get("pad", 0)))}
        uid = str(uuid4())
        values = uid, type_of(key), f"key-{key}", json.dumps(payload).encode(), odd.get("content_type", "a/b")
        connection.execute(INSERT, (*values, odd.get("headers"), odd.get("deliver_at")))
        intended.append((key, number, uid))
    return intended


def _refused(connection: Connection) -> None:
    """What would be poison is refused where it is emitted."""
    for at in FAR_TIMES:
        try:
            with connection.transaction():
                connection.execute("select outbox.emit('shop.order', '1', deliver_at => %s::timestamptz)", (at,))
                raise AssertionError(f"outbox.emit took deliver_at => {at}")
        except errors.InvalidParameterValue:
            continue


@dataclass
class Transaction:
    """One transaction with many events or that stays open for long, of keys of its own."""

    emitting: Emitting
    keys: int
    fault: str
    events: int
    seconds: tuple[float, float]

    def strike(self, rng: random.Random) -> Strike:
        """Commit one, late."""
        began = time.monotonic()
        keys = sorted(rng.sample(range(self.keys, self.keys + OWN_KEYS), min(self.events, OWN_KEYS // 2)))
        self.emitting.commit(lambda connection: self._emit(connection, keys), rng.uniform(*self.seconds))
        return Strike(self.fault, began, time.monotonic(), f"{self.events} events")

    def _emit(self, connection: Connection, keys: list[int]) -> list[Intended]:
        connection.execute(LOCK, (keys,))
        intended: list[Intended] = []
        for _ in range(self.events // len(keys)):
            counts = connection.execute(RAISE, (keys,)).fetchall()
            chosen = [key for key, _ in counts]
            types = [type_of(int(str(key))) for key in chosen]
            emitted = connection.execute(MANY, (time.monotonic(), chosen, [n for _, n in counts], types))
            intended += [(int(str(key)), int(str(n)), str(uid)) for key, n, uid in emitted.fetchall()]
        return intended


@dataclass
class HeldSnapshot:
    """A transaction that was forgotten: it has a snapshot and a transaction number, and does nothing."""

    dsn: str
    fault: str = "held snapshot"
    seconds: tuple[float, float] = (10.0, 20.0)

    def strike(self, rng: random.Random) -> Strike:
        """Hold one for a while, or until a server ends it."""
        began = time.monotonic()
        try:
            with psycopg.connect(self.dsn, connect_timeout=5) as connection:
                connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                connection.execute("select pg_current_xact_id(), (select count(*) from outbox.sink)")
                time.sleep(rng.uniform(*self.seconds))  # the fault itself
                connection.rollback()
        except psycopg.OperationalError:
            return Strike(self.fault, began, time.monotonic(), "ended by a server")
        return Strike(self.fault, began, time.monotonic())


def nemeses(dsn: str, directory: Path, keys: int) -> tuple[list[Nemesis], list[Path]]:
    """One for each fault of this module, and the files with what they committed."""
    paths = [directory / f"truth-{name}.jsonl" for name in ("poison", "huge", "long")]
    poison, huge, long = (Emitting(dsn, path) for path in paths)
    found: list[Nemesis] = [
        Poison(poison, keys),
        Transaction(huge, keys, "huge transaction", HUGE_EVENTS, HUGE_SECONDS),
        Transaction(long, keys, "long transaction", LONG_EVENTS, LONG_SECONDS),
        HeldSnapshot(dsn),
    ]
    return found, paths
