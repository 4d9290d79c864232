"""The cost of a relay for the database: its statements and its WAL for relayed events, counted, never timed."""

from __future__ import annotations

import sys
from collections import Counter

import psycopg
import pytest

from outbox_relay.postgres.migrations import migrate
from outbox_relay.relay.log_reader import CHUNK_EVENTS
from tests.support.database import Database
from tests.support.memory_sink import MemorySink
from tests.support.postgres import PostgresServer
from tests.support.relay_harness import running, spec
from tests.support.wait import until

pytestmark = pytest.mark.postgres
SINKS = 2
EVENTS = 20_000
CHUNKS = EVENTS // CHUNK_EVENTS
POSITION_BYTES = 1_500
"""WAL of the positions of all shards when they stand at one place, its place in the index included."""
AROUND_BYTES = 100_000
"""WAL of what happens by the clock meanwhile: leases renewed, relays seen."""
ONLY_THE_RELAY = {"autovacuum": "off", "full_page_writes": "off"}
FILL = """
insert into outbox.event (shard, uid, type, key, payload, content_type)
select outbox_internal.shard_of('k' || g %% 5000, null), gen_random_uuid(), 'test', 'k' || g %% 5000,
       convert_to(repeat('x', 250), 'UTF8'), 'text/plain'
  from generate_series(1, %s) g"""
WRITTEN = "select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"


def test_a_backlog_costs_two_statements_a_chunk_and_next_to_no_wal(capsys: pytest.CaptureFixture[str]) -> None:
    """Right before the backlog is committed its own WAL is written: what comes behind is the relay's."""
    given = [MemorySink() for _ in range(SINKS)]
    with PostgresServer(ONLY_THE_RELAY) as server:
        server.create_database("cost")
        database = Database(server, "cost")
        migrate(database.dsn)
        with running(database.dsn, *((spec(f"s{n}"), sink) for n, sink in enumerate(given))) as harness:
            harness.owns_all()
            harness.settled()
            with database.connect() as connection:
                connection.execute(FILL, (EVENTS,))
                before, calls = written(connection), Counter(harness.store.calls)
            until(lambda: everywhere(given), seconds=60, what="everything is delivered")
            harness.settled()
            made = harness.store.calls - calls
            with database.connect() as connection:
                wal = written(connection) - before
    with capsys.disabled():
        sys.stdout.write(
            f"\n{EVENTS} events to {SINKS} sinks: {wal / EVENTS:.2f} bytes of WAL an event, {dict(made)}\n"
        )
    assert made["read_small"] + made["read_rest"] + made["read_late"] <= SINKS * (CHUNKS + 20)
    assert made["settle"] <= SINKS * (CHUNKS + 20)
    assert made["look"] <= 20
    assert not made["blocked_keys"] + made["still_blocked"] + made["highest_discarded"] + made["discarded"]
    assert wal <= made["settle"] * POSITION_BYTES + AROUND_BYTES


def written(connection: psycopg.Connection) -> int:
    """Return the bytes of WAL written so far."""
    [(found,)] = (connection.execute(WRITTEN.encode())).fetchall()
    return int(found)


def everywhere(sinks: list[MemorySink]) -> bool:
    """Return True if each sink has all events."""
    return all(len(sink.delivered) >= EVENTS for sink in sinks)
