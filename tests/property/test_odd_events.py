"""Every event that SQL accepts is refused with a clear error, delivered once, or dead: no session ever ends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.property.odd_events import EMIT, EMIT_RAW, Came, Log, came, emit_examples, judge, stored, undecided
from tests.support.database import Database, query
from tests.support.kafka import KafkaBroker
from tests.support.memory_sink import MemorySink
from tests.support.receiver import Receiver
from tests.support.relay_config import kafka_and_webhook_config
from tests.support.relay_harness import running, spec
from tests.support.service import RelayService
from tests.support.wait import until


@pytest.mark.parametrize(("name", "statement"), [("emit", EMIT), ("emit_raw", EMIT_RAW)])
def test_every_parameter_is_drawn(database: Database, name: str, statement: str) -> None:
    found = query(database, "select proargnames from pg_proc where oid = any (%s::regproc[])", [f"outbox.{name}"])
    [(parameters,)] = found
    drawn = {"type", "payload", *re.findall(r"(\w+) => ", statement)}
    assert drawn == {*parameters}


def test_every_event_that_is_accepted_is_delivered_or_dead(database: Database) -> None:
    emit_examples(database, 25)
    _relayed(stored(database), database)


def _relayed(log: Log, database: Database) -> None:
    """Relay everything to two kinds of sinks."""
    sinks = {"batches": MemorySink(), "singles": MemorySink(keeps_order=False)}
    with running(database.dsn, *((spec(name), sink) for name, sink in sinks.items())) as harness:
        for name, sink in sinks.items():
            until(
                lambda name=name, sink=sink: _nothing_left(log, database, name, sink),
                seconds=30,
                what="all is delivered or dead",
            )
        harness.stop()
        assert harness.ended == []
    for name, sink in sinks.items():
        judge(log, database, name, _delivered(sink))


def _nothing_left(log: Log, database: Database, name: str, sink: MemorySink) -> bool:
    return not undecided(log, database, name, [event.uid for event in sink.delivered])


def _delivered(sink: MemorySink) -> list[Came]:
    return [came(event.uid, event.payload) for event in sink.delivered]


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_every_event_that_is_accepted_comes_to_real_destinations_or_is_dead(
    database: Database, kafka: KafkaBroker, topic: str, tmp_path: Path
) -> None:
    emit_examples(database, 200)
    kafka.create_topic(topic)
    log = stored(database)
    with (
        Receiver() as receiver,
        RelayService(tmp_path, kafka_and_webhook_config(database.dsn, kafka.bootstrap, topic, receiver.url)) as relay,
    ):
        until(lambda: not undecided(log, database, "crm", receiver.uids), seconds=120, what="the webhook has all")
        until(lambda: not undecided(log, database, "events", _uids(kafka, topic)), seconds=60, what="Kafka has all")
        assert relay.stop() == 0
        assert receiver.unverified == []
        judge(log, database, "crm", _received(receiver))
    judge(log, database, "events", _in_topic(kafka, topic))


def _received(receiver: Receiver) -> list[Came]:
    return [came(request.uid, request.body) for request in list(receiver.requests)]


def _in_topic(kafka: KafkaBroker, topic: str) -> list[Came]:
    """Return the records of the topic, those of a key in their order."""
    return [came((record.headers["id"] or b"").decode(), record.value) for record in kafka.read_all(topic)]


def _uids(kafka: KafkaBroker, topic: str) -> list[str]:
    return [one.uid for one in _in_topic(kafka, topic)]
