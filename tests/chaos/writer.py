"""Program that emits events in transactions at a steady rate and records them.

Every key has a row with the number of its events. A transaction locks the rows of some keys, increments their numbers
and emits an event per key with its number. Some are rolled back, completely or to a savepoint, and some stay open for
a while.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psycopg

from outbox_relay import outbox
from tests.chaos.expected import ExpectedFile, Intended

COUNTS = "chaos_count"
TABLE = f"""create table if not exists {COUNTS} (key int primary key, n bigint not null default 0);
insert into {COUNTS} (key) select g from generate_series(0, %s - 1) g on conflict do nothing"""
LOCK = f"select key from {COUNTS} where key = any(%s) order by key for update".encode()
RAISE = f"update {COUNTS} set n = n + 1 where key = any(%s) returning key, n".encode()
BOTH_EVERY = 4
"""Every fourth key has events for both sinks, the others have events for Kafka alone."""
KEYS_PER_TRANSACTION = 60
LATE_SECONDS = 2.0
"""A writer catches up at most this delay."""
AGAIN_SECONDS = 0.1
LONG_SECONDS = 1.0
UNDONE_SHARE, SAVEPOINT_SHARE, LONG_SHARE = 0.05, 0.1, 0.01


def type_of(key: int) -> str:
    """Return the type of a key's events."""
    return "shop.order" if for_both(key) else "stock.changed"


def for_both(key: int) -> bool:
    """Return True if the events of this key are also routed to the webhook."""
    return key % BOTH_EVERY == 0


def payload_of(key: int, number: int) -> dict[str, object]:
    """Return a payload. Its time is `time.monotonic()`, which all processes of a machine share."""
    return {"key": key, "n": number, "at": round(time.monotonic(), 3)}


class Writer:
    """Emits `rate` events per second until `stopping` is set."""

    def __init__(self, dsn: str, seed: str, rate: float, keys: int, expected: ExpectedFile) -> None:
        self._dsn = dsn
        self._rng = random.Random(seed)
        self._rate = rate
        self._keys = keys
        self._expected = expected
        self._number = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        """Run transactions; reconnect if the connection breaks."""
        due = time.monotonic()
        while not self.stopping.is_set():
            try:
                with psycopg.connect(self._dsn, connect_timeout=5) as connection:
                    while not self.stopping.is_set():
                        self.stopping.wait(max(0.0, due - time.monotonic()))
                        due = max(due, time.monotonic() - LATE_SECONDS) + self._transact(connection) / self._rate
            except (psycopg.Error, psycopg.Rollback):  # Rollback comes through where the connection broke meanwhile
                self.stopping.wait(AGAIN_SECONDS)  # the server is restarting

    def _transact(self, connection: psycopg.Connection) -> int:
        """Run one transaction and return its number of keys. Raise psycopg.Error if the connection breaks."""
        rng = self._rng
        self._number += 1
        keys = sorted(rng.sample(range(self._keys), rng.randint(4, KEYS_PER_TRANSACTION)))
        connection.execute(LOCK, (keys,))
        half = len(keys) // 2
        intended = self._emit(connection, keys[:half]) + self._emit(connection, keys[half:])
        if rng.random() < LONG_SHARE:
            self.stopping.wait(LONG_SECONDS)
        self._expected.intend(self._number, intended)
        if rng.random() < UNDONE_SHARE:
            self._expected.end(self._number, "rolled back")
            connection.rollback()
        else:
            self._expected.commit(self._number, connection)
        return len(keys)

    def _emit(self, connection: psycopg.Connection, keys: list[int]) -> list[Intended]:
        """Increment the numbers and emit. Return the events; none after a rollback to the savepoint."""
        undone = self._rng.random() < SAVEPOINT_SHARE
        with connection.transaction():
            counts = connection.execute(RAISE, (keys,)).fetchall()
            uids = outbox.emit_many(
                connection, [outbox.Event(type_of(key), payload_of(key, n), key=f"key-{key}") for key, n in counts]
            )
            if undone:
                raise psycopg.Rollback
        return [] if undone else [(key, n, str(uid)) for (key, n), uid in zip(counts, uids, strict=True)]


class WriterProcess:
    """A writer as a child process."""

    def __init__(self, directory: Path, dsn: str, number: int, seed: str, rate: float, keys: int) -> None:
        self.expected = directory / f"expected-{number}.jsonl"
        self._output = directory / f"writer-{number}.out"
        self._command = [
            sys.executable, "-m", "tests.chaos.writer", "--dsn", dsn, "--seed", f"{seed}/{number}",
            "--rate", str(rate), "--keys", str(keys), "--expected", str(self.expected),
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process."""
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=output, stderr=output)

    def stop(self) -> None:
        """Stop it after its current transaction. Raise AssertionError if its exit code is not 0."""
        if self._process is not None:
            process, self._process = self._process, None
            process.terminate()
            assert process.wait(60) == 0, self._output.read_text()[-3000:]

    def kill(self) -> None:
        """End the process by SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)


def prepare(dsn: str, keys: int) -> None:
    """Create the table with the number of events of each key."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(TABLE.replace("%s", str(keys)).encode())


def _stop_with_parent(writer: Writer) -> None:
    """Stop the writer when stdin ends, which happens if the parent process dies."""
    os.read(sys.stdin.fileno(), 1)
    writer.stopping.set()


def main() -> None:
    """Write until SIGTERM, or until the parent process ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--keys", type=int, required=True)
    parser.add_argument("--expected", type=Path, required=True)
    options = parser.parse_args()
    expected = ExpectedFile(options.expected)
    writer = Writer(options.dsn, options.seed, options.rate, options.keys, expected)
    signal.signal(signal.SIGTERM, lambda _number, _frame: writer.stopping.set())
    threading.Thread(target=_stop_with_parent, args=(writer,), daemon=True).start()
    writer.run()
    expected.close()


if __name__ == "__main__":
    main()
