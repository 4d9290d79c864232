"""The main job on real parts: writers and pgbench emit, relays deliver to Kafka, servers and relays die on the way."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.database import Database
from tests.support.kafka import KafkaBroker
from tests.support.kafka.drained import drained
from tests.support.postgres import PostgresServer
from tests.support.relay_config import kafka_config
from tests.support.relay_harness import LOST
from tests.support.service import RelayService
from tests.support.shop import PGBENCH, Writers
from tests.support.wait import until

EVENTS = int(os.environ.get("OUTBOX_TEST_EVENTS", "4000"))
"""`make proof` runs 200,000."""


@pytest.mark.timeout(600)
def test_nothing_is_lost_or_reordered_while_a_relay_is_killed_and_the_database_restarts(
    own_postgres: PostgresServer, kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    """Events of 8 writers through two relays; one is killed with SIGKILL, PostgreSQL crashes and restarts."""
    from outbox_relay.postgres.migrations import migrate

    kafka.create_topic(topic, partitions=6)
    own_postgres.create_database("shop")
    dsn = own_postgres.dsn("shop")
    migrate(dsn)
    writers = Writers(dsn)
    writers.prepare()
    text = kafka_config(dsn, kafka, topic, lease_seconds=3)
    with RelayService(tmp_path, text, "one") as one, RelayService(tmp_path, text, "two", expects=LOST):
        writers.start()
        until(lambda: writers.total() > EVENTS * 0.3, seconds=200, what="a third is committed")
        one.kill()
        until(lambda: writers.total() > EVENTS * 0.5, seconds=200, what="half is committed")
        with RelayService(tmp_path, text, "three", expects=LOST) as three:
            own_postgres.restart("immediate")
            until(lambda: _survives(writers) > EVENTS, seconds=300, what="everything is committed")
            writers.stop()
            committed = writers.committed()
            began = time.monotonic()
            report = drained(kafka, topic, committed, seconds=120)
            print(
                f"\n{report}, rolled back {writers.rolled_back}, drained {time.monotonic() - began:.1f} s after the end"
            )
            assert report.sound
            assert report.committed > EVENTS
            assert three.stop() == 0


def _survives(writers: Writers) -> int:
    """Return the number of committed events; 0 while the server restarts."""
    import psycopg

    try:
        return writers.total()
    except psycopg.OperationalError:
        return 0


@pytest.mark.slow
def test_events_of_pgbench_arrive_in_order_per_key(
    database: Database, kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    kafka.create_topic(topic, partitions=6)
    writers = Writers(database.dsn, keys=100)
    writers.prepare()
    with RelayService(tmp_path, kafka_config(database.dsn, kafka, topic)) as relay:
        database.pgbench(PGBENCH.format(keys=100), transactions=400, clients=8)
        report = drained(kafka, topic, writers.committed(), seconds=60)
        assert report.committed == 3200
        assert report.sound
        assert report.duplicates == 0
        assert relay.stop() == 0


@pytest.mark.slow
def test_two_relays_share_the_work_and_neither_repeats_the_other(
    database: Database, kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    """Every shard has one owner, both relays have shards; a clean stop hands over without a duplicate."""
    kafka.create_topic(topic, partitions=6)
    writers = Writers(database.dsn, count=2, keys=200, keys_per_transaction=20)
    writers.prepare()
    text = kafka_config(database.dsn, kafka, topic)
    with RelayService(tmp_path, text, "one") as one:
        with RelayService(tmp_path, text, "two") as two:
            until(lambda: _shards(one) == _shards(two) == 32, seconds=30, what="the shards are shared evenly")
            writers.start()
            until(lambda: writers.total() > 2000, seconds=60, what="events are emitted")
            assert two.stop() == 0
            until(lambda: writers.total() > 4000, seconds=60, what="more events are emitted")
            writers.stop()
        report = drained(kafka, topic, writers.committed(), seconds=60)
    assert report.sound
    assert report.duplicates == 0


def _shards(relay: RelayService) -> int:
    _, body = relay.ask("/readyz")
    return body["sinks"]["events"]["shards"] if body else 0
