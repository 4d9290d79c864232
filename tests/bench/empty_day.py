"""Measure how long emits and reads wait while a day of the log is emptied and its partition is removed.

usage: python -m tests.bench.empty_day [--events 1000000]

Fills one day of 12 days ago, among 30 partitions, on an embedded PostgreSQL. One thread emits, one reads the newest
events with the statement of a relay, as fast as they can; the longest of their calls count, before the pass and during
it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from uuid import uuid4

import psycopg
import structlog

from outbox_relay.postgres.database import statements
from outbox_relay.postgres.migrations import migrate
from outbox_relay.postgres.retention_statements import Pass, Person
from outbox_relay.postgres.store import Store
from outbox_relay.retention.passes import Outcome, RetentionPass, run_pass
from tests.support.days import date_ago, emit_ago, fill_days, keep, make_day, register
from tests.support.postgres import PostgresServer

FILLED = 12
BEFORE_SECONDS = 3.0
"""Time for which calls are measured before the pass."""
READ = {
    "shards": list(range(64)), "types": None, "a": "3:3:", "b": "9000000000:9000000000:", "rows": 10, "bytes": 1 << 20,
    "upto": 1 << 62, "most_payload": 1 << 20, "server": None, "a_next": 3,
}  # fmt: skip


class Calls:
    """Calls of one kind on a connection of their own, one after another, and the longest of them."""

    def __init__(self, dsn: str, call: Callable[[psycopg.Connection], None]) -> None:
        self._dsn = dsn
        self._call = call
        self._stopped = threading.Event()
        self.longest = 0.0
        self.count = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Calls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def reset(self) -> tuple[int, float]:
        """Return number and longest duration, in milliseconds, of the calls so far, and begin again."""
        found = self.count, round(self.longest * 1000, 1)
        self.count, self.longest = 0, 0.0
        return found

    def _run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True, prepare_threshold=2) as connection:
            while not self._stopped.is_set():
                began = time.perf_counter()
                self._call(connection)
                self.longest = max(self.longest, time.perf_counter() - began)
                self.count += 1


def measure(events: int) -> dict[str, object]:
    """Return the longest calls before and during the pass, and what the pass did."""
    with PostgresServer() as server:
        server.create_database("bench")
        dsn = server.dsn("bench")
        migrate(dsn)
        with psycopg.connect(dsn, autocommit=True) as connection:
            for days in range(38, FILLED, -1):
                make_day(connection, days)
            fill_days(connection, FILLED, FILLED, events)
            emit_ago(connection, 0)
            register(connection, "crm", "now")
            keep(connection, 5)
            connection.execute("vacuum analyze outbox.event")
            [(newest,)] = connection.execute("select max(id) from outbox.event").fetchall()
        read = statements()["read_rest"]

        def emit(connection: psycopg.Connection) -> None:
            connection.execute("select outbox.emit('order.created', '{}')")

        def reading(connection: psycopg.Connection) -> None:
            connection.execute(read, {**READ, "after": newest - 10})

        with ExitStack() as stack:
            calls = {name: stack.enter_context(Calls(dsn, call)) for name, call in (("emit", emit), ("read", reading))}
            time.sleep(BEFORE_SECONDS)
            before = {name: each.reset() for name, each in calls.items()}
            began = time.monotonic()
            outcome = asyncio.run(one_pass(dsn))
            seconds = time.monotonic() - began
            during = {name: each.reset() for name, each in calls.items()}
        names = ("calls", "longest_ms")
        return {
            "events": events,
            "emptied": outcome.emptied == [date_ago(FILLED)],
            "left": outcome.left,
            "pass_seconds": round(seconds, 2),
            **{f"before_{name}": dict(zip(names, found, strict=True)) for name, found in before.items()},
            **{f"during_{name}": dict(zip(names, found, strict=True)) for name, found in during.items()},
        }


async def one_pass(dsn: str) -> Outcome:
    """Do passes until the day is emptied, as a relay does, at most 20 of them."""
    store = Store(lambda: dsn, pooler=False, connections=2)
    await store.open()
    log = structlog.stdlib.get_logger("bench")
    found = Outcome()

    async def do(granted: Pass) -> Outcome:
        return await RetentionPass(store, granted, None, log).run()

    try:
        for _ in range(20):
            result = await run_pass(store, uuid4(), Person("bench"), do)
            if result is not None:
                found.emptied += result[1].emptied
                found.left = result[1].left
            if found.emptied:
                break
    finally:
        await store.close()
    return found


def main() -> int:
    """Measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=int, default=1_000_000, help="events of the day; default 1000000")
    print(json.dumps(measure(parser.parse_args().events), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
