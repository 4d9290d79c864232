"""A steady stream of numbered events, and a relay to a topic."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import psycopg

from outbox_relay.postgres.migrations import migrate
from tests.support.postgres import PostgresServer
from tests.support.service import RelayService

PARTITIONS = 6
KEYS = 2_000
BATCH = 250
STREAM = """insert into outbox.event (shard, uid, type, key, payload, content_type)
select outbox_internal.shard_of('k' || g %% %(keys)s, null), outbox_internal.uuid7(), 'order.created',
       'k' || g %% %(keys)s,
       convert_to(format('{"key": "k%%s", "n": %%s, "note": "%%s"}', g %% %(keys)s, g / %(keys)s + 1, repeat('x', 180)),
                  'UTF8'),
       'application/json'
  from generate_series(%(first)s::bigint, %(last)s::bigint) g"""
"""Runs in the server, so that generating the load takes little processor time."""
CONFIG = """
[database]
dsn = "{dsn}"
[sinks.events]
type = "kafka"
topic = "{topic}"
[sinks.events.producer]
"bootstrap.servers" = "{bootstrap}"
[routes]
"*" = ["events"]
"""


class Stream:
    """A thread that emits `rate` events a second; the events of a key are numbered 1, 2, 3 and so on."""

    def __init__(self, dsn: str, rate: float, keys: int = KEYS) -> None:
        self._dsn = dsn
        self._rate = rate
        self._keys = keys
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.emitted = 0
        self._took = 0.0

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop emitting."""
        self._stopped.set()
        self._thread.join(60)

    @property
    def reached(self) -> float:
        """Return the actual emit rate, which is lower on a busy machine."""
        return self.emitted / self._took if self._took else 0.0

    def committed(self) -> dict[str, int]:
        """Return the number of committed events by key."""
        whole, rest = divmod(self.emitted, self._keys)
        counts = {f"k{key}": whole + (key < rest) for key in range(self._keys)}
        return {key: count for key, count in counts.items() if count}

    def _run(self) -> None:
        began = time.monotonic()
        with psycopg.connect(self._dsn) as connection:
            while not self._stopped.is_set():
                due = began + self.emitted / self._rate
                self._stopped.wait(max(0.0, due - time.monotonic()))
                self._emit(connection)
                self._took = time.monotonic() - began

    def _emit(self, connection: psycopg.Connection) -> None:
        with connection.transaction():
            connection.execute(STREAM, {"keys": self._keys, "first": self.emitted, "last": self.emitted + BATCH - 1})
        self.emitted += BATCH


class RelayUnderTest:
    """A relay to one topic, and its database."""

    def __init__(self, postgres: PostgresServer, bootstrap: str, topic: str, directory: Path) -> None:
        name = topic.replace(".", "_")
        postgres.create_database(name)
        self.dsn = postgres.dsn(name)
        migrate(self.dsn)
        self.relay = RelayService(directory, CONFIG.format(dsn=self.dsn, topic=topic, bootstrap=bootstrap), name)

    def memory_mib(self) -> float:
        """Return the resident memory of the relay."""
        pages = int(Path(f"/proc/{self.relay.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
