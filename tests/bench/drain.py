"""How fast a backlog drains to a real Kafka, beside the bare loop in the same run.

usage: python -m tests.bench.drain [--events 500000] [--runs 3]

Starts a PostgreSQL and a broker of its own. Both sides are measured alike, from outside: from the first record in the
topic to the last, by the ends of its partitions.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from confluent_kafka import Consumer, KafkaException, TopicPartition

from outbox_relay.migrate import migrate
from tests.integration.test_main_job import config
from tests.support.kafka import KafkaBroker
from tests.support.postgres import PostgresServer
from tests.support.service import RelayService

PARTITIONS = 6
FILL = """insert into outbox.event (uid, type, key, payload, content_type)
select outbox.uuid7(), 'order.created', 'k' || (g %% 5000),
       convert_to('{"order_id": 123456, "customer": "c-1234", "total": "12.34", "note": "' || repeat('x', 180) || '"}',
                  'UTF8'),
       'application/json'
  from generate_series(1, %s) g"""


class Ends:
    """How many records a topic holds."""

    def __init__(self, kafka: KafkaBroker, topic: str) -> None:
        kafka.create_topic(topic, partitions=PARTITIONS)
        self._partitions = [TopicPartition(topic, n) for n in range(PARTITIONS)]
        self._consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": "ends", "log_level": 0})

    def count(self) -> int:
        """The number now."""
        try:
            return sum(self._consumer.get_watermark_offsets(p, timeout=10)[1] for p in self._partitions)
        except KafkaException:
            return 0  # a partition without a leader yet

    def seconds(self, events: int) -> float:
        """Wait until `events` are there; seconds since the first one was."""
        limit = time.monotonic() + 600
        began = 0.0
        while (there := self.count()) < events:
            began = began or (time.monotonic() if there else 0.0)
            if time.monotonic() > limit:
                raise TimeoutError(f"{there} of {events} events arrived")
            time.sleep(0.005)
        return time.monotonic() - began


def measure_bare(dsn: str, kafka: KafkaBroker, topic: str, events: int) -> float:
    """Events per second of the bare loop."""
    ends = Ends(kafka, topic)
    command = [sys.executable, "-m", "tests.bench.bare_loop", dsn, kafka.bootstrap, topic]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        rate = events / ends.seconds(events)
        process.wait(60)
    return rate


def measure_relay(dsn: str, kafka: KafkaBroker, topic: str, events: int) -> float:
    """Events per second of the relay, started on a database that has the backlog and no sink."""
    ends = Ends(kafka, topic)
    with tempfile.TemporaryDirectory() as directory:
        text = config(dsn, kafka, topic)
        relay = RelayService(Path(directory), text).start(wait=False)
        try:
            rate = events / ends.seconds(events)
            relay.stop()
        finally:
            if relay.process.poll() is None:
                relay.kill()
    return rate


def main() -> None:
    """Run and print."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--events", type=int, default=500_000)
    arguments.add_argument("--runs", type=int, default=3)
    options = arguments.parse_args()
    with PostgresServer(settings={"shared_buffers": "1GB", "max_wal_size": "8GB"}) as postgres, KafkaBroker() as kafka:
        ratios: list[float] = []
        for run in range(options.runs):
            postgres.create_database(f"bench{run}")
            dsn = postgres.dsn(f"bench{run}")
            migrate(dsn)
            with postgres.connect(f"bench{run}") as connection:
                connection.execute(FILL, (options.events,))
                connection.execute("vacuum analyze outbox.event")
                connection.execute("checkpoint")
            bare = measure_bare(dsn, kafka, f"bare{run}", options.events)
            relay = measure_relay(dsn, kafka, f"relay{run}", options.events)
            ratios.append(relay / bare)
            print(f"bare loop {bare:,.0f} events/s, relay {relay:,.0f} events/s, ratio {relay / bare:.2f}", flush=True)
        print(f"median ratio {statistics.median(ratios):.2f} of {options.runs} runs, {options.events} events each")


if __name__ == "__main__":
    main()
