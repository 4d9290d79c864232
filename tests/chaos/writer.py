"""A writer: emits in transactions as applications do, at a steady rate, and writes down what it does. A process.

Every key has a row that counts its events. A transaction locks the rows of some keys, raises their counts and emits an
event per key with its count. Some are rolled back, whole or to a savepoint, and some stay open for a while.
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
from tests.chaos.truth import Intended, TruthFile

COUNTS = "chaos_count"
TABLE = f"""create table if not exists {COUNTS} (key int primary key, n bigint not null default 0);
insert into {COUNTS} (key) select g from generate_series(0, %s - 1) g on conflict do nothing"""
LOCK = f"select key from {COUNTS} where key = any(%s) order by key for update".encode()
RAISE = f"update {COUNTS} set n = n + 1 where key = any(%s) returning key, n".encode()
BOTH_EVERY = 4
"""One key in four has events for both sinks, the others for Kafka alone."""
KEYS_PER_TRANSACTION = 60
LATE_SECONDS = 2.0
"""A writer that is later than this does not catch up."""
AGAIN_SECONDS = 0.1
LONG_SECONDS = 1.0
UNDONE_SHARE, SAVEPOINT_SHARE, LONG_SHARE = 0.05, 0.1, 0.01


def type_of(key: int) -> str:
    """The type of a key's events."""
    return "shop.order" if for_both(key) else "stock.changed"


def for_both(key: int) -> bool:
    """Whether the events of this key go to the webhook too."""
    return key % BOTH_EVERY == 0


def payload_of(key: int, number: int) -> dict[str, object]:
    """An event's payload; `at` is `time.monotonic()`, which all processes of a machine share."""
    return {"key": key, "n": number, "at": round(time.monotonic(), 3)}


class Writer:
    """Transactions at `rate` events a second until told to stop."""

    def __init__(self, dsn: str, seed: str, rate: float, keys: int, truth: TruthFile) -> None:
        self._dsn = dsn
        self._rng = random.Random(seed)
        self._rate = rate
        self._keys = keys
        self._truth = truth
        self._number = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        """Write, over a new connection whenever one breaks."""
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
        """One transaction; how many events it was about. Raises psycopg.Error when the connection is gone."""
        rng = self._rng
        self._number += 1
        keys = sorted(rng.sample(range(self._keys), rng.randint(4, KEYS_PER_TRANSACTION)))
        connection.execute(LOCK, (keys,))
        half = len(keys) // 2
        intended = self._emit(connection, keys[:half]) + self._emit(connection, keys[half:])
        if rng.random() < LONG_SHARE:
            self.stopping.wait(LONG_SECONDS)
        self._truth.intend(self._number, intended)
        if rng.random() < UNDONE_SHARE:
            self._truth.end(self._number, "rolled back")
            connection.rollback()
        else:
            self._commit(connection)
        return len(keys)

    def _emit(self, connection: psycopg.Connection, keys: list[int]) -> list[Intended]:
        """Raise the counts and emit; nothing when it was rolled back to the savepoint before."""
        undone = self._rng.random() < SAVEPOINT_SHARE
        with connection.transaction():
            counts = connection.execute(RAISE, (keys,)).fetchall()
            uids = outbox.emit_many(
                connection, [outbox.Event(type_of(key), payload_of(key, n), key=f"key-{key}") for key, n in counts]
            )
            if undone:
                raise psycopg.Rollback
        return [] if undone else [(key, n, str(uid)) for (key, n), uid in zip(counts, uids, strict=True)]

    def _commit(self, connection: psycopg.Connection) -> None:
        try:
            connection.commit()
        except psycopg.Error:
            self._truth.end(self._number, "unknown")
            raise
        self._truth.end(self._number, "ok")


class WriterProcess:
    """A writer in a process of its own."""

    def __init__(self, directory: Path, dsn: str, number: int, seed: str, rate: float, keys: int) -> None:
        self.truth = directory / f"truth-{number}.jsonl"
        self._output = directory / f"writer-{number}.out"
        self._command = [
            sys.executable, "-m", "tests.chaos.writer", "--dsn", dsn, "--seed", f"{seed}/{number}",
            "--rate", str(rate), "--keys", str(keys), "--truth", str(self.truth),
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin to write."""
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=output, stderr=output)

    def stop(self) -> None:
        """Finish the transaction under way and end. Raises AssertionError when it had ended by itself, or cannot."""
        if self._process is not None:
            process, self._process = self._process, None
            process.terminate()
            assert process.wait(60) == 0, self._output.read_text()[-3000:]

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)


def prepare(dsn: str, keys: int) -> None:
    """Make the table of counts, for this many keys."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(TABLE.replace("%s", str(keys)).encode())


def _stop_with_parent(writer: Writer) -> None:
    """The pipe to the process that started this one ends with it."""
    os.read(sys.stdin.fileno(), 1)
    writer.stopping.set()


def main() -> None:
    """Write until SIGTERM, or until whoever started this is gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dsn", required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--keys", type=int, required=True)
    parser.add_argument("--truth", type=Path, required=True)
    options = parser.parse_args()
    truth = TruthFile(options.truth)
    writer = Writer(options.dsn, options.seed, options.rate, options.keys, truth)
    signal.signal(signal.SIGTERM, lambda _number, _frame: writer.stopping.set())
    threading.Thread(target=_stop_with_parent, args=(writer,), daemon=True).start()
    writer.run()
    truth.close()


if __name__ == "__main__":
    main()
