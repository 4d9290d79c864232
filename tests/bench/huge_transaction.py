"""Measure how a relay delivers a transaction of millions of events that commits late, and its effect on other events.

usage: python -m tests.bench.huge_transaction [--events 5000000] [--statement-ms 9000] [--unrouted]

One transaction inserts the events and then commits. A relay process serves two sinks meanwhile. The Kafka sink gets the
events of the transaction, and some with higher ids that are committed before it, so that all its events are late. The
webhook gets a trickle of other events. `--statement-ms` is the `statement_timeout` of the relay's sessions, by default
9 s. With `--unrouted` no sink gets the events of the transaction, but both must read past them.

Every ten seconds the program prints the relay's resident memory, the records in Kafka, the latency of the trickle
(median and maximum of the period, and the waiting time of the oldest event) and the statements that the server has
cancelled. The exit code is 1 if

- memory exceeds the sum of an idle relay (110 MiB, docs/operations.md) and the budget of one sink (64 MiB);
- an event of the trickle waits for more than ten seconds;
- a session of a sink is restarted;
- an event of the transaction does not arrive.

Starts PostgreSQL, the broker and the receiver.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from outbox_relay.postgres.migrations import migrate
from tests.bench.dead_destination import resident_bytes
from tests.bench.rolling import load
from tests.bench.stream import PARTITIONS, EndOffsets
from tests.support.kafka import KafkaBroker
from tests.support.postgres import PostgresServer
from tests.support.receiver.answers import say
from tests.support.receiver.request import Request
from tests.support.receiver.server import Receiver
from tests.support.receiver.signatures import SECRET
from tests.support.service import RelayService

MEMORY_BYTES = (110 + 64) << 20
WAIT_SECONDS = 10.0
PERIOD_SECONDS = 10.0
STALLED_SECONDS = 300.0
"""Time without a new record in Kafka after which the program gives up."""
TRICKLE_SECONDS = 0.1
"""Interval of the trickle; every tenth event is followed by one for Kafka."""
CONFIG = """
[database]
dsn = "{dsn}"
[sinks.events]
type = "kafka"
topic = "huge"
[sinks.events.producer]
"bootstrap.servers" = "{bootstrap}"
[sinks.trickle]
type = "webhook"
url = "{url}"
allow_http = true
allow_networks = ["127.0.0.0/8"]
secrets = ["{secret}"]
[routes]
"{routed}" = ["events"]
"later.*" = ["events"]
"trickle.*" = ["trickle"]
"""
HUGE = """
insert into outbox.event (shard, uid, type, key, payload, content_type)
select outbox_internal.shard_of('k' || g %% 5000, null), outbox_internal.uuid7(), 'huge.happened', 'k' || g %% 5000,
       convert_to(format('{"n": %%s}', g), 'UTF8'), 'application/json'
  from generate_series(1, %s::bigint) g
"""
EMIT = "select outbox.emit_raw(%s, %s, key => 'trickle')::text"
ENDED = re.compile(r"ERROR:  canceling statement.*?STATEMENT:(.*?)(?=\n\d{4}-|\Z)", re.DOTALL)
NAMES = ("read_late", "read_rest", "claim_rows", "settle", "tick")


@dataclass
class Trickle:
    """A thread that emits events one by one, and the times of their arrival."""

    dsn: str
    later: int = 0
    """Number of events emitted for Kafka."""
    sent: dict[str, float] = field(default_factory=dict[str, float])
    arrived: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start to emit."""
        self._thread.start()

    def stop(self) -> None:
        """Stop emitting."""
        self._stopped.set()
        self._thread.join(60)

    def _run(self) -> None:
        count = 0
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            while not self._stopped.wait(TRICKLE_SECONDS):
                count += 1
                [(uid,)] = connection.execute(EMIT, ("trickle.happened", b"{}")).fetchall()
                self.sent[uid] = time.monotonic()
                if count % 10 == 0:
                    connection.execute(EMIT, ("later.happened", b"{}"))
                    self.later += 1

    async def answer(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Record the arrival of an event and accept it."""
        self.arrived.setdefault(request.uid, time.monotonic())
        await say(200)(request, reader, writer)

    def latencies(self, since: float) -> list[float]:
        """Return the seconds from commit to arrival of the events that arrived after `since`."""
        arrived = [(uid, at) for uid, at in list(self.arrived.items()) if at >= since]
        return [max(0.0, at - self.sent[uid]) for uid, at in arrived if uid in self.sent]

    def oldest_wait(self) -> float:
        """Return how many seconds the oldest pending event has waited; 0 if all have arrived."""
        waiting = [at for uid, at in list(self.sent.items()) if uid not in self.arrived]
        return time.monotonic() - min(waiting) if waiting else 0.0


@dataclass
class Huge:
    """The transaction, in a separate thread."""

    dsn: str
    events: int
    xid: int = 0

    def __post_init__(self) -> None:
        self._committed = threading.Event()

    def start(self) -> None:
        """Start to insert."""
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def committed(self) -> bool:
        """Return True if the transaction has committed."""
        return self._committed.is_set()

    def _run(self) -> None:
        with psycopg.connect(self.dsn) as connection:
            [(self.xid,)] = connection.execute("select pg_current_xact_id()::text::bigint").fetchall()
            connection.execute(HUGE, (self.events,))
        self._committed.set()


@dataclass
class Watch:
    """Checks all figures twice a second and prints a line per period."""

    service: RelayService
    server: PostgresServer
    trickle: Trickle
    ends: EndOffsets
    huge: Huge
    records: int
    """Number of the transaction's events that are routed to Kafka."""
    tell: Callable[[str], None]
    peak: int = 0
    longest: float = 0.0

    def run(self) -> list[str]:
        """Watch until all events have arrived or no more do. Return the violations."""
        began = said = moved = time.monotonic()
        records = 0
        while True:
            time.sleep(0.5)
            now, found = time.monotonic(), self._look()
            if found > records:
                records, moved = found, now
            if now - said >= PERIOD_SECONDS:
                self._say(now - began, said, records)
                said = now
            stalled = self.huge.committed and now - moved > STALLED_SECONDS
            if stalled or (self.huge.committed and self._all(records) and self._read_past()):
                self._say(now - began, said, records)
                return self._judge(records)

    def _look(self) -> int:
        self.peak = max(self.peak, resident_bytes(self.service.process.pid))
        self.longest = max(self.longest, self.trickle.oldest_wait())
        return self.ends.count()

    def _all(self, records: int) -> bool:
        if not self.trickle.oldest_wait() < WAIT_SECONDS:
            return False
        return records >= self.records + self.trickle.later - 1

    def _read_past(self) -> bool:
        """Return True if every shard of both sinks has passed the transaction."""
        query = "select bool_and(pg_visible_in_snapshot(%s::text::xid8, a_snapshot)) from outbox.standing"
        with psycopg.connect(self.trickle.dsn, autocommit=True) as connection:
            [(passed,)] = connection.execute(query, (self.huge.xid,)).fetchall()
        return bool(passed)

    def _say(self, seconds: float, since: float, records: int) -> None:
        latencies = self.trickle.latencies(since)
        self.longest = max([self.longest, *latencies])
        middle = statistics.median(latencies) if latencies else float("nan")
        most = max(latencies, default=float("nan"))
        resident, waits = resident_bytes(self.service.process.pid), self.trickle.oldest_wait()
        self.tell(
            f"{seconds:5.0f} s {'committed' if self.huge.committed else 'open     '} {resident / 2**20:5.0f} MiB"
            f" {records:9,} records, trickle {middle * 1e3:4.0f} ms, most {most * 1e3:5.0f} ms, oldest {waits:.1f} s,"
            f" ended {self.ended() or 'none'}, restarts {self.restarts() or 'none'}, {load()}"
        )

    def said(self) -> list[str]:
        """Return the warnings and errors of the relay."""
        lines = [line for line in self.service.lines() if line.get("level") in ("warning", "error")]
        return [f"relay: {line.get('event')}: {line.get('reason')}" for line in lines]

    def ended(self) -> dict[str, int]:
        """Return the number of cancelled statements of each kind."""
        texts = ENDED.findall(self.server.log.read_text(errors="replace"))
        names = Counter(next((name for name in NAMES if name in text), "others") for text in texts)
        return dict(sorted(names.items()))

    def restarts(self) -> dict[str, int]:
        """Return the number of restarted sessions by reason."""
        found = Counter[str]()
        body: dict[str, Any] = self.service.ask("/readyz")[1] or {"sinks": {}}
        for sink in body["sinks"].values():
            found.update(sink["restarts"])
        return dict(found)

    def _judge(self, records: int) -> list[str]:
        wrong = list[str]()
        if self.peak > MEMORY_BYTES:
            wrong.append(f"{self.peak / 2**20:.0f} MiB resident, more than {MEMORY_BYTES >> 20}")
        if self.longest > WAIT_SECONDS:
            wrong.append(f"an event of the trickle waited for {self.longest:.1f} s, more than {WAIT_SECONDS:g}")
        if restarts := self.restarts():
            wrong.append(f"sessions were restarted: {restarts}")
        if not self._all(records):
            wrong.append(f"{records:,} records arrived of {self.records + self.trickle.later:,}")
        return wrong


def measure(
    directory: Path, events: int, statement_ms: int | None, routed: bool, tell: Callable[[str], None]
) -> list[str]:
    """Run the measurement and return the violations."""
    program = ("outbox_relay",) if statement_ms is None else ("tests.support.short_statements", str(statement_ms))
    with PostgresServer() as server, KafkaBroker() as kafka:
        server.create_database("huge")
        dsn = server.dsn("huge")
        migrate(dsn)
        kafka.create_topic("huge", PARTITIONS)
        trickle, huge = Trickle(dsn), Huge(dsn, events)
        with Receiver(trickle.answer) as receiver:
            text = CONFIG.format(
                dsn=dsn,
                bootstrap=kafka.bootstrap,
                url=receiver.url,
                secret=SECRET,
                routed="huge.*" if routed else "no.*",
            )
            with RelayService(directory, text, program=program) as service:
                ends = EndOffsets(kafka.bootstrap, "huge")
                watch = Watch(service, server, trickle, ends, huge, events if routed else 0, tell)
                trickle.start()
                huge.start()
                wrong = watch.run()
                trickle.stop()
                for line in watch.said():
                    tell(line)
    tell(f"most: {watch.peak / 2**20:.0f} MiB resident, {watch.longest:.1f} s for an event of the trickle")
    for each in wrong:
        tell(f"wrong: {each}")
    return wrong


def main(argv: list[str]) -> int:
    """Run the measurement, print the results and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.huge_transaction")
    parser.add_argument("--events", type=int, default=5_000_000)
    parser.add_argument("--statement-ms", type=int)
    parser.add_argument("--unrouted", action="store_true")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        wrong = measure(
            Path(directory), given.events, given.statement_ms, not given.unrouted, lambda line: print(line, flush=True)
        )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
