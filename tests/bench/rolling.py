"""What becomes of a steady stream when its brokers do not stand still, on three brokers and a real relay process.

usage: python -m tests.bench.rolling [rolling|frozen|lost|oversized|outage] ...

- rolling: every broker is restarted in turn, for some rounds, under 5,000 events/s: lost, reordered, repeated.
- frozen: the leader of a partition is stopped where it stands for 3, 10 and 60 s: the same figures.
- lost: answers of a broker are thrown away, three times for longer than the relay waits for them: the same figures.
- oversized: drain rate with one record in a thousand above the topic's limit, beside the rate without; in pairs.
- outage: no broker answers for 60 s while a million events are emitted: the position stands, no row is written, then
  the backlog drains, beside the drain rate of a relay that starts on such a backlog as the broker comes back; in pairs.

Starts PostgreSQL and the brokers by itself. The figures depend on what else the machine does; its load is printed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

import psycopg
from confluent_kafka import Consumer, KafkaException, TopicPartition

from outbox_relay.postgres.migrations import migrate
from tests.contract.kafka import proxied_broker
from tests.support.kafka import KafkaBroker, KafkaCluster, Record
from tests.support.postgres import PostgresServer
from tests.support.service import RelayService
from tests.support.shop import Report, compare
from tests.support.wait import until

PARTITIONS = 6
KEYS = 2_000
BATCH = 250
LIMIT = 20_000
"""``max.message.bytes`` of the topic that gets oversized records."""
STREAM = """insert into outbox.event (uid, type, key, payload, content_type)
select outbox.uuid7(), 'order.created', 'k' || g %% %(keys)s,
       convert_to(format('{"key": "k%%s", "n": %%s, "note": "%%s"}', g %% %(keys)s, g / %(keys)s + 1, repeat('x', 180)),
                  'UTF8'),
       'application/json'
  from generate_series(%(first)s::bigint, %(last)s::bigint) g"""
"""Made by the server: what makes the load must leave the machine to those who carry it."""
LOST_SECONDS = 6.0
"""How long answers are lost: a little longer than the relay waits for them."""
CONFIG = """
[database]
dsn = "{dsn}"
[sinks.events]
type = "kafka"
topic = "{topic}"
[sinks.events.producer]
"bootstrap.servers" = "{bootstrap}"
[routes]
"*" = ["events"]
"""


class Stream:
    """Emits `rate` events a second from one thread: of each key numbers 1, 2, 3 and so on."""

    def __init__(self, dsn: str, rate: float, keys: int = KEYS) -> None:
        self._dsn = dsn
        self._rate = rate
        self._keys = keys
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.emitted = 0
        self._took = 0.0

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Emit nothing more."""
        self._stopped.set()
        self._thread.join(60)

    @property
    def reached(self) -> float:
        """Events a second that were really emitted: a busy machine does not keep up."""
        return self.emitted / self._took if self._took else 0.0

    def committed(self) -> dict[str, int]:
        """key → events committed."""
        whole, rest = divmod(self.emitted, self._keys)
        counts = {f"k{key}": whole + (key < rest) for key in range(self._keys)}
        return {key: count for key, count in counts.items() if count}

    def _run(self) -> None:
        began = time.monotonic()
        with psycopg.connect(self._dsn) as connection:
            while not self._stopped.is_set():
                due = began + self.emitted / self._rate
                self._stopped.wait(max(0.0, due - time.monotonic()))
                self._emit(connection)
                self._took = time.monotonic() - began

    def _emit(self, connection: psycopg.Connection) -> None:
        with connection.transaction():
            connection.execute(STREAM, {"keys": self._keys, "first": self.emitted, "last": self.emitted + BATCH - 1})
        self.emitted += BATCH


class Parts:
    """A database and a relay for one topic."""

    def __init__(self, postgres: PostgresServer, bootstrap: str, topic: str, directory: Path) -> None:
        name = topic.replace(".", "_")
        postgres.create_database(name)
        self.dsn = postgres.dsn(name)
        migrate(self.dsn)
        self.relay = RelayService(directory, CONFIG.format(dsn=self.dsn, topic=topic, bootstrap=bootstrap), name)

    def one(self, query: str) -> int:
        """The number that a query answers."""
        with psycopg.connect(self.dsn) as connection:
            row = connection.execute(query.encode()).fetchone()
        assert row is not None
        return int(row[0])

    def cpu_seconds(self) -> float:
        """Processor time that the relay's process has taken: depends less than a rate on what else the machine does."""
        fields = Path(f"/proc/{self.relay.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mib(self) -> float:
        """Memory of the relay's process now."""
        pages = int(Path(f"/proc/{self.relay.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Ends:
    """How many records stand in a topic."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._partitions = [TopicPartition(topic, n) for n in range(PARTITIONS)]
        self._consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "ends", "log_level": 0})

    def count(self) -> int:
        """The number now; 0 while it cannot be found out."""
        try:
            return sum(self._consumer.get_watermark_offsets(p, timeout=10)[1] for p in self._partitions)
        except KafkaException:
            return 0

    def seconds(self, records: int, there: int = 0, limit: float = 900) -> float:
        """Wait until `records` are there; seconds since there were more than `there`."""
        began = time.monotonic()
        moved = False
        deadline = began + limit
        while (now := self.count()) < records:
            if not moved and now > there:
                began, moved = time.monotonic(), True
            if time.monotonic() > deadline:
                raise TimeoutError(f"{now} of {records} records arrived")
            time.sleep(0.01)
        return time.monotonic() - began


class Brokers(Protocol):
    """A cluster or a single broker."""

    @property
    def bootstrap(self) -> str:
        """Where clients find them."""
        ...

    def create_topic(self, name: str, partitions: int = ..., /) -> None:
        """Make a topic."""
        ...

    def read_all(self, topic: str, *, seconds: float) -> list[Record]:
        """All records of a topic."""
        ...


def judged(cluster: Brokers, topic: str, committed: dict[str, int], seconds: float = 120) -> Report:
    """Wait until all that was committed has arrived, and judge it."""
    wanted = sum(committed.values())
    ends = Ends(cluster.bootstrap, topic)
    until(lambda: ends.count() >= wanted, seconds=seconds, what=f"{wanted} events arrive")
    found: list[bytes] = []

    def arrived() -> bool:
        found[:] = [record.value or b"" for record in cluster.read_all(topic, seconds=180)]
        return len(set(found)) >= wanted

    until(arrived, seconds=seconds, what=f"{wanted} different events arrive")
    return compare(committed, found)


def under_stream(
    postgres: PostgresServer,
    cluster: Brokers,
    topic: str,
    rate: float,
    trouble: Callable[[], None],
    bootstrap: str | None = None,
) -> Report:
    """What arrives of a stream during which there is `trouble`; the relay goes to `bootstrap`, if that is another."""
    cluster.create_topic(topic, PARTITIONS)
    with tempfile.TemporaryDirectory() as directory:
        parts = Parts(postgres, bootstrap or cluster.bootstrap, topic, Path(directory))
        with parts.relay.start() as relay, Stream(parts.dsn, rate) as stream:
            until(lambda: stream.emitted > rate, seconds=60, what="the stream flows")
            trouble()
            after = stream.emitted
            until(lambda: stream.emitted > after + rate, seconds=60, what="the stream goes on")
            stream.stop()
            report = judged(cluster, topic, stream.committed())
            said = {line.get("reason") or line.get("event") for line in relay.lines() if line.get("level") == "error"}
            print(
                f"{topic}: {report}; {stream.reached:,.0f} of {rate:,.0f} events/s were emitted; "
                f"relay {parts.memory_mib():.0f} MiB; errors logged: {len(said)}; {load()}",
                flush=True,
            )
            relay.stop()
    return report


def rolling(postgres: PostgresServer, cluster: KafkaCluster, rounds: int, rate: float) -> bool:
    """Restart every broker in turn, `rounds` times; whether nothing was lost or reordered."""

    def trouble() -> None:
        for number in range(rounds):
            began = time.monotonic()
            cluster.restart_each("rolling")
            print(f"round {number + 1}: {time.monotonic() - began:.0f} s, {load()}", flush=True)

    return under_stream(postgres, cluster, "rolling", rate, trouble).sound


def frozen(postgres: PostgresServer, cluster: KafkaCluster, seconds: float, rate: float) -> bool:
    """Stop the leader of a partition where it stands for `seconds`; whether nothing was lost or reordered."""
    topic = f"frozen.{seconds:g}"

    def trouble() -> None:
        with cluster.leader(topic).frozen():
            time.sleep(seconds)

    return under_stream(postgres, cluster, topic, rate, trouble).sound


def lost(postgres: PostgresServer, rate: float) -> bool:
    """Throw a broker's answers away, three times; whether nothing was lost or reordered and what was repeated shows."""
    with proxied_broker() as (kafka, proxy):

        def trouble() -> None:
            for _ in range(3):
                proxy.mute = True
                time.sleep(LOST_SECONDS)
                proxy.mute = False
                # Whoever lost an answer waits for it on that connection.
                proxy.cut()
                proxy.restore()
                time.sleep(LOST_SECONDS)

        report = under_stream(postgres, kafka, "lost", rate, trouble, proxy.address)
    return report.sound and report.duplicates > 0


FILL = """insert into outbox.event (uid, type, key, payload, content_type)
select outbox.uuid7(), 'order.created', 'k' || (g %% 5000),
       convert_to('{"order_id": 123456, "note": "' || repeat('x', case when g %% %s = 0 then %s else 200 end) || '"}',
                  'UTF8'),
       'application/json'
  from generate_series(1, %s) g"""


def drained(postgres: PostgresServer, kafka: KafkaBroker, topic: str, events: int, large_each: int) -> float:
    """Events a second at which a backlog drains in which each so many events is too large; all others must arrive."""
    kafka.create_topic(topic, partitions=PARTITIONS, config={"max.message.bytes": str(LIMIT)})
    ends = Ends(kafka.bootstrap, topic)
    with tempfile.TemporaryDirectory() as directory:
        parts = Parts(postgres, kafka.bootstrap, topic, Path(directory))
        with psycopg.connect(parts.dsn, autocommit=True) as connection:
            connection.execute(FILL, (large_each, LIMIT, events))
            connection.execute("vacuum analyze outbox.event")
        wanted = events - events // large_each
        with parts.relay.start(wait=False):
            rate = wanted / ends.seconds(wanted)
            dead = "select count(*) from outbox.delivery where state = 'dead'"
            until(lambda: parts.one(dead) == events - wanted, seconds=60, what="what is too large is dead")
            print(f"{topic}: {rate:,.0f} events/s, {events - wanted} dead, {load()}", flush=True)
    return rate


def oversized(postgres: PostgresServer, events: int, pairs: int) -> bool:
    """Whether one record in a thousand above the topic's limit leaves four fifths of the rate.

    The first drain is not counted: a broker that was just started is slower. Then the two take turns at coming first.
    """
    ratios: list[float] = []
    with KafkaBroker() as kafka:
        drained(postgres, kafka, "first", events, events + 1)
        for pair in range(pairs):
            without, with_them = (f"without_{pair}", events + 1), (f"oversized_{pair}", 1_000)
            turns = (with_them, without) if pair % 2 else (without, with_them)
            rates = {turn: drained(postgres, kafka, turn[0], events, turn[1]) for turn in turns}
            ratios.append(rates[with_them] / rates[without])
    print(f"one oversized record in a thousand: ratio {spread(ratios)}", flush=True)
    return median(ratios) >= 0.8


def outage(postgres: PostgresServer, events: int, seconds: float, pairs: int) -> bool:
    """Whether a backlog that grew while no broker answered drains as fast as one that a relay finds at its start.

    Both are as freshly written, and both brokers as freshly started: a vacuumed table and a broker that has been at
    work for a while are quicker, whoever reads the one and writes to the other. The two take turns at coming first.
    """
    ratios: list[float] = []
    standing = 0
    for pair in range(pairs):
        with KafkaBroker() as kafka, tempfile.TemporaryDirectory() as directory:
            runs = [Backlog(postgres, kafka, Path(directory), events, seconds, pair, alive) for alive in (True, False)]
            for run in reversed(runs) if pair % 2 else runs:
                run.run()
        standing += runs[0].rows
        ratios.append(runs[0].rate / runs[1].rate)
        print(f"catch-up after an outage: ratio {ratios[-1]:.2f}", flush=True)
    print(f"catch-up after an outage: ratio {spread(ratios)}", flush=True)
    return standing == 0 and median(ratios) >= 0.9


@dataclass
class Backlog:
    """One backlog that grows while no broker answers, and how it drains: by a relay that was `alive` all the time,
    or by one that starts when the broker does."""

    postgres: PostgresServer
    kafka: KafkaBroker
    directory: Path
    events: int
    seconds: float
    pair: int
    alive: bool
    rows: int = 0
    """Rows that stood at the end of the outage."""
    rate: float = 0.0
    """Events a second, from the first that arrived behind the outage to the last."""

    def run(self) -> None:
        """Do it."""
        name = f"{'catch_up' if self.alive else 'drain'}_{self.pair}"
        self.kafka.create_topic(name, PARTITIONS)
        parts, ends = Parts(self.postgres, self.kafka.bootstrap, name, self.directory), Ends(self.kafka.bootstrap, name)
        (self._lived_through if self.alive else self._started_afterwards)(parts, ends)

    def _lived_through(self, parts: Parts, ends: Ends) -> None:
        first = 1_000
        with parts.relay.start():
            fill(parts, first)
            ends.seconds(first)
            self.kafka.stop()
            down = self._fill(parts)
            self.rows = parts.one("select count(*) from outbox.delivery")
            circuit = parts.one("select count(*) from outbox.sink where circuit <> 'closed'")
            print(
                f"down for {down:.0f} s with {self.events} events: {self.rows} rows, circuit open: {circuit}",
                flush=True,
            )
            memory, cpu = parts.memory_mib(), parts.cpu_seconds()
            self.kafka.start()
            self.rate = self.events / ends.seconds(first + self.events, there=first)
            self._tell("catch-up", parts.cpu_seconds() - cpu)
            print(f"relay {memory:.0f} MiB while it was down, then {parts.memory_mib():.0f} MiB", flush=True)

    def _started_afterwards(self, parts: Parts, ends: Ends) -> None:
        self.kafka.stop()
        self._fill(parts)
        self.kafka.start()
        with parts.relay.start(wait=False):
            self.rate = self.events / ends.seconds(self.events)
            self._tell("drain", parts.cpu_seconds())

    def _fill(self, parts: Parts) -> float:
        """Emit in ten transactions, and wait until `seconds` have passed; returns how many really have."""
        began = time.monotonic()
        for _ in range(10):
            fill(parts, self.events // 10)
        time.sleep(max(0.0, self.seconds - (time.monotonic() - began)))
        return time.monotonic() - began

    def _tell(self, what: str, cpu: float) -> None:
        """Print the rate, and what an event cost the relay."""
        each = cpu / self.events * 1e6
        print(f"{what} {self.rate:,.0f} events/s, {each:.1f} us of the relay an event, {load()}", flush=True)


def fill(parts: Parts, events: int) -> None:
    """Emit so many events of the usual size in one transaction."""
    with psycopg.connect(parts.dsn, autocommit=True) as connection:
        connection.execute(FILL, (events + 1, 200, events))


def spread(ratios: list[float]) -> str:
    """Median, least and most."""
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def load() -> str:
    """How busy the machine is."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def main() -> int:
    """Run what was asked for; 1 when something did not hold."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("what", nargs="*", default=["rolling", "frozen", "lost", "oversized", "outage"])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--rate", type=float, default=5_000)
    arguments.add_argument("--freeze", type=float, nargs="+", default=[3, 10, 60])
    arguments.add_argument("--events", type=int, default=1_000_000)
    arguments.add_argument("--pairs", type=int, default=3)
    arguments.add_argument("--down-seconds", type=float, default=60)
    options = arguments.parse_args()
    freezes: list[float] = options.freeze if "frozen" in options.what else []
    held: dict[str, bool] = {}
    with PostgresServer(settings={"shared_buffers": "1GB", "max_wal_size": "8GB"}) as postgres:
        if {"rolling", "frozen"} & set(options.what):
            with KafkaCluster() as cluster:
                if "rolling" in options.what:
                    held["rolling"] = rolling(postgres, cluster, options.rounds, options.rate)
                for seconds in freezes:
                    held[f"frozen {seconds:g} s"] = frozen(postgres, cluster, seconds, options.rate)
        if "lost" in options.what:
            held["lost answers"] = lost(postgres, options.rate)
        if "oversized" in options.what:
            held["oversized"] = oversized(postgres, options.events // 2, options.pairs)
        if "outage" in options.what:
            held["outage"] = outage(postgres, options.events, options.down_seconds, options.pairs)
    for name, holds in held.items():
        print(f"{name}: {'holds' if holds else 'does NOT hold'}")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
