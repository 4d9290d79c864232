"""Program that relays to Kafka in a bare loop, without any code of the relay: the upper limit for a Python process.

It reads `outbox.event` in id order, passes every event with its key and three headers to librdkafka, and records the
progress once a whole batch is acknowledged. With `--follow` it reads new events until SIGTERM, and may lose events that
become visible late.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
import threading
import time
from typing import Any

import psycopg
from confluent_kafka import Producer

DSN = "OUTBOX_BENCH_DSN"
"""Name of the environment variable with the connection string."""
BATCH = 4_000
FOLLOW_SECONDS = 0.001
"""Pause after a read that found no events."""
FLUSH_SECONDS = 60
METADATA_SECONDS = 10
JOIN_SECONDS = 10
READ = """select id, uid::text, type, key, payload, coalesce(content_type, 'application/json')
  from outbox.event
where id > %s and shard = any(%s) and pg_visible_in_snapshot(xid, %s::text::pg_snapshot)
and not pg_visible_in_snapshot(xid, %s::text::pg_snapshot) order by id limit %s"""
SETTINGS: dict[str, Any] = {
    "enable.idempotence": True,
    "batch.num.messages": 10_000,
    "queue.buffering.max.messages": 1_000_000,
    "queue.buffering.max.kbytes": 1 << 20,
}
LINGER_MS, FOLLOW_LINGER_MS = 5, 0


class PendingBatch:
    """The number of unacknowledged events of a batch, and its last id."""

    __slots__ = ("last", "left")

    def __init__(self, left: int, last: int) -> None:
        self.left = left
        self.last = last


Acknowledged = queue.SimpleQueue[PendingBatch | None]


class BareLoop:
    """Relays from `dsn` to `topic`; creates the table `bare_progress` when it is ready."""

    def __init__(self, dsn: str, bootstrap: str, topic: str, *, follow: bool) -> None:
        self._reader, self._writer = (psycopg.connect(dsn, autocommit=True) for _ in range(2))
        linger = FOLLOW_LINGER_MS if follow else LINGER_MS
        self._producer = Producer({**SETTINGS, "linger.ms": linger, "bootstrap.servers": bootstrap})
        self._producer.list_topics(topic, timeout=METADATA_SECONDS)
        self._writer.execute("create table if not exists bare_progress (last_id bigint)")
        self._topic = topic
        self._follow = follow
        self._acknowledged: Acknowledged = queue.SimpleQueue()
        self.stopping = threading.Event()

    def run(self) -> int:
        """Relay all committed events, or follow the log until stopped. Return the number of events."""
        polling = threading.Event()
        threads = [threading.Thread(target=self._record), threading.Thread(target=self._poll, args=(polling,))]
        for thread in threads:
            thread.start()
        try:
            count = self._feed()
            self._producer.flush(FLUSH_SECONDS)
        finally:
            self._acknowledged.put(None)
            polling.set()
            for thread in threads:
                thread.join(JOIN_SECONDS)
        return count

    def _record(self) -> None:
        while (batch := self._acknowledged.get()) is not None:
            self._writer.execute("insert into bare_progress values (%s)", (batch.last,), prepare=True)

    def _poll(self, polling: threading.Event) -> None:
        while not polling.is_set():
            self._producer.poll(0.05)

    def _feed(self) -> int:
        last, count, shards = 0, 0, list(range(64))
        cursor = self._reader.cursor(binary=True)
        upto = self._snapshot()
        while not self.stopping.is_set():
            rows = cursor.execute(READ, (last, shards, upto, "3:3:", BATCH), prepare=True).fetchall()
            if rows:
                last = rows[-1][0]
                count += len(rows)
                self._produce(rows, PendingBatch(len(rows), last))
            elif self._follow:
                time.sleep(FOLLOW_SECONDS)
                upto = self._snapshot()
            else:
                break
        return count

    def _snapshot(self) -> str:
        row = self._reader.execute("select pg_current_snapshot()::text", prepare=True).fetchone()
        return row[0] if row else ""

    def _produce(self, rows: list[Any], batch: PendingBatch) -> None:
        produce, topic, acknowledged = self._producer.produce, self._topic, self._acknowledged

        def report(_error: object, _message: object) -> None:
            batch.left -= 1
            if not batch.left:
                acknowledged.put(batch)

        for _, uid, kind, key, payload, content_type in rows:
            headers: list[tuple[str, str | bytes | None]] = [
                ("id", uid),
                ("type", kind),
                ("content-type", content_type),
            ]
            produce(topic, payload, key, on_delivery=report, headers=headers)


def main() -> int:
    """Run the bare loop."""
    parser = argparse.ArgumentParser(prog="bench: bare loop")
    parser.add_argument("--bootstrap", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--follow", action="store_true")
    arguments = parser.parse_args()
    loop = BareLoop(os.environ[DSN], arguments.bootstrap, arguments.topic, follow=arguments.follow)
    signal.signal(signal.SIGTERM, lambda _number, _frame: loop.stopping.set())
    loop.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
