"""A backlog drained by a relay and by Debezium's connector for PostgreSQL, with the same server and the same broker.

usage: python -m tests.bench.debezium [--events 500000] [--rounds 3]

The connector reads an outbox table of its own through its event router; it was stopped while the rows were inserted,
and has larger batches than by default. Both take turns. Counted in the topic, from the first record to the last.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack

from outbox_relay.workbench.bench.database import KEYS, PAYLOAD, Database
from outbox_relay.workbench.bench.ends import topic_count
from outbox_relay.workbench.bench.place import Options, Place
from outbox_relay.workbench.bench.scenarios import draining
from outbox_relay.workbench.demo.signals import Signals
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
"""As a worker is run that stays: the tests' compiles for a short life."""


def relay(place: Place, events: int) -> float:
    """Events per second of a relay that starts on a backlog."""
    base = place.database()
    base.fill(events, place.check)
    base.settle()
    return draining.drain(place, *draining.to_kafka(place, base), events).per_second


def connector(place: Place, server: PostgresServer, worker: ConnectWorker, events: int) -> float:
    """Events per second of a connector that is started again on a backlog."""
    base, topic = place.database(), place.topic()
    count = topic_count(place, topic)
    base.run(TABLE)
    worker.connect(base.name, _config(base, server, topic))
    worker.stop(base.name)
    for first in range(0, events, CHUNK):
        base.run(ROWS, KEYS, PAYLOAD, min(CHUNK, events - first))
    base.settle()
    worker.resume(base.name)
    course = place.course(count, events)
    worker.stop(base.name)
    worker.remove(base.name)
    base.run("select pg_drop_replication_slot(%s)", base.name)
    return course.per_second


def _config(base: Database, server: PostgresServer, topic: str) -> dict[str, str]:
    return {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": "127.0.0.1", "database.port": str(server.port), "database.user": "postgres",
        "database.password": "none", "database.dbname": base.name, "topic.prefix": base.name,
        "plugin.name": "pgoutput", "slot.name": base.name, "publication.name": base.name,
        "publication.autocreate.mode": "filtered", "snapshot.mode": "no_data",
        "table.include.list": "public.outboxevent", "key.converter": STRING, "value.converter": STRING,
        "transforms": "outbox", "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
        "transforms.outbox.route.topic.replacement": topic, **LARGER,
    }  # fmt: skip


def main(argv: list[str]) -> int:
    """Measure in turns, and print the medians and their ratio."""
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
        place = Place(stack, signals, options, lambda news: print(news, flush=True))
        place.open()
        found: dict[str, list[float]] = {"relay": [], "connector": []}
        for number in range(arguments.rounds):
            for name in ("relay", "connector") if number % 2 else ("connector", "relay"):
                with place.run(number):
                    ours = name == "relay"
                    rate = (
                        relay(place, arguments.events) if ours else connector(place, server, worker, arguments.events)
                    )
                found[name].append(rate)
                print(f"{name}: {rate:,.0f} events/s", flush=True)
    ratios = [own / theirs for own, theirs in zip(found["relay"], found["connector"], strict=True)]
    print(f"relay / connector: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
