"""Measure the server time of every page of a large database.

usage: python -m tests.bench.pages [--rows 1000000] [--sinks 100] [--relays 30] [--most-ms 300]

Fills an embedded PostgreSQL with events, each with a dead row, half of them of one sink, with two days of history for
every sink, and relays that share the shards. Then asks for every page three times, and prints median and longest
time of each, in milliseconds, from the request to the whole answer, without a network. Ends with 1 if a median is
longer than `--most-ms`. The findings of doctor, which are examined in the background, are not in these times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator

import psycopg

from outbox_relay.postgres.migrations import migrate
from outbox_relay.postgres.store import Store
from tests.support.database import Database
from tests.support.page import Browser, browsing
from tests.support.postgres import PostgresServer

TURNS = 3
EVENTS = """
insert into outbox.event (shard, uid, type, key, payload, content_type)
select outbox_internal.shard_of('key-' || n %% 50000, null), gen_random_uuid(), 'order.created', 'key-' || n %% 50000,
       '{}', 'text/plain'
  from generate_series(1, %s) n"""
ROWS = """
insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, key, payload, content_type, created_at,
                             last_error, last_status)
select case when e.id %% 2 = 0 then 'sink_000' else 'sink_' || lpad((e.id %% %s)::text, 3, '0') end, e.id, e.shard,
       'dead', true, now(), e.uid, e.type, e.key, e.payload, e.content_type, e.created_at, 'gone ' || e.id %% 20,
       nullif(500 + e.id %% 5, 504)
  from outbox.event e"""
HISTORY = """
insert into outbox.history (sink, at, delivered, failed, dead, backlog, end_to_end_p50, end_to_end_p99, claim_p99)
select s.name, m, 100, 3, 1, 50, 0.01, 0.02, 0.005
  from (select name from outbox.sink union all select '') s,
       generate_series(date_trunc('minute', now()) - interval '2 days', now(), interval '1 minute') m"""
RELAYS = """
insert into outbox.relay (id, name, version, sinks, started_at, seen_at)
select gen_random_uuid(), 'relay-' || n, '0.1.0', array(select name from outbox.sink), now(), now() + interval '1 hour'
  from generate_series(1, %s) n"""
OWNERS = """
update outbox.shard s set owner = r.id, lease_until = now() + interval '1 hour'
  from (select id, row_number() over () - 1 as place, count(*) over () as relays from outbox.relay) r
 where r.place = s.shard %% r.relays"""


def fill(database: Database, rows: int, sinks: int, relays: int) -> None:
    """Fill a new database."""
    store = Store(lambda: database.dsn, pooler=False, connections=1)
    store.open()
    try:
        tick = store.tick().tick
        names = [f"sink_{n:03}" for n in range(sinks)]
        store.register_sinks([(name, ["order.*"], "beginning") for name in names], tick)
    finally:
        store.close()
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        for statement, parameters in (
            (EVENTS, (rows,)), (ROWS, (sinks,)), (HISTORY, ()), (RELAYS, (relays,)), (OWNERS, ()),
        ):  # fmt: skip
            connection.execute(statement.encode(), parameters)
        connection.execute("vacuum analyze")


def paths(uid: str, key: str) -> Iterator[str]:
    """Yield the path of every page. ``key`` is that of a key."""
    yield from ("/", "/sinks/sink_000", "/sinks/sink_000?period=48h", "/sinks/sink_001", "/exceptions")
    yield from (
        "/exceptions?view=groups",
        "/exceptions?sink=sink_001",
        "/exceptions?status=503",
        "/exceptions?error=gone+7",
        "/exceptions?kind=none",
    )
    yield from ("/exceptions?type=none.*", f"/events/{uid}", key)
    yield from (
        "/replays",
        "/relays",
        "/database",
        "/audit",
        "/actions/retry?state=dead",
        "/actions/retry?error=gone+7",
        "/actions/discard?kind=none",
        "/actions/probe?sink=sink_000",
    )


def measure(page: Browser, path: str) -> list[float]:
    """Return the times of a page in milliseconds."""
    times: list[float] = []
    for _ in range(TURNS):
        began = time.perf_counter()
        answer = page.client.get(path)
        times.append((time.perf_counter() - began) * 1000)
        assert answer.status_code in (200, 404), answer.text
    return times


def run(arguments: argparse.Namespace) -> bool:
    """Fill, measure and print; return True if every median is short enough."""
    with PostgresServer() as server:
        server.create_database("pages")
        database = Database(server, "pages")
        migrate(database.dsn)
        fill(database, arguments.rows, arguments.sinks, arguments.relays)
        with psycopg.connect(database.dsn) as connection:
            uid = str(connection.execute("select uid from outbox.delivery limit 1").fetchall()[0][0])
        slow: list[str] = []
        with browsing(database) as page:
            page.get("/")
            page.json("/doctor")
            print(f"{arguments.rows:,} dead rows, {arguments.sinks} sinks, {arguments.relays} relays; milliseconds")
            for path in paths(uid, page.key_path("key-7")):
                times = measure(page, path)
                print(f"{statistics.median(times):8.0f} {max(times):8.0f}  {path}")
                slow += [path] * (statistics.median(times) > arguments.most_ms)
        return not slow


def main() -> int:
    """Run the measurement that the command line describes."""
    parser = argparse.ArgumentParser(description="Measure the server time of every page.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--sinks", type=int, default=100)
    parser.add_argument("--relays", type=int, default=30)
    parser.add_argument("--most-ms", type=float, default=300.0)
    return 0 if run(parser.parse_args()) else 1


if __name__ == "__main__":
    sys.exit(main())
