"""The process: how it starts when things are missing, what it survives, and how it stops."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psycopg
import pytest

from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database, query
from tests.support.kafka import KafkaBroker
from tests.support.postgres import PostgresServer
from tests.support.relay_config import kafka_config
from tests.support.relay_harness import CountingStore
from tests.support.service import RelayService
from tests.support.wait import until

SECRET = "canary-7f3a"


def ended(service: RelayService, seconds: float = 30) -> int:
    """Wait until the process has ended by itself; its exit code."""
    service.start(wait=False)
    return service.ended(seconds)


def said(service: RelayService) -> str:
    """Everything it wrote."""
    return service.log.read_text()


def emit(database: Database, kind: str, key: str = "a") -> None:
    """Emit one event."""
    with database.connect() as connection:
        connection.execute("select outbox.emit(%s, '1', key => %s)", (kind, key))


def types_in(kafka: KafkaBroker, topic: str) -> list[str]:
    """Return the types of the records of a topic."""
    return [str(record.headers["type"], "ascii") for record in kafka.read_all(topic) if record.headers["type"]]


def test_it_starts_before_its_database_and_is_ready_when_that_comes(
    own_postgres: PostgresServer, kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    own_postgres.create_database("shop")
    migrate(own_postgres.dsn("shop"))
    own_postgres.stop()
    with RelayService(tmp_path, kafka_config(own_postgres.dsn("shop"), kafka, topic)).start(wait=False) as relay:
        until(lambda: relay.ask("/livez")[0] == 200, seconds=20, what="it lives")
        until(lambda: "cannot be reached yet" in said(relay), seconds=20, what="it says so")
        assert relay.ask("/readyz")[0] == 503
        own_postgres.start()
        until(lambda: relay.ready, seconds=30, what="it is ready")
        assert relay.stop() == 0


@pytest.mark.parametrize(
    "fault", ["schema", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("password", "newer"))]
)
def test_what_waiting_does_not_mend_ends_it_with_one_line_and_code_2(
    own_postgres: PostgresServer, kafka: KafkaBroker, topic: str, tmp_path: Path, fault: str
) -> None:
    own_postgres.create_database("shop")
    dsn = own_postgres.dsn("shop")
    if fault == "password":
        with own_postgres.connect("shop") as connection:
            connection.execute("create role guest login password 'right'")
        own_postgres.require_password("guest")
        dsn = f"postgresql://guest:{SECRET}@127.0.0.1:{own_postgres.port}/shop"
    elif fault == "newer":
        migrate(dsn)
        with own_postgres.connect("shop") as connection:
            connection.execute("update outbox.meta set schema_version = 99, min_relay = 99")
    relay = RelayService(tmp_path, kafka_config(dsn, kafka, topic))
    assert ended(relay) == 2
    text = said(relay)
    expected = {
        "password": "password",
        "schema": "outbox-relay migrate",
        "newer": "99",
    }
    assert expected[fault] in text
    assert "Traceback" not in text
    assert SECRET not in text
    assert [line["level"] for line in relay.lines()].count("critical") == 1
    assert len(relay.lines()) == len(text.splitlines()), "every line is JSON"


def test_it_stops_within_its_limit_while_the_destination_is_down(
    database: Database, kafka: KafkaBroker, tmp_path: Path
) -> None:
    """Events in hand are dropped, the shards are released: the next relay begins at the stored positions."""
    text = kafka_config(database.dsn, kafka, "nowhere").replace(kafka.bootstrap, "127.0.0.1:1")
    with RelayService(tmp_path, text) as relay:
        emit(database, "order.made")
        is_open = "select 1 from outbox.sink where circuit <> 'closed'"
        until(lambda: query(database, is_open), seconds=30, what="the circuit is open")
        assert relay.ready, "Kafka down is no reason to restart a relay"
        began = time.monotonic()
        assert relay.stop() == 0
        assert time.monotonic() - began < 25
    assert query(database, "select count(*) from outbox.shard where owner is not null") == [(0,)]
    assert query(database, "select count(*) from outbox.delivery") == [(0,)]


def test_a_second_signal_ends_it_at_once(database: Database, kafka: KafkaBroker, topic: str, tmp_path: Path) -> None:
    kafka.create_topic(topic, partitions=1)
    with RelayService(tmp_path, kafka_config(database.dsn, kafka, topic, lease_seconds=60)) as relay:
        emit(database, "order.made")
        until(lambda: kafka.read_all(topic), seconds=30, what="it delivers")
        with kafka.frozen():
            emit(database, "order.made")
            until(lambda: _in_hand(relay), seconds=20, what="an event is under way")
            relay.send(signal.SIGTERM)
            until(lambda: "stopping" in said(relay), seconds=20, what="it is stopping")
            with pytest.raises(subprocess.TimeoutExpired):
                relay.process.wait(1)
            relay.send(signal.SIGTERM)
            assert relay.ended(10) == 1
    assert "at once" in said(relay)


def _in_hand(relay: RelayService) -> bool:
    _, body = relay.ask("/readyz")
    return bool(body) and body["sinks"]["events"]["in_hand"] > 0


def test_a_commit_that_hangs_ends_at_its_deadline(own_postgres: PostgresServer) -> None:
    """No server setting bounds a COMMIT that waits for a synchronous standby: the caller cancels the wait."""
    own_postgres.create_database("shop")
    migrate(own_postgres.dsn("shop"))
    database = Database(own_postgres, "shop")
    store = CountingStore(database.dsn, call_seconds=1.0)
    store.open()
    assert store.value("make_partitions") == 0
    for statement in ("alter system set synchronous_standby_names = 'nobody'", "select pg_reload_conf()"):
        query_no_rows(database, statement)
    until(
        lambda: query(database, "select 1 from pg_settings where name = 'synchronous_standby_names' and setting <> ''"),
        seconds=10,
        what="the setting holds",
    )
    tick = (store.tick()).tick
    began = time.monotonic()
    assert store.register_sinks([("s", ["*"], None)], tick)
    assert 0.9 < time.monotonic() - began < 5.0
    query_no_rows(database, "alter system reset synchronous_standby_names")
    query_no_rows(database, "select pg_reload_conf()")
    store.close()


def query_no_rows(database: Database, statement: str) -> None:
    """Run a statement for what it does."""
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        connection.execute(statement.encode())
