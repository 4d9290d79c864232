"""Everything through Debian's PgBouncer in transaction mode: relays, emits, shares, hand-over, wake-up and polling."""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import psycopg
import pytest

from outbox_relay import outbox
from outbox_relay.postgres.listener import LOCK
from tests.support.command import inside
from tests.support.database import Database, query
from tests.support.deliveries import has
from tests.support.kafka import KafkaBroker
from tests.support.kafka.drained import drained
from tests.support.memory_sink import MemorySink
from tests.support.pgbouncer import PgBouncer
from tests.support.postgres import PostgresServer
from tests.support.relay_config import kafka_config
from tests.support.relay_harness import running, spec
from tests.support.service import RelayService
from tests.support.shop import Writers
from tests.support.wait import until

ASLEEP = "select 1 from pg_locks where locktype = 'advisory' and classid = %s and objid = %s and mode = 'ExclusiveLock'"
EVENTS = 3000


@pytest.fixture(scope="module")
def pooler(postgres: PostgresServer) -> Generator[PgBouncer]:
    """Five connections to the server for everybody together."""
    with PgBouncer(postgres) as pooler:
        yield pooler


def text(database: Database, pooler: PgBouncer, kafka: KafkaBroker, topic: str, *, listen: bool) -> str:
    """Return the settings of a relay behind the pooler, with or without a direct connection for its wake-up."""
    lines = 'pooler = "transaction"\n' + (f'listen_dsn = "{database.dsn}"\n' if listen else "")
    found = kafka_config(pooler.dsn(database.name), kafka, topic, lease_seconds=6)
    return found.replace("[relay]", f"{lines}[relay]")


def shards(*relays: RelayService) -> list[int]:
    """Return the number of shards that each of them owns."""
    bodies = [relay.ask("/readyz")[1] for relay in relays]
    return [body["sinks"]["events"]["shards"] if body else 0 for body in bodies]


def backends(database: Database) -> int:
    """Return the number of the server's sessions on this database, without this one."""
    [(count,)] = query(
        database,
        """select count(*) from pg_stat_activity
            where datname = %s and backend_type = 'client backend' and pid <> pg_backend_pid()""",
        database.name,
    )
    return count


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("listen", [True, False], ids=["listen_dsn", "polling"])
def test_relays_share_and_hand_over_through_a_small_pool(
    database: Database, pooler: PgBouncer, kafka: KafkaBroker, topic: str, tmp_path: Path, *, listen: bool
) -> None:
    """Three relays and six writers over five connections: even shares, nothing lost, reordered or twice."""
    kafka.create_topic(topic, partitions=3)
    writers = Writers(pooler.dsn(database.name), count=6, keys=2000, keys_per_transaction=20)
    writers.prepare()
    relay_text = text(database, pooler, kafka, topic, listen=listen)
    with RelayService(tmp_path, relay_text, "one") as one, RelayService(tmp_path, relay_text, "two") as two:
        with RelayService(tmp_path, relay_text, "three") as three:
            until(lambda: sorted(shards(one, two, three)) == [21, 21, 22], seconds=40, what="the shards are even")
            writers.start()
            until(lambda: writers.total() > EVENTS / 2, seconds=90, what="half is committed")
            assert three.stop() == 0
        until(lambda: shards(one, two) == [32, 32], seconds=40, what="the shards are even again")
        until(lambda: writers.total() > EVENTS, seconds=90, what="everything is committed")
        writers.stop()
        assert backends(database) <= 5 + 2 * listen
        report = drained(kafka, topic, writers.committed(), seconds=60)
        sys.stdout.write(f"{report}\n")
        assert one.stop() == two.stop() == 0
    assert report.sound
    assert report.duplicates == 0


def test_an_emit_through_the_pooler_wakes_a_relay(database: Database, pooler: PgBouncer) -> None:
    """The try of the sleepers' lock leaves nothing behind in a session that serves others next."""
    sink, heard = MemorySink(), database.connect(autocommit=True)
    heard.execute("listen outbox")
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        has(database, ASLEEP, *LOCK)
        with psycopg.connect(pooler.dsn(database.name)) as connection:
            outbox.emit(connection, "test.event", 1, key="a")
        until(lambda: len(sink.delivered) == 1, seconds=10, what="it is delivered")
        assert list(heard.notifies(timeout=10, stop_after=1)), "nobody was notified"
    heard.close()
    left = query(database, "select count(*) from pg_locks where locktype = 'advisory' and classid = %s", LOCK[0])
    assert left == [(0,)]


@pytest.mark.parametrize("ignored", ["", "options"], ids=["refused by the pooler", "ignored by the pooler"])
def test_a_pooler_that_is_not_named_is_refused(database: Database, ignored: str) -> None:
    """Goes red when a relay runs on shared sessions: prepared statements of others answer, and events come twice."""
    with PgBouncer(database.server, {"ignore_startup_parameters": ignored} if ignored else {}) as unnamed:
        ended = inside("status", "--dsn", unnamed.dsn(database.name))
        assert ended.code == 2
        assert 'set database.pooler = "transaction"' in ended.err
