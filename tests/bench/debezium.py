"""Compare a relay with Debezium's connector for PostgreSQL on a backlog, with the same server and broker.

usage: python -m tests.bench.debezium [--events 500000] [--rounds 3]

The connector reads a separate outbox table with its event router. It is stopped while the rows are inserted, and uses
larger batches than by default. Both take turns. Records are counted in the topic, from the first to the last.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack

from outbox_relay.workbench.bench.database import KEYS, PAYLOAD, BenchDatabase
from outbox_relay.workbench.bench.destinations import record_counter
from outbox_relay.workbench.bench.environment import BenchEnvironment, Options
from outbox_relay.workbench.bench.scenarios import steps
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
    worker.connect(database.name, _config(database, server, topic))
    worker.stop(database.name)
    for first in range(0, events, CHUNK):
        database.run(ROWS, KEYS, PAYLOAD, min(CHUNK, events - first))
    database.settle()
    worker.resume(database.name)
    progress = bench.track(count, events)
    worker.stop(database.name)
    worker.remove(database.name)
    database.run("select pg_drop_replication_slot(%s)", database.name)
    return progress.per_second


def _config(database: BenchDatabase, server: PostgresServer, topic: str) -> dict[str, str]:
    return {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": "127.0.0.1", "database.port": str(server.port), "database.user": "postgres",
        "database.password": "none", "database.dbname": database.name, "topic.prefix": database.name,
        "plugin.name": "pgoutput", "slot.name": database.name, "publication.name": database.name,
        "publication.autocreate.mode": "filtered", "snapshot.mode": "no_data",
        "table.include.list": "public.outboxevent", "key.converter": STRING, "value.converter": STRING,
        "transforms": "outbox", "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
        "transforms.outbox.route.topic.replacement": topic, **LARGER,
    }  # fmt: skip


def main(argv: list[str]) -> int:
    """Measure in turns and print the median of the ratios."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.debezium")
    parser.add_argument("--events", type=int, default=500_000)
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
        found: dict[str, list[float]] = {"relay": [], "connector": []}
        for number in range(arguments.rounds):
            for name in ("relay", "connector") if number % 2 else ("connector", "relay"):
                with bench.run(number):
                    ours = name == "relay"
                    rate = (
                        relay(bench, arguments.events) if ours else connector(bench, server, worker, arguments.events)
                    )
                found[name].append(rate)
                print(f"{name}: {rate:,.0f} events/s", flush=True)
    ratios = [own / theirs for own, theirs in zip(found["relay"], found["connector"], strict=True)]
    print(f"relay / connector: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
