"""Brokers that are slow, and connections that are lost without a word: no outage, and no record is sent twice."""

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_relay import outbox
from outbox_relay.domain.outcomes import DELIVERED, Unavailable
from outbox_relay.domain.times import lease_clock
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.kafka import KafkaSink
from tests.contract.kafka import proxied_broker
from tests.support.command import inside
from tests.support.database import Database, query
from tests.support.kafka import KafkaBroker
from tests.support.kafka.broker import QUICK_START
from tests.support.kafka.delivering import deliver, opening
from tests.support.proxy import Proxy
from tests.support.service import RelayService
from tests.support.wait import until

pytestmark = [pytest.mark.slow]

CONFIG = """
[database]
dsn = "{dsn}"
[sinks.events]
type = "kafka"
topic = "{topic}"
{more}
[sinks.events.producer]
"bootstrap.servers" = "{bootstrap}"
{producer}
[routes]
"*" = ["events"]
"""
KEYS = 5


@pytest.fixture
def own_real_kafka(own_kafka: KafkaBroker) -> KafkaBroker:
    """Return a broker for this test alone, Apache Kafka and no substitute."""
    if not own_kafka.real:
        pytest.skip("needs Apache Kafka, and this is the substitute")
    return own_kafka


@pytest.fixture
def proxied() -> Generator[tuple[KafkaBroker, Proxy]]:
    """Yield a broker that clients reach through a proxy alone."""
    with proxied_broker(java=QUICK_START) as (broker, proxy):
        if not broker.real:
            pytest.skip("needs Apache Kafka; the substitute cannot be put behind a proxy")
        yield broker, proxy


def relay_of(
    database: Database, bootstrap: str, topic: str, directory: Path, more: str = "", producer: str = ""
) -> RelayService:
    text = CONFIG.format(dsn=database.dsn, topic=topic, bootstrap=bootstrap, more=more, producer=producer)
    return RelayService(directory, text)


def emit(database: Database, numbers: range, size: int = 100) -> None:
    """Emit events of several keys, whose payloads no codec makes smaller."""
    events = [
        outbox.Event("made", {"n": n, "filler": os.urandom(size // 2).hex()}, key=f"k{n % KEYS}") for n in numbers
    ]
    with psycopg.connect(database.dsn) as connection:
        outbox.emit_many(connection, events)


def numbers(broker: KafkaBroker, topic: str) -> list[int]:
    """Return the numbers in the topic."""
    return [json.loads(record.value or b"")["n"] for record in broker.read_all(topic)]


def status(relay: RelayService) -> dict[str, Any]:
    """Return the sink's part of `status --json`."""
    return inside("status", "--json", "-c", relay.config).json["sinks"]["events"]


def arrive_once(relay: RelayService, broker: KafkaBroker, topic: str, wanted: range, seconds: float = 120) -> None:
    """Wait until all events are settled: each has arrived once, in order, and the circuit was never open."""
    until(lambda: status(relay)["backlog"] == 0, seconds=seconds, what="everything is delivered")
    found = numbers(broker, topic)
    assert sorted(found) == list(wanted)
    for key in range(KEYS):
        assert [n for n in found if n % KEYS == key] == [n for n in wanted if n % KEYS == key]
    assert "circuit.opened" not in relay.log.read_text()


@pytest.mark.parametrize("claim", ["log", "rows"])
def test_a_quota_makes_delivery_slow_and_repeats_nothing(
    database: Database, own_real_kafka: KafkaBroker, topic: str, tmp_path: Path, claim: str
) -> None:
    """Each request takes longer than a broker may be silent, and all together longer than a lease."""
    own_real_kafka.create_topic(topic, partitions=3)
    own_real_kafka.set_quota(60_000)
    more = f'claim = "{claim}"'
    with relay_of(database, own_real_kafka.bootstrap, topic, tmp_path, more) as relay:
        emit(database, range(240), 10_000)
        until(lambda: "throttled" in (status(relay)["last_error"] or ""), seconds=60, what="status says throttled")
        assert status(relay)["circuit"] == "closed"
        arrive_once(relay, own_real_kafka, topic, range(240))
        until(lambda: status(relay)["last_error"] is None, seconds=60, what="the throttling is over")
        assert relay.stop() == 0
    assert query(database, "select count(*) from outbox.delivery") == [(0,)]


def test_nothing_is_sent_once_the_lease_cannot_be_kept(own_real_kafka: KafkaBroker, topic: str) -> None:
    """The relay says no more that the lease lasts longer, so the records that the quota delays are purged."""
    own_real_kafka.create_topic(topic, partitions=1)
    own_real_kafka.set_quota(60_000)
    events = [an_event("k", os.urandom(10_000)) for _ in range(300)]
    with opening(2.0, KafkaSink) as open_sink:
        sink = open_sink(topic, {"bootstrap.servers": own_real_kafka.bootstrap})
        until_ = lease_clock() + 5
        verdicts = deliver(sink, events, until_)
        assert lease_clock() >= until_
        delivered = verdicts.count(DELIVERED)
        assert list(verdicts[:delivered]) == [DELIVERED] * delivered
        assert all(isinstance(verdict, Unavailable) for verdict in verdicts[delivered:])
        sink.withdraw()
        # The broker may already have had one more request. The next deliveries come after it.
        [verdict] = deliver(sink, [an_event("k")])
        assert verdict == DELIVERED
    assert delivered < len(own_real_kafka.read_all(topic)) <= delivered + 100 < len(events)


def test_a_broker_that_answers_slowly_is_waited_for(
    database: Database, proxied: tuple[KafkaBroker, Proxy], topic: str, tmp_path: Path
) -> None:
    """Each answer comes later than a broker may be silent."""
    broker, proxy = proxied
    broker.create_topic(topic, partitions=2)
    with relay_of(database, proxy.address, topic, tmp_path) as relay:
        emit(database, range(10))
        arrive_once(relay, broker, topic, range(10))
        proxy.delay = 9.0
        emit(database, range(10, 40))
        until(lambda: "no acknowledgement" in (status(relay)["last_error"] or ""), seconds=30, what="status says so")
        assert status(relay)["circuit"] == "closed"
        until(lambda: status(relay)["backlog"] == 0, seconds=120, what="everything is delivered")
        proxy.delay = 0.0
        arrive_once(relay, broker, topic, range(40))
        assert relay.stop() == 0
