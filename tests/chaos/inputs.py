"""Faults of applications: events that no sink accepts, odd events, and huge, long or forgotten transactions."""

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

from tests.chaos.expected import ExpectedFile, Intended
from tests.chaos.nemesis import Nemesis, Strike
from tests.chaos.writer import LOCK, RAISE, payload_of, type_of

Connection = psycopg.Connection[tuple[object, ...]]
Emit = Callable[[Connection], list[Intended]]

POISON, ODD = "poison", "odd"
"""Values of `kind` in payloads. A poison event must become a dead letter, an odd one may."""
BIG_BYTES = 2 << 20
"""A size above the limit for payloads."""
TRY_SECONDS = 600.0
"""Time limit for retries of a transaction. A restore takes the database away for a minute, and a huge transaction is
often interrupted by the next fault of the database."""
AGAIN_SECONDS = 1.0
HUGE_EVENTS, LONG_EVENTS = 20_000, 20
HUGE_SECONDS, LONG_SECONDS = (2.0, 4.0), (12.0, 20.0)
"""Time for which the transaction stays open after its last event."""
OWN_KEYS = 400
"""Number of keys for these transactions, above those of the writers, who would otherwise wait for their locks."""
FAR_TIMES = ("20000-01-01 00:00:00+00", "0044-03-15 00:00:00+00 BC", "9999-12-31 23:59:59+00")
KINDS: Sequence[tuple[str, Mapping[str, object]]] = (
    *((POISON, {"deliver_at": at}) for at in FAR_TIMES),
    (POISON, {"pad": BIG_BYTES}),
    (ODD, {"headers": '{"number": 1}'}),
    (ODD, {"headers": '["a", null]'}),
    (ODD, {"headers": '{"outbox-type": "forged", "id": "forged", "content-length": "1"}'}),
    (ODD, {"content_type": "a\r\nb"}),
)
INSERT = b"""insert into outbox.event (uid, type, key, payload, content_type, headers, deliver_at, shard)
values (%s, %s, %s, %s, %s, %s, %s, outbox_internal.shard_of(%s, null))"""
MANY = b"""select e.key, e.n, outbox.emit(e.type, jsonb_build_object('key', e.key, 'n', e.n, 'at', %s::float8),
    key => 'key-' || e.key)::text
  from unnest(%s::int[], %s::bigint[], %s::text[]) e (key, n, type)"""


class Emitting:
    """Runs transactions and records them like a writer: on disk before COMMIT is sent."""

    def __init__(self, dsn: str, expected: Path) -> None:
        self._dsn = dsn
        self._expected = ExpectedFile(expected)
        self._number = 0
        self._lock = threading.Lock()

    def commit(self, emit: Emit, seconds: float = 0.0) -> None:
        """Run `emit` in a transaction and commit `seconds` later. Retry if the server fails.

        Raise AssertionError after :data:`TRY_SECONDS`.
        """
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
            self._expected.intend(self._number, intended)
            self._expected.commit(self._number, connection)


@dataclass
class Poison:
    """Inserts poison and odd events of the writers' keys. Other events of these keys must still arrive.

    `emit` must refuse poison, so the owner of the log inserts the rows directly.
    """

    emitting: Emitting
    keys: int
    fault: str = "poison"

    def strike(self, rng: random.Random) -> Strike:
        """Insert one event of each kind in one transaction."""
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
        connection.execute(INSERT, (*values, odd.get("headers"), odd.get("deliver_at"), f"key-{key}"))
        intended.append((key, number, uid))
    return intended


def _refused(connection: Connection) -> None:
    """Check that `outbox.emit` refuses poison."""
    for at in FAR_TIMES:
        try:
            with connection.transaction():
                connection.execute("select outbox.emit('shop.order', '1', deliver_at => %s::timestamptz)", (at,))
                raise AssertionError(f"outbox.emit took deliver_at => {at}")
        except errors.InvalidParameterValue:
            continue


@dataclass
class Transaction:
    """A transaction with many events, or one that stays open for long, with keys of its own."""

    emitting: Emitting
    keys: int
    fault: str
    events: int
    seconds: tuple[float, float]

    def strike(self, rng: random.Random) -> Strike:
        """Run one transaction and commit it late."""
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
    """A forgotten transaction that has a snapshot and a transaction id and is idle."""

    dsn: str
    fault: str = "held snapshot"
    seconds: tuple[float, float] = (10.0, 20.0)

    def strike(self, rng: random.Random) -> Strike:
        """Keep a transaction open for a while, or until the server ends it."""
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
    """Return a nemesis for each fault of this module, and the files with their transactions."""
    paths = [directory / f"expected-{name}.jsonl" for name in ("poison", "huge", "long")]
    poison, huge, long = (Emitting(dsn, path) for path in paths)
    found: list[Nemesis] = [
        Poison(poison, keys),
        Transaction(huge, keys, "huge transaction", HUGE_EVENTS, HUGE_SECONDS),
        Transaction(long, keys, "long transaction", LONG_EVENTS, LONG_SECONDS),
        HeldSnapshot(dsn),
    ]
    return found, paths
