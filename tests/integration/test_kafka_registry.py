"""A Kafka sink with a schema registry: Apicurio, a real broker, and confluent's deserializers as the consumers."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any, LiteralString, cast

import psycopg
import pytest
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict
from google.protobuf.message_factory import GetMessageClass

from outbox_relay import outbox
from outbox_relay.domain.outcomes import DELIVERED, Refused
from outbox_relay.settings import KafkaSettings, load
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.kafka import KafkaSink, kafka_sink
from tests.support import installed
from tests.support.apicurio import AVRO, JSON_SCHEMA, NoRegistry, SchemaRegistry, protobuf
from tests.support.database import Database
from tests.support.kafka import KafkaBroker
from tests.support.kafka.delivering import deliver
from tests.support.service import RelayService
from tests.support.wait import until

# The registry is a program of 270 MB that starts in ten seconds.
pytestmark = pytest.mark.slow

SECRET = "a-secret-of-the-event"
SCHEMAS: dict[str, Any] = {"avro": AVRO, "json": JSON_SCHEMA, "protobuf": protobuf()}
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
{registry}
[routes]
"*" = ["events"]
"""
PLAIN = """
[sinks.plain]
type = "kafka"
topic = "{topic}.plain"
producer = {{ "bootstrap.servers" = "{bootstrap}" }}
"""


@pytest.fixture(scope="module")
def registry() -> Generator[SchemaRegistry]:
    try:
        made = SchemaRegistry()
    except NoRegistry as reason:
        installed.missing(str(reason))
    with made as running:
        yield running


def config(kafka: KafkaBroker, topic: str, url: str, registry: str, dsn: str = "postgresql://x@localhost/x") -> str:
    return CONFIG.format(dsn=dsn, topic=topic, bootstrap=kafka.bootstrap, url=url, registry=registry)


def sink(directory: Path, text: str) -> KafkaSink:
    file = directory / "relay.toml"
    file.write_text(text)
    settings = load(file, {}).sinks["events"]
    assert isinstance(settings, KafkaSettings)
    return kafka_sink("events", settings, 15.0)


def read(form: str, registry: SchemaRegistry, topic: str, value: bytes) -> dict[str, Any]:
    """Return a value as a consumer with confluent's deserializer gets it."""
    rules, context = {"subject.name.strategy.type": "TOPIC"}, SerializationContext(topic, MessageField.VALUE)
    with registry.client() as client:
        if form == "avro":
            return cast("Any", AvroDeserializer)(client, conf=rules)(value, context)
        if form == "json":
            return cast("Any", JSONDeserializer)(None, schema_registry_client=client, conf=rules)(value, context)
        pool: Any = DescriptorPool()
        pool.Add(protobuf())
        kind: Any = cast("Any", GetMessageClass)(pool.FindMessageTypeByName("shop.Order"))
        return MessageToDict(cast("Any", ProtobufDeserializer)(kind, rules, client)(value, context))


@pytest.mark.parametrize("form", ["avro", "json", "protobuf"])
def test_consumers_read_what_fits_and_what_does_not_is_refused_between_its_neighbours(
    form: str, registry: SchemaRegistry, kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    kafka.create_topic(topic)
    registry.register(f"{topic}-value", form.upper(), SCHEMAS[form])
    more = 'records = { "order.created" = "shop.Order" }' if form == "protobuf" else ""
    opened = sink(tmp_path, config(kafka, topic, registry.url, f'format = "{form}"\n{more}'))
    opened.open()
    try:
        assert opened.check() is None
        events = [
            an_event("k", b'{"n": 1}', '{"traceparent": "00-1-2-03"}'),
            an_event("k", f'{{"n": "{SECRET}"}}'.encode()),
            an_event("k", b'{"n": 2, "note": "x"}'),
        ]
        verdicts = deliver(opened, events)
    finally:
        opened.close()
    assert [verdicts[0], verdicts[2]] == [DELIVERED, DELIVERED]
    assert isinstance(verdicts[1], Refused)
    assert f"does not fit the schema of subject {topic}-value, version 1: " in verdicts[1].reason
    assert SECRET not in verdicts[1].reason
    records = kafka.read_all(topic)
    values = [read(form, registry, topic, record.value or b"") for record in records]
    assert values == [{"n": 1, **({"note": None} if form == "avro" else {})}, {"n": 2, "note": "x"}]
    types = {"avro": "application/avro", "json": "application/json", "protobuf": "application/protobuf"}
    assert [(name, (value or b"").decode()) for name, value in records[0].header_list] == [
        ("id", events[0].uid),
        ("type", "order.created"),
        ("content-type", types[form]),
        ("traceparent", "00-1-2-03"),
    ]


def numbers(kafka: KafkaBroker, registry: SchemaRegistry, topic: str) -> dict[bytes | None, list[int]]:
    """Return the first deliveries of each key, in order."""
    found: dict[bytes | None, dict[int, None]] = {}
    context = SerializationContext(topic, MessageField.VALUE)
    with registry.client() as client:
        reader = cast("Any", AvroDeserializer)(client, conf={"subject.name.strategy.type": "TOPIC"})
        for record in kafka.read_all(topic):
            found.setdefault(record.key, {})[reader(record.value, context)["n"]] = None
    return {key: list(each) for key, each in found.items()}


UNSETTLED = """
select sum(b.events)::integer
  from unnest(array['events', 'plain']) s, outbox_internal.backlog(s, array['order.created'], 10000, 5) b
"""


def test_registry_that_is_killed_loses_nothing_and_keeps_the_order(
    database: Database, kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    """Events of known schemas flow; those of others wait, without an attempt, and come in order when it is back.

    It waits for ten seconds in which a relay that was killed keeps its leases, and starts the registry twice.
    """

    def emit(first: int) -> None:
        payloads = ({"n": n} if n % 10 else {"n": SECRET} for n in range(first, first + 100))
        events = [outbox.Event("order.created", each, key=f"k{n % 5}") for n, each in enumerate(payloads)]
        with psycopg.connect(database.dsn) as connection:
            outbox.emit_many(connection, events)

    def count(wanted: LiteralString) -> int:
        with psycopg.connect(database.dsn) as connection:
            row = connection.execute(wanted).fetchone()
        return row[0] if row else 0

    kafka.create_topic(topic)
    kafka.create_topic(f"{topic}.plain")
    with SchemaRegistry() as registry:
        registry.register(f"{topic}-value", "AVRO", AVRO)
        text = config(kafka, topic, registry.url, 'format = "avro"', database.dsn)
        text = text.replace('["events"]', '["events", "plain"]') + PLAIN.format(topic=topic, bootstrap=kafka.bootstrap)
        with RelayService(tmp_path, text) as service:
            emit(0)
            until(lambda: sum(map(len, numbers(kafka, registry, topic).values())) == 90, seconds=60, what="90 arrive")
            registry.kill()
            emit(100)
            dead = "select count(*) from outbox.delivery where state = 'dead'"
            until(lambda: count(dead) == 20, seconds=60, what="known schemas are used further")
            # A record that is not settled when its relay is killed comes again.
            until(lambda: count(UNSETTLED) == 0, seconds=60, what="everything is settled")
            service.kill()
            emit(200)
            service.start()
            opened = "select count(*) from outbox.sink where circuit = 'open' and last_error like 'schema registry%'"
            until(lambda: count(opened) == 1, seconds=60, what="the circuit opens")
            plain = f"{topic}.plain"
            until(lambda: len(kafka.read_all(plain)) == 300, seconds=60, what="the sink without a registry flows")
            assert count(dead) == 20
            registry.start()
            until(lambda: count(dead) == 30, seconds=60, what="the rest is delivered")
            until(lambda: sum(map(len, numbers(kafka, registry, topic).values())) == 270, seconds=60, what="all arrive")
        for values in numbers(kafka, registry, topic).values():
            assert values == sorted(values)
    with psycopg.connect(database.dsn) as connection:
        rows = connection.execute("select distinct last_error from outbox.delivery").fetchall()
    assert [text for (text,) in rows] == [
        f"cannot be made a Kafka record: does not fit the schema of subject {topic}-value, version 1: "
        "field shop.Order.n: ValidationError"
    ]
    assert SECRET not in service.log.read_text()
