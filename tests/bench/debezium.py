"""Compare a relay with Debezium's connector for PostgreSQL, with the same server and broker, in turns.

usage: python -m tests.bench.debezium [--events 500000] [--rate 1000] [--seconds 15] [--rounds 3]

The connector reads a separate outbox table with its event router. First both drain a backlog. The connector is stopped
while the rows are inserted, and uses larger batches than by default. Records are counted in the topic, from the first
to the last. Then both follow transactions of one event each, as the bare loop does; the connector asks for changes
every 5 ms instead. Latency is measured from before the insert to a consumer. `--events 0` measures only latency, and
`--rate 0` only the backlog.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from outbox_relay.workbench.bench.database import KEYS, PAYLOAD, BenchDatabase
from outbox_relay.workbench.bench.destinations import ConsumerProcess, record_counter
from outbox_relay.workbench.bench.environment import BenchEnvironment, Options
from outbox_relay.workbench.bench.figures import percentile
from outbox_relay.workbench.bench.scenarios import latency, steps
from outbox_relay.workbench.processes import PythonProcess
from outbox_relay.workbench.signals import Signals
from tests.support.connect import ConnectWorker
from tests.support.kafka import KafkaBroker
from tests.support.postgres import PostgresServer

CHUNK = 50_000
TABLE = """
create table outboxevent (
    id uuid primary key, aggregatetype varchar(255), aggregateid varchar(255), type varchar(255), payload text)
"""
ROWS = """
insert into outboxevent
select gen_random_uuid(), 'order', 'k' || g %% %s, 'order.created', %s from generate_series(1, %s) g
"""
STRING = "org.apache.kafka.connect.storage.StringConverter"
INSERT = f"""\\set k random(1, 5000)
insert into outboxevent values (gen_random_uuid(), 'order', 'k' || :k, 'order.created',
    jsonb_build_object('at', extract(epoch from clock_timestamp()), 'note', '{"x" * 200}')::text);
"""
FIRST_SECONDS = 60.0
"""Longest wait for the first event: a connector takes seconds to start."""
PROMPT = {"poll.interval.ms": "5"}
"""Settings for a short latency."""
LARGER = {
    "max.batch.size": "20480", "max.queue.size": "81920", "poll.interval.ms": "50",
    "producer.override.linger.ms": "10", "producer.override.batch.size": "1000000",
}  # fmt: skip
JAVA = ("java", "-XX:-UsePerfData", "-Xmx1g", "-XX:+UseSerialGC", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")
"""Options of a long-running worker; those of the tests favour a quick start."""


def relay(bench: BenchEnvironment, events: int) -> float:
    """Return the rate of a relay that starts on a backlog."""
    database = bench.new_database()
    database.fill(events, bench.check)
    database.settle()
    return steps.drain(bench, *steps.relay_to_kafka(bench, database), events).per_second


def connector(bench: BenchEnvironment, server: PostgresServer, worker: ConnectWorker, events: int) -> float:
    """Return the rate of a connector that is resumed on a backlog."""
    database, topic = bench.new_database(), bench.new_topic()
    count = record_counter(bench, topic)
    database.run(TABLE)
    worker.connect(database.name, _config(database, server, topic, LARGER))
    worker.stop(database.name)
    for first in range(0, events, CHUNK):
        database.run(ROWS, KEYS, PAYLOAD, min(CHUNK, events - first))
    database.settle()
    worker.resume(database.name)
    progress = bench.track(count, events)
    _remove(worker, database)
    return progress.per_second


def _remove(worker: ConnectWorker, database: BenchDatabase) -> None:
    worker.stop(database.name)
    worker.remove(database.name)
    database.run("select pg_drop_replication_slot(%s)", database.name)


class Latencies:
    """Latencies in seconds at a steady rate, of each follower of the same kind of transactions."""

    def __init__(self, bench: BenchEnvironment, server: PostgresServer, worker: ConnectWorker) -> None:
        self._bench = bench
        self._server = server
        self._worker = worker
        self.kinds: Mapping[str, Callable[[int, int], list[float]]] = {
            "bare loop": partial(self._of_a_process, latency.bare_loop),
            "relay": partial(self._of_a_process, latency.relay),
            "connector": self._of_the_connector,
        }

    def _of_a_process(self, follow: Callable[..., PythonProcess], rate: int, seconds: int) -> list[float]:
        bench = self._bench
        database, topic = bench.new_database(), bench.new_topic()
        consumer = ConsumerProcess(bench, topic)
        process = follow(bench, database, topic)
        times = self._emitted(database, consumer, latency.SCRIPT, rate, seconds)
        bench.stop(process)
        return times

    def _of_the_connector(self, rate: int, seconds: int) -> list[float]:
        bench = self._bench
        database, topic = bench.new_database(), bench.new_topic()
        consumer = ConsumerProcess(bench, topic)
        database.run(TABLE)
        self._worker.connect(database.name, _config(database, self._server, topic, PROMPT))
        times = self._emitted(database, consumer, INSERT, rate, seconds)
        _remove(self._worker, database)
        return times

    def _emitted(
        self, database: BenchDatabase, consumer: ConsumerProcess, script: str, rate: int, seconds: int
    ) -> list[float]:
        latency.emit(self._bench, database, script, 10, 1)
        self._bench.wait_until(consumer.count, FIRST_SECONDS, "the first event arrives")
        latency.emit(self._bench, database, script, rate, seconds)
        latency.arrive(self._bench, consumer, sys.maxsize, all_of_them=False)
        times = consumer.stop()
        return times[int(len(times) * latency.WARM_SHARE) :]


def _config(database: BenchDatabase, server: PostgresServer, topic: str, more: Mapping[str, str]) -> dict[str, str]:
    return {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": "127.0.0.1", "database.port": str(server.port), "database.user": "postgres",
        "database.password": "none", "database.dbname": database.name, "topic.prefix": database.name,
        "plugin.name": "pgoutput", "slot.name": database.name, "publication.name": database.name,
        "publication.autocreate.mode": "filtered", "snapshot.mode": "no_data",
        "table.include.list": "public.outboxevent", "key.converter": STRING, "value.converter": STRING,
        "transforms": "outbox", "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
        "transforms.outbox.route.topic.replacement": topic, **more,
    }  # fmt: skip


def main(argv: list[str]) -> int:
    """Measure in turns and print the median of the ratios."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.debezium")
    parser.add_argument("--events", type=int, default=500_000)
    parser.add_argument("--rate", type=int, default=1_000)
    parser.add_argument("--seconds", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args(argv)
    settings = {"wal_level": "logical", "max_wal_size": "4GB", "shared_buffers": "1GB"}
    with ExitStack() as stack:
        kafka = stack.enter_context(KafkaBroker())
        server = stack.enter_context(PostgresServer(settings))
        worker = stack.enter_context(ConnectWorker(kafka.bootstrap, JAVA))
        signals = stack.enter_context(Signals())
        options = Options(full=True, dsn=server.dsn(), bootstrap=kafka.bootstrap)
        bench = BenchEnvironment(stack, signals, options, lambda message: print(message, flush=True))
        bench.open()
        if arguments.events:
            drain(bench, server, worker, arguments.events, arguments.rounds)
        if arguments.rate:
            follow(bench, Latencies(bench, server, worker), arguments.rate, arguments.seconds, arguments.rounds)
    return 0


def drain(bench: BenchEnvironment, server: PostgresServer, worker: ConnectWorker, events: int, rounds: int) -> None:
    """Print the rates of both on a backlog, and the median of their ratios."""
    found: dict[str, list[float]] = {"relay": [], "connector": []}
    for number in range(rounds):
        for name in ("relay", "connector") if number % 2 else ("connector", "relay"):
            with bench.run(number):
                rate = relay(bench, events) if name == "relay" else connector(bench, server, worker, events)
            found[name].append(rate)
            print(f"{name}: {rate:,.0f} events/s", flush=True)
    print(f"drain, relay / connector: {_summary(found['relay'], found['connector'])}", flush=True)


def follow(bench: BenchEnvironment, latencies: Latencies, rate: int, seconds: int, rounds: int) -> None:
    """Print the percentiles of each follower, and the medians of their ratios."""
    shares = (0.5, 0.99)
    found: dict[str, list[list[float]]] = {name: [] for name in latencies.kinds}
    for number in range(rounds):
        for name in list(found)[:: -1 if number % 2 else 1]:
            with bench.run(number):
                times = latencies.kinds[name](rate, seconds)
            found[name].append([percentile(times, share) for share in shares])
            at = ", ".join(f"p{s * 100:.0f} {v * 1e3:.1f} ms" for s, v in zip(shares, found[name][-1], strict=True))
            print(f"{rate:,}/s, {name}: {at}", flush=True)
    for other in ("bare loop", "connector"):
        for n, share in enumerate(shares):
            own, theirs = ([values[n] for values in found[name]] for name in ("relay", other))
            print(f"p{share * 100:.0f}, relay / {other}: {_summary(own, theirs)}", flush=True)


def _summary(own: Sequence[float], theirs: Sequence[float]) -> str:
    ratios = [ours / other for ours, other in zip(own, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
