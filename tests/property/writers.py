"""Writers that emit in every way a transaction can, and the oracle that knows what they committed.

Every key has a row that counts its events; a writer raises the count and emits an event with it, under the row's lock.
What a rolled-back savepoint emits is marked. So what must be read of a key is 1 to its count, in that order.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg

from outbox_relay.domain.event import StoredEvent

WRITERS = 12
KEYS = 40
SLOW_KEY, SPANNING_KEY = "slow", "spanning"
PHANTOM = -1
"""The count of an event whose savepoint is rolled back."""
SLOW_SECONDS = 2.0
STOP_SECONDS = 30

TABLES = """
create table business (key text primary key, n bigint not null default 0);
insert into business (key) select 'key-' || g from generate_series(0, 39) g union all values ('slow'), ('spanning');
create table scratch (n bigint);
create function storm(savepoints integer) returns void language plpgsql as $$
begin
    for i in 1..savepoints loop
        begin
            insert into scratch values (i);
        exception when division_by_zero then
            null;
        end;
    end loop;
end
$$;
"""
COUNT = "update business set n = n + 1 where key = %s returning n"
EMIT = "select outbox.emit('counted', jsonb_build_object('key', %s::text, 'n', %s::bigint), key => %s)"
EMIT_MANY = """
select outbox.emit('counted', jsonb_build_object('key', k.key, 'n', k.n), key => k.key)
  from unnest(%s::text[], %s::bigint[]) k (key, n)
"""


def emit(connection: psycopg.Connection[Any], key: str, n: int) -> None:
    """Emit event ``n`` of ``key`` in the connection's transaction."""
    connection.execute(EMIT, (key, n, key))


def emit_next(connection: psycopg.Connection[Any], key: str) -> None:
    """Emit the next event of ``key``, under the lock of its row."""
    row = connection.execute(COUNT, (key,)).fetchone()
    assert row is not None
    emit(connection, key, row[0])


@dataclass
class Writers:
    """Twelve threads that write until told to stop, and one transaction that spans all of it."""

    dsn: str
    seed: int
    done: Counter[str] = field(default_factory=Counter[str])
    """Number of transactions of each kind."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _failures: list[BaseException] = field(default_factory=list[BaseException])

    @contextmanager
    def at_work(self) -> Generator[None]:
        """Write while the block runs; at its end every transaction has finished, the spanning one last."""
        with psycopg.connect(self.dsn) as spanning:
            emit_next(spanning, SPANNING_KEY)
            threads = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(WRITERS)]
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                self._stop.set()
                for thread in threads:
                    thread.join(STOP_SECONDS)
            assert not any(thread.is_alive() for thread in threads), "a writer did not stop"
            assert not self._failures, self._failures
            emit_next(spanning, SPANNING_KEY)

    def _work(self, number: int) -> None:
        rng = random.Random(self.seed * 100 + number)
        try:
            with psycopg.connect(self.dsn, autocommit=True) as connection:
                if number == 0:
                    self._slow(connection)
                while not self._stop.is_set():
                    self._transact(connection, rng)
        except BaseException as failure:
            self._failures.append(failure)
            raise

    def _slow(self, connection: psycopg.Connection[Any]) -> None:
        """Run a transaction of two seconds that emits first and last."""
        with connection.transaction():
            emit_next(connection, SLOW_KEY)
            self._stop.wait(SLOW_SECONDS)
            emit_next(connection, SLOW_KEY)
        self.done["slow"] += 1

    def _transact(self, connection: psycopg.Connection[Any], rng: random.Random) -> None:
        kind = rng.choices(["emits", "silent", "storm", "rolled back"], [70, 10, 2, 18])[0]
        with suppress(psycopg.Rollback), connection.transaction():
            if rng.random() < 0.3:
                connection.execute("insert into scratch values (0)")  # takes the xid early
            self._idle(rng, 0.3, 0.02)
            if kind == "storm":
                connection.execute("select storm(%s)", (rng.randint(1000, 3000),))
            if kind != "silent":
                self._emit_some(connection, rng)
            self._idle(rng, 0.2, 0.05)
            if kind == "rolled back":
                raise psycopg.Rollback
        self.done[kind] += 1

    def _emit_some(self, connection: psycopg.Connection[Any], rng: random.Random) -> None:
        keys = [f"key-{k}" for k in sorted(rng.sample(range(KEYS), rng.randint(1, 3)))]
        if rng.random() < 0.2:
            counts = [connection.execute(COUNT, (key,)).fetchall()[0][0] for key in keys]
            connection.execute(EMIT_MANY, (keys, counts))
            return
        for key in keys:
            if rng.random() < 0.2:
                with connection.transaction(force_rollback=True):
                    emit(connection, key, PHANTOM)
            if rng.random() < 0.4:
                with connection.transaction():
                    emit_next(connection, key)
            else:
                emit_next(connection, key)

    def _idle(self, rng: random.Random, how_often: float, seconds: float) -> None:
        if rng.random() < how_often:
            self._stop.wait(rng.random() * seconds)

    def committed(self) -> dict[str, int]:
        """Return key → number of its committed events."""
        with psycopg.connect(self.dsn) as connection:
            return dict(connection.execute("select key, n from business where n > 0").fetchall())


@dataclass(frozen=True)
class Verdict:
    """The events that were read, compared with those committed; numbers are of events, ``disordered`` of keys."""

    lost: int
    extra: int
    disordered: int


def judge(committed: dict[str, int], got: Iterable[StoredEvent]) -> Verdict:
    """Compare what was read with what was committed."""
    expected = Counter({(key, n): 1 for key, most in committed.items() for n in range(1, most + 1)})
    read = [(content["key"], content["n"]) for content in (json.loads(event.payload) for event in got)]
    by_key: dict[str, list[int]] = {}
    for key, n in read:
        by_key.setdefault(key, []).append(n)
    return Verdict(
        lost=(expected - Counter(read)).total(),
        extra=(Counter(read) - expected).total(),
        disordered=sum(numbers != sorted(numbers) for numbers in by_key.values()),
    )
