"""The main job on real parts: writers and pgbench emit, relays deliver to Kafka, servers and relays die on the way."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.kafka import KafkaBroker
from tests.support.kafka.drained import drained
from tests.support.postgres import PostgresServer
from tests.support.relay_config import kafka_config
from tests.support.relay_harness import LOST
from tests.support.service import RelayService
from tests.support.shop import Writers
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
