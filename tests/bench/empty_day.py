"""Measure how long emits and reads wait while a day of the log is emptied and its partition is removed.

usage: python -m tests.bench.empty_day [--events 1000000] [--archive] [--most-ms 200]

Fills one day of 12 days ago, among 30 partitions, on an embedded PostgreSQL. One thread emits, one reads the newest
events with the statement of a relay, as fast as they can; the longest of their calls count, before the passes and
during them: a call that begins in one of the two, or is under way when it ends, counts in it. With `--archive`, the day
is first archived to a directory. Ends with 1 if a call took longer than `--most-ms` during the passes, if no call was
made, or if the day was not emptied. A call that raises ends the measurement with its error.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import psycopg
import structlog

from outbox_relay.postgres.database import statements
from outbox_relay.postgres.migrations import migrate
from outbox_relay.postgres.retention import Pass, Person
from outbox_relay.postgres.store import Store
from outbox_relay.retention.archiver import archiver_for
from outbox_relay.retention.passes import Outcome, RetentionPass, run_pass
from tests.support.days import date_ago, emit_ago, fill_days, keep, make_day, register
from tests.support.postgres import PostgresServer

FILLED = 12
BEFORE_SECONDS = 3.0
"""Time for which calls are measured before the passes."""
READ = {
    "shards": list(range(64)), "types": None, "a": "3:3:", "b": "9000000000:9000000000:", "rows": 10, "bytes": 1 << 20,
    "upto": 1 << 62, "most_payload": 1 << 20, "server": None, "a_next": 3,
}  # fmt: skip


class Calls:
    """Calls of one kind on a connection of their own, one after another, with their times."""

    def __init__(self, dsn: str, call: Callable[[psycopg.Connection], None]) -> None:
        self._dsn = dsn
        self._call = call
        self._stopped = threading.Event()
        self._made: list[tuple[float, float]] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Calls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def longest(self, began: float, ended: float) -> tuple[int, float]:
        """Return number and longest duration, in milliseconds, of the calls that overlap a time of `time.monotonic`.

        Raise the error of a call that failed. The calls must have been stopped.
        """
        if self._failure is not None:
            raise self._failure
        found = [last - first for first, last in self._made if last > began and first < ended]
        return len(found), round(max(found, default=0.0) * 1000, 1)

    def _run(self) -> None:
        try:
            with psycopg.connect(self._dsn, autocommit=True, prepare_threshold=2) as connection:
                while not self._stopped.is_set():
                    began = time.monotonic()
                    self._call(connection)
                    self._made.append((began, time.monotonic()))
        except BaseException as failure:
            self._failure = failure


def measure(events: int, *, archive: bool) -> dict[str, Any]:
    """Return the longest calls before and during the passes, and what these did."""
    with PostgresServer() as server, TemporaryDirectory() as directory:
        server.create_database("bench")
        dsn = server.dsn("bench")
        migrate(dsn)
        with psycopg.connect(dsn, autocommit=True) as connection:
            for days in range(38, FILLED, -1):
                make_day(connection, days)
            fill_days(connection, FILLED, FILLED, events)
            emit_ago(connection, 0)
            register(connection, "crm", "now")
            keep(connection, 5, archive=archive)
            connection.execute("vacuum analyze outbox.event")
            [(newest,)] = connection.execute("select max(id) from outbox.event").fetchall()
        read = statements()["read_rest"]

        def emit(connection: psycopg.Connection) -> None:
            connection.execute("select outbox.emit('order.created', '{}')")

        def reading(connection: psycopg.Connection) -> None:
            connection.execute(read, {**READ, "after": newest - 10})

        calls = {"emit": Calls(dsn, emit), "read": Calls(dsn, reading)}
        with ExitStack() as stack:
            for each in calls.values():
                stack.enter_context(each)
            started = time.monotonic()
            time.sleep(BEFORE_SECONDS)
            began = time.monotonic()
            outcome = passes(dsn, directory if archive else "")
            ended = time.monotonic()
        before = {name: each.longest(started, began) for name, each in calls.items()}
        during = {name: each.longest(began, ended) for name, each in calls.items()}
        names = ("calls", "longest_ms")
        return {
            "events": events,
            "emptied": outcome.emptied == [date_ago(FILLED)],
            "archived": sum(1 for _ in Path(directory).rglob("manifest.json")),
            "left": outcome.left,
            "pass_seconds": round(ended - began, 2),
            **{f"before_{name}": dict(zip(names, found, strict=True)) for name, found in before.items()},
            **{f"during_{name}": dict(zip(names, found, strict=True)) for name, found in during.items()},
        }


def passes(dsn: str, archive: str) -> Outcome:
    """Do passes until the day is emptied, as a relay does, at most 20 of them. Archive the day first if told where."""
    store = Store(lambda: dsn, pooler=False, connections=2)
    store.open()
    log = structlog.stdlib.get_logger("bench")
    found = Outcome()
    archiver = archiver_for(archive, "jsonl.zst", lambda: dsn, pooler=False)

    def do(granted: Pass) -> Outcome:
        return RetentionPass(store, granted, archiver, log).run()

    try:
        for _ in range(20):
            result = run_pass(store, uuid4(), Person("bench"), do)
            if result is not None:
                found.emptied += result[1].emptied
                found.left = result[1].left
            if found.emptied:
                break
    finally:
        store.close()
    return found


def main() -> int:
    """Measure, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=int, default=1_000_000, help="events of the day; default 1000000")
    parser.add_argument("--archive", action="store_true", help="archive the day before it is emptied")
    parser.add_argument("--most-ms", type=float, default=200.0, help="longest call that is allowed; default 200")
    arguments = parser.parse_args()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    found = measure(arguments.events, archive=arguments.archive)
    print(json.dumps(found, indent=1))
    during = [found[f"during_{name}"] for name in ("emit", "read")]
    late = any(each["longest_ms"] > arguments.most_ms or not each["calls"] for each in during)
    return int(late or not found["emptied"] or found["archived"] != arguments.archive)


if __name__ == "__main__":
    sys.exit(main())
