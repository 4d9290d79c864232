"""The bare loop: the most that one Python process can relay here, with nothing of the product in it.

usage: python -m tests.bench.bare_loop DSN BOOTSTRAP TOPIC

Reads `outbox.event` in id order, hands every event with its key and three headers to librdkafka, and records progress
per batch once all of a batch is acknowledged. Prints the number of events.
"""

from __future__ import annotations

import queue
import sys
import threading
from typing import Any

import psycopg
from confluent_kafka import Producer

BATCH = 4000
READ = """select id, uid::text, type, key, payload, content_type from outbox.event
where id > %s and shard = any(%s) and pg_visible_in_snapshot(xid, %s::text::pg_snapshot)
and not pg_visible_in_snapshot(xid, %s::text::pg_snapshot) order by id limit %s"""
SETTINGS: dict[str, Any] = {
    "enable.idempotence": True,
    "linger.ms": 5,
    "batch.num.messages": 10_000,
    "queue.buffering.max.messages": 1_000_000,
    "queue.buffering.max.kbytes": 1 << 20,
}


class Batch:
    """How many of a batch are not acknowledged, and its last id."""

    __slots__ = ("last", "left")

    def __init__(self, left: int, last: int) -> None:
        self.left = left
        self.last = last


def relay(dsn: str, bootstrap: str, topic: str) -> int:
    """Relay all that is committed now; the number of events."""
    reader, writer = (psycopg.connect(dsn, autocommit=True) for _ in range(2))
    writer.execute("create table if not exists bare_progress (last_id bigint)")
    producer = Producer({**SETTINGS, "bootstrap.servers": bootstrap})
    acknowledged: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
    stop = threading.Event()

    def record() -> None:
        while (batch := acknowledged.get()) is not None:
            writer.execute("insert into bare_progress values (%s)", (batch.last,), prepare=True)

    def poll() -> None:
        while not stop.is_set():
            producer.poll(0.05)

    threads = [threading.Thread(target=record), threading.Thread(target=poll)]
    for thread in threads:
        thread.start()
    count = _feed(reader, producer, acknowledged, topic)
    producer.flush()
    acknowledged.put(None)
    stop.set()
    for thread in threads:
        thread.join()
    return count


def _feed(reader: Any, producer: Producer, acknowledged: queue.SimpleQueue[Batch | None], topic: str) -> int:
    upto = reader.execute("select pg_current_snapshot()::text").fetchone()[0]
    last, count, shards = 0, 0, list(range(64))
    cursor = reader.cursor(binary=True)
    while rows := cursor.execute(READ, (last, shards, upto, "3:3:", BATCH), prepare=True).fetchall():
        batch = Batch(len(rows), rows[-1][0])
        last = batch.last
        count += len(rows)

        def report(_error: object, _message: object, batch: Batch = batch) -> None:
            batch.left -= 1
            if not batch.left:
                acknowledged.put(batch)

        for _, uid, kind, key, payload, content_type in rows:
            headers: list[tuple[str, str | bytes | None]] = [
                ("id", uid),
                ("type", kind),
                ("content-type", content_type),
            ]
            producer.produce(topic, payload, key, on_delivery=report, headers=headers)
    return count


if __name__ == "__main__":
    print(relay(*sys.argv[1:4]), "events")
