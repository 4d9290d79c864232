"""Threads that emit jobs: events with tenants, priorities and unique keys, for the rows sink and the python sinks.

Jobs have keys of their own, numbered as those of the writers. A job that was merged into an earlier one gives its
number back.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import psycopg

from outbox_relay import outbox
from tests.chaos.database import APPLICATION
from tests.chaos.days import NOW
from tests.chaos.expected import ExpectedFile, Intended
from tests.chaos.handlers import EFFECTS
from tests.chaos.unique import Emitted, Merged
from tests.chaos.writer import AGAIN_SECONDS, COUNTS, LOCK, RAISE, UNDONE_SHARE, payload_of

FIRST_KEY = 1_000_000
THREADS = 2
KEYS = 200
"""Keys of one thread, the last :data:`UNIQUE` of which belong to events with unique keys, the same for all threads."""
UNIQUE = 20
PLAIN_EVENTS, UNIQUE_EVENTS = 8, 4
PAUSE_SECONDS = 0.15
TENANTS = ("acme", "globex", "initech", None)
PREPARE = f"""insert into {COUNTS} (key) select {FIRST_KEY} + g from generate_series(0, {THREADS * KEYS} - 1) g;
create table public.{EFFECTS} (uid uuid not null, payload text not null, began float8 not null, ended float8 not null);
grant insert on public.{EFFECTS} to {APPLICATION}"""
TODAY = f"set local {NOW} = 'on'".encode()
Connection = psycopg.Connection[tuple[Any, ...]]


def is_job(key: int) -> bool:
    """Return True if events of this key are jobs."""
    return key >= FIRST_KEY


def type_of(key: int) -> str:
    """Return the type of the jobs of a key."""
    return "work.effect" if key % 2 else "work.call"


def sinks_of(key: int) -> tuple[str, str]:
    """Return the sinks that receive the jobs of a key."""
    return "jobs", "effects" if key % 2 else "calls"


def prepare(dsn: str) -> None:
    """Create the keys, and the table of the handlers' effects."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(PREPARE.encode())


class Jobs:
    """Threads that emit until they are stopped, with a record of each unique key and of the events it merged."""

    def __init__(self, dsn: str, directory: Path, seed: str) -> None:
        self._dsn = dsn
        self._seed = seed
        self._stopping = threading.Event()
        self.files = [directory / f"expected-jobs-{number}.jsonl" for number in range(THREADS)]
        self.emitted: list[Emitted] = []
        self.merged: list[Merged] = []
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(THREADS)]

    def start(self) -> Self:
        """Start the threads."""
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Stop after the current transactions. Raise AssertionError if one does not end."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a thread that emits jobs did not end"

    def _run(self, number: int) -> None:
        rng, transaction = random.Random(f"{self._seed}/jobs/{number}"), 0
        expected = ExpectedFile(self.files[number])
        while not self._stopping.is_set():
            try:
                with psycopg.connect(self._dsn, connect_timeout=5) as connection:
                    while not self._stopping.wait(PAUSE_SECONDS):
                        transaction += 1
                        self._transact(connection, rng, FIRST_KEY + number * KEYS, transaction, expected)
            except (psycopg.Error, psycopg.Rollback):
                self._stopping.wait(AGAIN_SECONDS)  # the server is restarting
        expected.close()

    def _transact(
        self, connection: Connection, rng: random.Random, base: int, transaction: int, expected: ExpectedFile
    ) -> None:
        keys = sorted(rng.sample(range(base, base + KEYS - UNIQUE), PLAIN_EVENTS))
        connection.execute(LOCK, (keys,))
        counts = connection.execute(RAISE, (keys,)).fetchall()
        uids = outbox.emit_many(connection, [_plain(key, n, rng) for key, n in counts])
        intended = [(key, n, str(uid)) for (key, n), uid in zip(counts, uids, strict=True)]
        connection.execute(TODAY)  # the relay looks for events with unique keys since the day before their emit
        names = sorted(rng.sample(range(UNIQUE), UNIQUE_EVENTS), key=_lock_order)
        for name in names:
            intended += self._unique(connection, base + KEYS - UNIQUE + name, name)
        expected.intend(transaction, intended)
        if rng.random() < UNDONE_SHARE:
            expected.end(transaction, "rolled back")
            connection.rollback()
        else:
            expected.commit(transaction, connection)

    def _unique(self, connection: Connection, key: int, name: int) -> list[Intended]:
        """Emit an event with a unique key. Return it, or nothing if it was merged into an earlier one."""
        chosen = uuid4()
        with connection.transaction():
            [(_, n)] = connection.execute(RAISE, ([key],)).fetchall()
            began = time.monotonic()
            uid = outbox.emit(
                connection, type_of(key), payload_of(key, n), key=f"key-{key}", uid=chosen, unique_key=f"unique-{name}"
            )
            if uid != chosen:
                self.merged.append(Merged(name, uid.bytes, began))
                raise psycopg.Rollback
        if uid != chosen:
            return []
        self.emitted.append(Emitted(name, uid.bytes, time.monotonic()))
        return [(key, n, str(uid))]


def _plain(key: int, number: int, rng: random.Random) -> outbox.Event:
    return outbox.Event(
        type_of(key), payload_of(key, number), key=f"key-{key}", tenant=rng.choice(TENANTS), priority=rng.randint(-2, 2)
    )


def _lock_order(name: int) -> tuple[str, int]:
    """Return the order in which all threads lock the unique keys."""
    return type_of(name), name
