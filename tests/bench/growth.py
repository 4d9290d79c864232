"""What reading, claiming and settling cost while the log, `outbox.delivery` and the number of partitions grow.

usage: python -m tests.bench.growth [--most 10000000] [--calls 300]

One relay's statements, as it sends them, on an embedded PostgreSQL; times are medians, the client is in them. The log
grows tenfold from 10,000 events on, spread over thirty partitions, and nothing but autovacuum analyses it. Then a log
with one partition and a log with thirty are asked for their ten newest events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from uuid import UUID, uuid4

import psycopg

from outbox_relay.domain.event import SHARDS
from outbox_relay.postgres.migrations import migrate
from outbox_relay.postgres.store import statements
from outbox_relay.relay.log_reader import CHUNK_BYTES, CHUNK_EVENTS
from outbox_relay.workbench.embedded.postgres import PostgresServer

PARTITIONS = 30
FIRST_EVENTS = 10_000
FEW_EVENTS = 10
BULK_CALLS = 20
PARTITION_EVENTS = 300_000
"""In the log that is asked with one partition and with thirty."""
ROWS = (1_000, 100_000)
"""Rows of `outbox.delivery`."""
AT_ONCE = 100
"""Rows that are claimed or settled at once."""
SINK = "s"
OWNER = UUID(int=7)
NO_LIMIT = 2**63 - 1
PARTITION = """
create table outbox.past_{0} (like outbox.event including defaults including generated);
alter table outbox.event attach partition outbox.past_{0}
    for values from (date_trunc('day', now()) - interval '{0} days')
    to (date_trunc('day', now()) - interval '{0} days' + interval '1 day')
"""
EVENTS = """
insert into outbox.event (uid, type, key, payload, content_type, created_at)
select gen_random_uuid(), 'order.created', 'k' || g % 5000, convert_to(repeat('x', 250), 'UTF8'), 'application/json',
       date_trunc('day', now()) + interval '1 minute' - {} * interval '1 day'
  from generate_series(1, {}) g
"""
DELIVERY = """
insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, key, payload, content_type, created_at)
select '{}', e.id, e.shard, 'waiting', false, now() - interval '1 minute', e.uid, e.type, e.key, e.payload,
       e.content_type, e.created_at
  from outbox.event e where e.id > {} and e.id <= {}
"""
OWNED = """
insert into outbox.sink (name, patterns, start) values ('s', '{*}', 'now');
insert into outbox.shard (sink, shard, owner, epoch) select 's', n, '00000000-0000-0000-0000-000000000007', 1
  from generate_series(0, 63) n
"""
EVENTS_BEFORE = "3:3:"


class Asked:
    """A connection on which the statements of a relay are timed."""

    def __init__(self, connection: psycopg.Connection[Any], calls: int) -> None:
        self.connection = connection
        self._calls = calls
        self._snapshot = ""
        self._sql = statements()

    def run(self, name: str, **parameters: Any) -> list[tuple[Any, ...]]:
        """The rows of one of the product's statements."""
        cursor = self.connection.cursor(binary=True)
        return cursor.execute(self._sql[name], {"server": None, **parameters}, prepare=True).fetchall()

    def newest(self) -> int:
        """The newest id, after which the log is read from now on."""
        [(last, self._snapshot)] = self.connection.execute(
            "select s.last_value, pg_current_snapshot()::text from outbox.event_id_seq s"
        ).fetchall()
        return last

    def read(self, after: int, rows: int) -> int:
        """How many events one read of the log finds."""
        return len(
            self.run(
                "read_rest", shards=list(range(SHARDS)), types=None, a=EVENTS_BEFORE, b=self._snapshot, after=after,
                upto=NO_LIMIT, rows=rows, bytes=CHUNK_BYTES, most_payload=1 << 30,
            )
        )  # fmt: skip

    def microseconds(self, call: Callable[[], object], calls: int | None = None) -> float:
        """Median time of a call, in microseconds."""
        return statistics.median(_seconds(call) for _ in range(calls or self._calls)) * 1e6

    def undone(self, call: Callable[[], object]) -> float:
        """The same for a call that writes, each taken back."""
        return statistics.median(self._taken_back(call) for _ in range(self._calls)) * 1e6

    def _taken_back(self, call: Callable[[], object]) -> float:
        with self.connection.transaction(force_rollback=True):
            return _seconds(call)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@contextmanager
def database(server: PostgresServer, name: str, partitions: int, calls: int) -> Generator[Asked]:
    """A new database whose log has `partitions` besides the one for today."""
    server.create_database(name)
    migrate(server.dsn(name))
    with server.connect(name) as connection:
        for number in range(1, partitions):
            connection.execute(PARTITION.format(number).encode())
        connection.execute(OWNED.encode())
        yield Asked(connection, calls)


def fill(asked: Asked, events: int, partitions: int) -> None:
    """Add events, as many to each partition, the oldest first."""
    for day in reversed(range(partitions)):
        asked.connection.execute(EVENTS.format(day, events // partitions + (day < events % partitions)).encode())


def reading(server: PostgresServer, most: int, calls: int) -> Iterator[dict[str, float]]:
    """What reads cost at each size of the log."""
    with database(server, "reading", PARTITIONS, calls) as asked:
        events = 0
        size = FIRST_EVENTS
        while size <= most:
            fill(asked, size - events, PARTITIONS)
            events, last = size, asked.newest()
            assert asked.read(last - FEW_EVENTS, CHUNK_EVENTS) == FEW_EVENTS
            middle = last // 2
            chunk = asked.microseconds(lambda at=middle: asked.read(at, CHUNK_EVENTS), BULK_CALLS)
            yield {
                "events in the log": size,
                "read in bulk, us/event": chunk / CHUNK_EVENTS,
                "ten new events, us": asked.microseconds(lambda at=last: asked.read(at - FEW_EVENTS, CHUNK_EVENTS)),
                "nothing new, us": asked.microseconds(lambda at=last: asked.read(at, CHUNK_EVENTS)),
                "tick, us": asked.microseconds(lambda: asked.run("tick")),
            }
            size *= 10


def rows(server: PostgresServer, calls: int) -> Iterator[dict[str, float]]:
    """What claims and settlements of a hundred rows cost, with few rows and with many."""
    for number in ROWS:
        with database(server, f"rows_{number}", 1, calls) as asked:
            fill(asked, number + AT_ONCE, 1)
            asked.connection.execute(DELIVERY.format(SINK, 0, number).encode())
            new = list(range(number + 1, number + AT_ONCE + 1))
            claimed = asked.undone(lambda: asked.run("claim_rows", **_claiming()))
            settled = asked.undone(lambda ids=new: asked.run("settle", **_settling(ids)))
            yield {
                "rows in delivery": number,
                "claim, us/row": claimed / AT_ONCE,
                "settle, us/row": settled / AT_ONCE,
            }


def partitioned(server: PostgresServer, calls: int) -> Iterator[dict[str, float]]:
    """What a read of ten events costs with one partition and with thirty, asked in turns."""
    with (
        database(server, "one", 1, calls) as one,
        database(server, "thirty", PARTITIONS, calls) as thirty,
    ):
        found: dict[str, list[float]] = {"one": [], "thirty": []}
        for asked, number in ((one, 1), (thirty, PARTITIONS)):
            fill(asked, PARTITION_EVENTS, number)
        ends = {"one": one.newest(), "thirty": thirty.newest()}
        for _ in range(5):
            for name, asked in (("one", one), ("thirty", thirty)):
                found[name].append(
                    asked.microseconds(lambda a=asked, n=name: a.read(ends[n] - FEW_EVENTS, CHUNK_EVENTS))
                )
        times = {name: statistics.median(values) for name, values in found.items()}
        yield {
            "ten events, one partition, us": times["one"],
            f"ten events, {PARTITIONS} partitions, us": times["thirty"],
            "ratio": times["thirty"] / times["one"],
        }


def _claiming() -> dict[str, Any]:
    return {
        "sink": SINK, "owner": OWNER, "lease": uuid4(), "lease_for": 20.0, "rows": AT_ONCE, "bytes": CHUNK_BYTES,
        "hold": False, "keys": [], "suspects": False, "with_followers": False, "most_payload": None,
    }  # fmt: skip


def _settling(ids: list[int]) -> dict[str, Any]:
    none = [None] * len(ids)
    moved = ("shards", "epochs", "places")
    at = ("a_seqs", "a_snapshots", "a_nexts", "b_seqs", "b_snapshots", "b_nexts", "lasts")
    return {
        "sink": SINK, "owner": OWNER, **{name: [] for name in moved + at}, "ids": ids, "states": ["waiting"] * len(ids),
        "ordereds": [False] * len(ids), "due_in": [60.0] * len(ids), "attempts": [0] * len(ids),
        "claims": [0] * len(ids), "leases": none, "lease_for": none, "errors": none, "statuses": none,
        "last_attempts": none, "fence_shards": list(range(SHARDS)), "fence_epochs": [1] * SHARDS,
    }  # fmt: skip


def main(argv: list[str]) -> int:
    """Measure everything and print it, a JSON object a line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.growth")
    parser.add_argument("--most", type=int, default=10_000_000)
    parser.add_argument("--calls", type=int, default=300)
    arguments = parser.parse_args(argv)
    settings = {"shared_buffers": "1GB", "max_wal_size": "8GB"}
    with PostgresServer(settings) as server:
        for found in chain(
            reading(server, arguments.most, arguments.calls),
            rows(server, arguments.calls),
            partitioned(server, arguments.calls),
        ):
            print(json.dumps({name: round(value, 2) for name, value in found.items()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
