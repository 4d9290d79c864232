"""A schema registry that lacks a schema for a while, or for good, or gives no answers: who waits, and who is dead."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest

from outbox_relay import outbox
from tests.support.apicurio import JSON_SCHEMA
from tests.support.database import Database
from tests.support.kafka import KafkaBroker
from tests.support.registry_server import RegistryServer
from tests.support.service import RelayService
from tests.support.wait import until

CONFIG = """
[database]
dsn = "{dsn}"
[sinks.events]
type = "kafka"
topic = "{topic}"
producer = {{ "bootstrap.servers" = "{bootstrap}" }}
[sinks.events.circuit]
probe_seconds = 0.2
probe_max_seconds = 1
[sinks.events.registry]
url = "{url}"
format = "json"
missing_seconds = {missing}
[routes]
"*" = ["events"]
"""
SCHEMA = {**JSON_SCHEMA, "title": "Order"}


@pytest.fixture
def registry() -> Generator[RegistryServer]:
    with RegistryServer() as running:
        yield running


def config(database: Database, kafka: KafkaBroker, topic: str, registry: RegistryServer, missing: int = 600) -> str:
    return CONFIG.format(dsn=database.dsn, topic=topic, bootstrap=kafka.bootstrap, url=registry.url, missing=missing)


def emit(database: Database, event_type: str, numbers: range) -> None:
    events = [outbox.Event(event_type, {"n": n}, key=f"{event_type}{n % 5}") for n in numbers]
    with psycopg.connect(database.dsn) as connection:
        outbox.emit_many(connection, events)


def one(database: Database, statement: LiteralString) -> Any:
    with psycopg.connect(database.dsn) as connection:
        row = connection.execute(statement).fetchone()
    return row[0] if row else None


def arrived(kafka: KafkaBroker, topic: str) -> list[int]:
    """Return the numbers in a topic, as often as they arrived. The first five bytes have the id of the schema."""
    return [json.loads((record.value or b"")[5:])["n"] for record in kafka.read_all(topic)]


def in_order(numbers: list[int]) -> bool:
    """Return True if the numbers of each key rise."""
    return all([n for n in numbers if n % 5 == key] == sorted(n for n in numbers if n % 5 == key) for key in range(5))


def test_events_wait_in_order_while_the_registry_does_not_know_the_only_subject(
    database: Database, kafka: KafkaBroker, topic: str, registry: RegistryServer, tmp_path: Path
) -> None:
    kafka.create_topic(topic)
    with RelayService(tmp_path, config(database, kafka, topic, registry)) as service:
        emit(database, "order.created", range(1000))
        said = "select last_error from outbox.sink where circuit = 'open'"
        until(lambda: one(database, said), seconds=60, what="the sink says so")
        assert one(database, said) == (
            f"subject {topic}-value: the schema registry has no such subject, version or schema "
            "(HTTP status 404, code 40401)"
        )
        emit(database, "order.created", range(1000, 1500))
        assert one(database, "select count(*) from outbox.delivery") == 0
        registry.register(f"{topic}-value", SCHEMA, schemaType="JSON")
        until(lambda: len(arrived(kafka, topic)) >= 1500, seconds=120, what="all events arrive")
        closed = "select 1 from outbox.sink where circuit = 'closed'"
        until(lambda: one(database, closed), seconds=60, what="the trouble is over")
    numbers = arrived(kafka, topic)
    assert sorted(numbers) == list(range(1500))
    assert in_order(numbers)
    assert one(database, "select count(*) from outbox.delivery") == 0
    assert service.log.read_text().count("circuit.opened") == 1


def test_events_of_a_missing_subject_wait_as_rows_until_they_are_dead_and_others_flow(
    database: Database, kafka: KafkaBroker, topic: str, registry: RegistryServer, tmp_path: Path
) -> None:
    for name in ("known", "late", "never"):
        kafka.create_topic(f"{topic}.{name}")
    registry.register(f"{topic}.known-value", SCHEMA, schemaType="JSON")
    with RelayService(tmp_path, config(database, kafka, f"{topic}.{{type}}", registry, missing=8)):
        for name in ("late", "never", "known"):
            emit(database, name, range(50))
        until(lambda: len(arrived(kafka, f"{topic}.known")) == 50, seconds=60, what="the others arrive")
        reasons = "select last_error from outbox.sink where last_error like '%.late-value%.never-value%'"
        until(lambda: one(database, reasons), seconds=60, what="the sink names the subjects")
        assert one(database, "select circuit from outbox.sink") == "closed"
        assert one(database, "select sum(attempts) from outbox.delivery") == 0
        registry.register(f"{topic}.late-value", SCHEMA, schemaType="JSON")
        until(lambda: len(arrived(kafka, f"{topic}.late")) == 50, seconds=60, what="those of the late schema arrive")
        assert in_order(arrived(kafka, f"{topic}.late"))
        dead = "select count(*) from outbox.delivery where state = 'dead'"
        until(lambda: one(database, dead) == 50, seconds=120, what="those without a schema are dead")
        assert one(database, "select count(distinct last_error) from outbox.delivery") == 1
        reason = one(database, "select last_error from outbox.delivery")
        assert reason.startswith(f"subject {topic}.never-value: the schema registry has no such subject")
        assert reason.endswith(", for 8 s")
    assert arrived(kafka, f"{topic}.never") == []


def test_schema_that_cannot_be_used_is_blamed_and_no_event_dies_until_it_is_mended(
    database: Database, kafka: KafkaBroker, topic: str, registry: RegistryServer, tmp_path: Path
) -> None:
    kafka.create_topic(topic)
    registry.register(f"{topic}-value", {"type": "objekt"}, schemaType="JSON")
    with RelayService(tmp_path, config(database, kafka, topic, registry)):
        emit(database, "order.created", range(20))
        until(
            lambda: (
                "has an unusable schema (SchemaError)" in (one(database, "select last_error from outbox.sink") or "")
            ),
            seconds=60,
            what="the sink names the fault",
        )
        registry.register(f"{topic}-value", SCHEMA, schemaType="JSON", version=2)
        until(lambda: len(arrived(kafka, topic)) == 20, seconds=60, what="all events arrive")
    assert one(database, "select count(*) from outbox.delivery") == 0


@pytest.mark.parametrize("status", [401])
def test_registry_that_refuses_everybody_costs_no_attempt_and_misfits_are_dead_at_once(
    status: int, database: Database, kafka: KafkaBroker, topic: str, registry: RegistryServer, tmp_path: Path
) -> None:
    kafka.create_topic(topic)
    registry.register(f"{topic}-value", SCHEMA, schemaType="JSON")
    registry.status, registry.body = status, {"error_code": status * 100 + 1, "message": "a-secret-of-the-registry"}
    with RelayService(tmp_path, config(database, kafka, topic, registry)) as service:
        emit(database, "order.created", range(10))
        with psycopg.connect(database.dsn) as connection:
            outbox.emit(connection, "order.created", {"n": "a-secret-of-the-event"}, key="x")
        said = "select last_error from outbox.sink where circuit = 'open'"
        until(lambda: one(database, said), seconds=60, what="the circuit opens")
        assert one(database, said) == f"schema registry {registry.url}: HTTP status {status}, code {status * 100 + 1}"
        assert one(database, "select count(*) from outbox.delivery") == 0
        registry.status = None
        until(lambda: len(arrived(kafka, topic)) == 10, seconds=60, what="all events arrive")
        dead = "select last_error from outbox.delivery where state = 'dead'"
        until(lambda: one(database, dead), seconds=60, what="the misfit is dead")
    assert one(database, dead) == (
        f"cannot be made a Kafka record: does not fit the schema of subject {topic}-value, version 1: "
        "properties/n/type: SerializationError"
    )
    assert "a-secret-of" not in service.log.read_text()
