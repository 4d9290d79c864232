"""Measure reading, claiming and settling as the log, `outbox.delivery`, partitions and relays grow, and emitting.

usage: python -m tests.bench.growth [--most 10000000] [--calls 300]

Runs the statements of a relay on an embedded PostgreSQL; times are medians and include the client. The log grows
tenfold from 10,000 events on, in thirty partitions, and only autovacuum analyses it. Then the ten newest events are
read from a log with one partition and from a log with thirty; and the same ids are read by relays that share a sink, as
each reads the shards that it owns. Finally, events are emitted in bulk, to see what one takes on disk.
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
from outbox_relay.postgres.database import statements
from outbox_relay.postgres.migrations import migrate
from outbox_relay.relay.log_reader import CHUNK_BYTES, CHUNK_EVENTS
from outbox_relay.workbench.embedded.postgres import PostgresServer
from tests.support.recording import settled_unrecorded

PARTITIONS = 30
FIRST_EVENTS = 10_000
FEW_EVENTS = 10
BULK_CALLS = 20
PARTITION_EVENTS = 300_000
"""Number of events in the comparison of one partition with thirty."""
ROWS = (1_000, 100_000)
"""Rows of `outbox.delivery`."""
AT_ONCE = 100
"""Number of rows claimed or settled at once."""
SINK = "s"
RELAYS = (1, 2, 4, 8, 16, 64)
"""Numbers of relays that share the shards of a sink."""
EMITTED = 100_000
"""Number of events emitted in bulk, a tenth in each transaction."""
OWNER = UUID(int=7)
NO_LIMIT = 2**63 - 1
PARTITION = """
create table outbox.past_{0} (like outbox.event including defaults including generated);
alter table outbox.event attach partition outbox.past_{0}
    for values from (date_trunc('day', now()) - interval '{0} days')
    to (date_trunc('day', now()) - interval '{0} days' + interval '1 day')
"""
EVENTS = """
insert into outbox.event (shard, uid, type, key, payload, content_type, created_at)
select outbox_internal.shard_of('k' || g % 5000, null), gen_random_uuid(), 'order.created', 'k' || g % 5000,
       convert_to(repeat('x', 250), 'UTF8'), 'text/plain',
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
EMIT = f"""
select count(outbox.emit_raw('order.created', convert_to(repeat('x', 250), 'UTF8'), 'k' || g % 5000, null, null, null,
                             'application/json'))
  from generate_series(1, {EMITTED // 10}) g
"""
EVENTS_BEFORE = "3:3:"


class TimedStatements:
    """A connection that times the statements of a relay."""

    def __init__(self, connection: psycopg.Connection[Any], calls: int) -> None:
        self.connection = connection
        self._calls = calls
        self._snapshot = ""
        self._sql = statements()

    def run(self, name: str, **parameters: Any) -> list[tuple[Any, ...]]:
        """Run a statement of the relay and return its rows."""
        cursor = self.connection.cursor(binary=True)
        return cursor.execute(self._sql[name], {"server": None, **parameters}, prepare=True).fetchall()

    def newest(self) -> int:
        """Return the newest id, and use the current snapshot for later reads."""
        [(last, self._snapshot)] = self.connection.execute(
            "select s.last_value, pg_current_snapshot()::text from outbox.event_id_seq s"
        ).fetchall()
        return last

    def read(self, after: int, rows: int, *, upto: int = NO_LIMIT, shards: int = SHARDS) -> int:
        """Read the log once and return the number of events."""
        return len(
            self.run(
                "read_rest", shards=list(range(shards)), types=None, a=EVENTS_BEFORE, b=self._snapshot, after=after,
                upto=upto, rows=rows, bytes=CHUNK_BYTES, most_payload=1 << 30,
            )
        )  # fmt: skip

    def microseconds(self, call: Callable[[], object], calls: int | None = None) -> float:
        """Return the median time of a call in microseconds."""
        return statistics.median(_seconds(call) for _ in range(calls or self._calls)) * 1e6

    def microseconds_rolled_back(self, call: Callable[[], object]) -> float:
        """Return the median time of a call that writes; each call is rolled back."""
        return statistics.median(self._rolled_back(call) for _ in range(self._calls)) * 1e6

    def _rolled_back(self, call: Callable[[], object]) -> float:
        with self.connection.transaction(force_rollback=True):
            return _seconds(call)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@contextmanager
def database(server: PostgresServer, name: str, partitions: int, calls: int) -> Generator[TimedStatements]:
    """Create a database whose log has `partitions`, including the one for today."""
    server.create_database(name)
    migrate(server.dsn(name))
    with server.connect(name) as connection:
        for number in range(1, partitions):
            connection.execute(PARTITION.format(number).encode())
        connection.execute(OWNED.encode())
        yield TimedStatements(connection, calls)


def fill(timed: TimedStatements, events: int, partitions: int) -> None:
    """Add events, evenly to all partitions, the oldest first."""
    for day in reversed(range(partitions)):
        timed.connection.execute(EVENTS.format(day, events // partitions + (day < events % partitions)).encode())


def reading(server: PostgresServer, most: int, calls: int) -> Iterator[dict[str, float]]:
    """Measure reads at each size of the log."""
    with database(server, "reading", PARTITIONS, calls) as timed:
        events = 0
        size = FIRST_EVENTS
        while size <= most:
            fill(timed, size - events, PARTITIONS)
            events, last = size, timed.newest()
            assert timed.read(last - FEW_EVENTS, CHUNK_EVENTS) == FEW_EVENTS
            middle = last // 2
            chunk = timed.microseconds(lambda at=middle: timed.read(at, CHUNK_EVENTS), BULK_CALLS)
            yield {
                "events in the log": size,
                "read in bulk, us/event": chunk / CHUNK_EVENTS,
                "ten new events, us": timed.microseconds(lambda at=last: timed.read(at - FEW_EVENTS, CHUNK_EVENTS)),
                "nothing new, us": timed.microseconds(lambda at=last: timed.read(at, CHUNK_EVENTS)),
                "tick, us": timed.microseconds(lambda: timed.run("tick")),
            }
            size *= 10


def rows(server: PostgresServer, calls: int) -> Iterator[dict[str, float]]:
    """Measure claims and settlements of a hundred rows, with few rows and with many."""
    for number in ROWS:
        with database(server, f"rows_{number}", 1, calls) as timed:
            fill(timed, number + AT_ONCE, 1)
            timed.connection.execute(DELIVERY.format(SINK, 0, number).encode())
            new = list(range(number + 1, number + AT_ONCE + 1))
            claimed = timed.microseconds_rolled_back(lambda: timed.run("claim_rows", **_claiming()))
            settled = timed.microseconds_rolled_back(lambda ids=new: timed.run("settle", **_settling(ids)))
            yield {
                "rows in delivery": number,
                "claim, us/row": claimed / AT_ONCE,
                "settle, us/row": settled / AT_ONCE,
            }


def partitioned(server: PostgresServer, calls: int) -> Iterator[dict[str, float]]:
    """Measure reads of ten events with one partition and with thirty, in turns."""
    with (
        database(server, "one", 1, calls) as one,
        database(server, "thirty", PARTITIONS, calls) as thirty,
    ):
        found: dict[str, list[float]] = {"one": [], "thirty": []}
        for timed, number in ((one, 1), (thirty, PARTITIONS)):
            fill(timed, PARTITION_EVENTS, number)
        ends = {"one": one.newest(), "thirty": thirty.newest()}
        for _ in range(5):
            for name, timed in (("one", one), ("thirty", thirty)):
                found[name].append(
                    timed.microseconds(lambda a=timed, n=name: a.read(ends[n] - FEW_EVENTS, CHUNK_EVENTS))
                )
        times = {name: statistics.median(values) for name, values in found.items()}
        yield {
            "ten events, one partition, us": times["one"],
            f"ten events, {PARTITIONS} partitions, us": times["thirty"],
            "ratio": times["thirty"] / times["one"],
        }


def shared(server: PostgresServer, calls: int) -> Iterator[dict[str, float]]:
    """Measure what each of several relays needs to read the same ids, of which it owns its share of the shards."""
    with database(server, "shared", 1, calls) as timed:
        fill(timed, PARTITION_EVENTS, 1)
        middle = timed.newest() // 2
        for relays in RELAYS:
            share, upto = SHARDS // relays, middle + CHUNK_EVENTS
            chunk = timed.microseconds(
                lambda n=share, end=upto: timed.read(middle, CHUNK_EVENTS, upto=end, shards=n), BULK_CALLS
            )
            yield {
                "relays of a sink": relays,
                "read, us/event, one relay": chunk / CHUNK_EVENTS,
                "read, us/event, all relays": relays * chunk / CHUNK_EVENTS,
            }


def emitting(server: PostgresServer, calls: int) -> Iterator[dict[str, float]]:
    """Measure the time of an event that is emitted with many others, and its size on the disk and in the WAL."""
    with database(server, "emitting", 1, calls) as timed:
        [(began,)] = timed.connection.execute("select pg_current_wal_lsn()").fetchall()
        seconds = sum(_seconds(lambda: timed.connection.execute(EMIT.encode())) for _ in range(10))
        query = """select pg_wal_lsn_diff(pg_current_wal_lsn(), %s)::float,
                          (select sum(pg_total_relation_size(relid)) from pg_partition_tree('outbox.event'))::float"""
        [(wal, size)] = timed.connection.execute(query, (began,)).fetchall()
        yield {
            "emit in bulk, us/event": seconds * 1e6 / EMITTED,
            "WAL, bytes/event": wal / EMITTED,
            "log, bytes/event": size / EMITTED,
        }


def _claiming() -> dict[str, Any]:
    return {
        "sink": SINK, "owner": OWNER, "lease": uuid4(), "lease_for": 20.0, "rows": AT_ONCE, "bytes": CHUNK_BYTES,
        "hold": False, "keys": [], "suspects": False, "with_followers": False, "most_payload": None,
        "after_due": None, "after_id": None,
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
        **settled_unrecorded(),
    }  # fmt: skip


def main(argv: list[str]) -> int:
    """Measure everything and print one JSON object per line."""
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
            shared(server, arguments.calls),
            emitting(server, arguments.calls),
        ):
            print(json.dumps({name: round(value, 2) for name, value in found.items()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
