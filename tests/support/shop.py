"""Writers that emit as applications do; what they committed is compared with what arrived.

Every key has a row that counts its events. A writer locks the rows of some keys, raises their counts and emits one
event per key with its count, all in one transaction. So what is committed is known from the counts, whatever became
of any single COMMIT, and of each key events 1 to n must arrive, first in that order.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import psycopg

from outbox_relay import outbox
from outbox_relay.workbench.shop.arrivals import CheckResult as Report
from outbox_relay.workbench.shop.arrivals import DeliveryChecker

TABLE = """create table if not exists shop_count (key text primary key, n bigint not null default 0);
insert into shop_count (key) select 'key-' || g from generate_series(0, %s - 1) g on conflict do nothing"""
TAKE = """with taken as (select key from shop_count where key = any(%s) order by key for update)
update shop_count c set n = n + 1 from taken where c.key = taken.key returning c.key, c.n"""


@dataclass
class Writers:
    """`count` threads that emit until told to stop: rollbacks, savepoints and long transactions among them.

    Their own statements are not prepared, as befits who may have a pooler in between. What an emit does is its matter.
    """

    dsn: str
    count: int = 8
    keys: int = 20_000
    keys_per_transaction: int = 50
    seed: int = 1
    rolled_back: int = 0
    unknown: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list[threading.Thread])

    def prepare(self) -> None:
        """Make the table of counts."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(TABLE.replace("%s", str(self.keys)).encode())

    def start(self) -> None:
        """Begin to emit."""
        self._threads = [threading.Thread(target=self._write, args=(i,), daemon=True) for i in range(self.count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Finish the transactions under way."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a writer did not stop"

    def committed(self) -> dict[str, int]:
        """Return key → number of its committed events."""
        with psycopg.connect(self.dsn) as connection:
            return dict(connection.execute("select key, n from shop_count where n > 0").fetchall())

    def total(self) -> int:
        """Return the number of events committed so far."""
        with psycopg.connect(self.dsn) as connection:
            row = connection.execute("select coalesce(sum(n), 0)::bigint from shop_count").fetchone()
            assert row is not None
            return row[0]

    def _write(self, number: int) -> None:
        rng = random.Random(self.seed * 1000 + number)
        while not self._stop.is_set():
            try:
                with psycopg.connect(self.dsn, autocommit=True, connect_timeout=5) as connection:
                    while not self._stop.is_set():
                        self._transact(connection, rng, number)
            except (psycopg.OperationalError, psycopg.Rollback):  # the latter where the rollback found it broken
                self.unknown += 1
                time.sleep(0.1)  # the server is restarting

    def _transact(self, connection: psycopg.Connection, rng: random.Random, number: int) -> None:
        with connection.transaction():
            if rng.random() < 0.2:
                connection.execute("select pg_current_xact_id()", prepare=False)
            for _ in range(rng.choice([1, 1, 1, 2])):
                self._emit_some(connection, rng)
            if rng.random() < 0.1:
                self._stop.wait(rng.random() * 0.05)
            if number == 0 and rng.random() < 0.05:
                self._stop.wait(1.0)
            if rng.random() < 0.1:
                self.rolled_back += 1
                raise psycopg.Rollback

    def _emit_some(self, connection: psycopg.Connection, rng: random.Random) -> None:
        keys = [f"key-{k}" for k in rng.sample(range(self.keys), rng.randint(1, self.keys_per_transaction))]
        with connection.transaction():
            taken = connection.execute(TAKE, (keys,), prepare=False).fetchall()
            outbox.emit_many(
                connection, [outbox.Event("order.created", {"key": key, "n": n}, key=key) for key, n in taken]
            )
            if rng.random() < 0.1:
                raise psycopg.Rollback


def compare(committed: dict[str, int], values: Iterable[bytes]) -> Report:
    """Judge the payloads that arrived, in the order in which they arrived per key."""
    checker = DeliveryChecker()
    for value in values:
        event = json.loads(value)
        checker.add(event["key"], event["n"])
    return checker.result({(key, n, "") for key, most in committed.items() for n in range(1, most + 1)})
