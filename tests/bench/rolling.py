"""Check a steady stream through a real relay process while its brokers fail.

usage: python -m tests.bench.rolling [rolling|frozen|lost|oversized|outage] ...

- rolling: three brokers are restarted in turn, in rounds, under 5,000 events/s; counts lost, reordered and duplicate.
- frozen: the leader of a partition is stopped by SIGSTOP for 3, 10 and 60 s; the same counts.
- lost: answers of a broker are discarded, three times for longer than the relay waits for them; the same counts.
- oversized: drain rate with one record in a thousand above the topic's limit, compared with the rate without, in pairs.
- outage: no broker answers for 60 s while a million events are emitted. The position must not move and no row may be
  written. Then the drain rate of the backlog is compared with that of a relay that starts on such a backlog, in pairs.

Starts PostgreSQL and the brokers. The figures depend on other load of the machine, which is printed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psycopg

from tests.bench.stream import PARTITIONS, Brokers, EndOffsets, RelayUnderTest, Stream
from tests.contract.kafka import proxied_broker
from tests.support.kafka import KafkaBroker, KafkaCluster
from tests.support.postgres import PostgresServer
from tests.support.shop import Report, compare
from tests.support.wait import until

LIMIT = 20_000
"""``max.message.bytes`` of the topic that gets oversized records."""
LOST_SECONDS = 6.0
"""Duration of lost answers, a little longer than the relay waits for them."""


def checked(cluster: Brokers, topic: str, committed: dict[str, int], seconds: float = 120) -> Report:
    """Wait until all committed events have arrived and compare them."""
    wanted = sum(committed.values())
    offsets = EndOffsets(cluster.bootstrap, topic)
    until(lambda: offsets.count() >= wanted, seconds=seconds, what=f"{wanted} events arrive")
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
    disturb: Callable[[], None],
    bootstrap: str | None = None,
) -> Report:
    """Call `disturb` during a stream and check what arrives; the relay connects to `bootstrap` if given."""
    cluster.create_topic(topic, PARTITIONS)
    with tempfile.TemporaryDirectory() as directory:
        tested = RelayUnderTest(postgres, bootstrap or cluster.bootstrap, topic, Path(directory))
        with tested.relay.start() as relay, Stream(tested.dsn, rate) as stream:
            until(lambda: stream.emitted > rate, seconds=60, what="the stream flows")
            disturb()
            after = stream.emitted
            until(lambda: stream.emitted > after + rate, seconds=60, what="the stream continues")
            stream.stop()
            report = checked(cluster, topic, stream.committed())
            errors = {line.get("reason") or line.get("event") for line in relay.lines() if line.get("level") == "error"}
            print(
                f"{topic}: {report}; {stream.reached:,.0f} of {rate:,.0f} events/s were emitted; "
                f"relay {tested.memory_mib():.0f} MiB; errors logged: {len(errors)}; {load()}",
                flush=True,
            )
            relay.stop()
    return report


def rolling(postgres: PostgresServer, cluster: KafkaCluster, rounds: int, rate: float) -> bool:
    """Restart every broker in turn, `rounds` times. Return True if nothing was lost or reordered."""

    def disturb() -> None:
        for number in range(rounds):
            began = time.monotonic()
            cluster.restart_each("rolling")
            print(f"round {number + 1}: {time.monotonic() - began:.0f} s, {load()}", flush=True)

    return under_stream(postgres, cluster, "rolling", rate, disturb).sound


def frozen(postgres: PostgresServer, cluster: KafkaCluster, seconds: float, rate: float) -> bool:
    """Freeze the leader of a partition for `seconds`. Return True if nothing was lost or reordered."""
    topic = f"frozen.{seconds:g}"

    def disturb() -> None:
        with cluster.leader(topic).frozen():
            time.sleep(seconds)

    return under_stream(postgres, cluster, topic, rate, disturb).sound


def lost(postgres: PostgresServer, rate: float) -> bool:
    """Discard a broker's answers three times. Return True if events were repeated but none lost or reordered."""
    with proxied_broker() as (kafka, proxy):

        def disturb() -> None:
            for _ in range(3):
                proxy.mute = True
                time.sleep(LOST_SECONDS)
                proxy.mute = False
                # The client waits for the lost answers on the open connections.
                proxy.cut()
                proxy.restore()
                time.sleep(LOST_SECONDS)

        report = under_stream(postgres, kafka, "lost", rate, disturb, proxy.address)
    return report.sound and report.duplicates > 0


FILL = """insert into outbox.event (shard, uid, type, key, payload, content_type)
select outbox_internal.shard_of('k' || (g %% 5000), null), outbox_internal.uuid7(), 'order.created', 'k' || (g %% 5000),
       convert_to('{"order_id": 123456, "note": "' || repeat('x', case when g %% %s = 0 then %s else 200 end) || '"}',
                  'UTF8'),
       'application/json'
  from generate_series(1, %s) g"""


def drained(postgres: PostgresServer, kafka: KafkaBroker, topic: str, events: int, large_every: int) -> float:
    """Drain a backlog in which every `large_every`th event is too large, and return the rate of the others."""
    kafka.create_topic(topic, partitions=PARTITIONS, config={"max.message.bytes": str(LIMIT)})
    offsets = EndOffsets(kafka.bootstrap, topic)
    with tempfile.TemporaryDirectory() as directory:
        tested = RelayUnderTest(postgres, kafka.bootstrap, topic, Path(directory))
        with psycopg.connect(tested.dsn, autocommit=True) as connection:
            connection.execute(FILL, (large_every, LIMIT, events))
            connection.execute("vacuum analyze outbox.event")
        wanted = events - events // large_every
        with tested.relay.start(wait=False):
            rate = wanted / offsets.seconds(wanted)
            dead = "select count(*) from outbox.delivery where state = 'dead'"
            until(lambda: tested.one(dead) == events - wanted, seconds=60, what="all oversized events are dead")
            print(f"{topic}: {rate:,.0f} events/s, {events - wanted} dead, {load()}", flush=True)
    return rate


def oversized(postgres: PostgresServer, events: int, pairs: int) -> bool:
    """Return True if one oversized record in a thousand reduces the rate by at most a fifth.

    The first drain is not counted, because a broker is slower after its start. The order alternates between pairs.
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
    """Return True if a backlog from an outage drains as fast as one that a relay finds at its start.

    In both cases the table is freshly written and the broker freshly started, because a vacuumed table and a warm
    broker are faster. The order alternates between pairs.
    """
    ratios: list[float] = []
    rows = 0
    for pair in range(pairs):
        with KafkaBroker() as kafka, tempfile.TemporaryDirectory() as directory:
            runs = [Backlog(postgres, kafka, Path(directory), events, seconds, pair, alive) for alive in (True, False)]
            for run in reversed(runs) if pair % 2 else runs:
                run.run()
        rows += runs[0].rows
        ratios.append(runs[0].rate / runs[1].rate)
        print(f"catch-up after an outage: ratio {ratios[-1]:.2f}", flush=True)
    print(f"catch-up after an outage: ratio {spread(ratios)}", flush=True)
    return rows == 0 and median(ratios) >= 0.9


@dataclass
class Backlog:
    """A backlog that grows while no broker answers.

    It is drained by a relay that was `alive` during the outage, or by one that starts together with the broker.
    """

    postgres: PostgresServer
    kafka: KafkaBroker
    directory: Path
    events: int
    seconds: float
    pair: int
    alive: bool
    rows: int = 0
    """Number of rows at the end of the outage."""
    rate: float = 0.0
    """Events per second, from the first arrival after the outage to the last."""

    def run(self) -> None:
        """Run the outage and the drain."""
        name = f"{'catch_up' if self.alive else 'drain'}_{self.pair}"
        self.kafka.create_topic(name, PARTITIONS)
        tested, offsets = (
            RelayUnderTest(self.postgres, self.kafka.bootstrap, name, self.directory),
            EndOffsets(self.kafka.bootstrap, name),
        )
        (self._lived_through if self.alive else self._started_afterwards)(tested, offsets)

    def _lived_through(self, tested: RelayUnderTest, offsets: EndOffsets) -> None:
        first = 1_000
        with tested.relay.start():
            fill(tested, first)
            offsets.seconds(first)
            self.kafka.stop()
            down = self._fill(tested)
            self.rows = tested.one("select count(*) from outbox.delivery")
            circuit = tested.one("select count(*) from outbox.sink where circuit <> 'closed'")
            print(
                f"down for {down:.0f} s with {self.events} events: {self.rows} rows, circuit open: {circuit}",
                flush=True,
            )
            memory, cpu = tested.memory_mib(), tested.cpu_seconds()
            self.kafka.start()
            self.rate = self.events / offsets.seconds(first + self.events, initial=first)
            self._print_rate("catch-up", tested.cpu_seconds() - cpu)
            print(f"relay {memory:.0f} MiB while it was down, then {tested.memory_mib():.0f} MiB", flush=True)

    def _started_afterwards(self, tested: RelayUnderTest, offsets: EndOffsets) -> None:
        self.kafka.stop()
        self._fill(tested)
        self.kafka.start()
        with tested.relay.start(wait=False):
            self.rate = self.events / offsets.seconds(self.events)
            self._print_rate("drain", tested.cpu_seconds())

    def _fill(self, tested: RelayUnderTest) -> float:
        """Emit in ten transactions, wait until `seconds` have passed and return the elapsed time."""
        began = time.monotonic()
        for _ in range(10):
            fill(tested, self.events // 10)
        time.sleep(max(0.0, self.seconds - (time.monotonic() - began)))
        return time.monotonic() - began

    def _print_rate(self, what: str, cpu: float) -> None:
        """Print the rate and the processor time per event."""
        each = cpu / self.events * 1e6
        print(f"{what} {self.rate:,.0f} events/s, {each:.1f} us of the relay an event, {load()}", flush=True)


def fill(tested: RelayUnderTest, events: int) -> None:
    """Emit events of the usual size in one transaction."""
    with psycopg.connect(tested.dsn, autocommit=True) as connection:
        connection.execute(FILL, (events + 1, 200, events))


def spread(ratios: list[float]) -> str:
    """Return the median and the range."""
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def load() -> str:
    """Return the load of the machine."""
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def main() -> int:
    """Run the requested checks. Return 1 if one fails."""
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
