"""The Kafka sink under the contract, with a broker behind a proxy."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import pytest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.formats.topics import TopicTemplate
from outbox_relay.sinks.contract import Received, SinkHarness
from outbox_relay.sinks.kafka import KafkaSink
from tests.support.kafka import KafkaBroker, Record
from tests.support.proxy import Proxy

STALL_SECONDS = 2.0
TOO_MANY_BYTES = 2_000_000


@contextmanager
def proxied_broker(*, java: tuple[str, ...] = ()) -> Generator[tuple[KafkaBroker, Proxy]]:
    """Start a broker that advertises the address of a proxy."""
    proxy = Proxy()
    with proxy, KafkaBroker({"advertised.listeners": f"PLAINTEXT://{proxy.address}"}, java=java) as broker:
        proxy.target = broker.port
        yield broker, proxy


class KafkaHarness(SinkHarness):
    """One topic. The proxy cuts its connections to break the destination."""

    def __init__(self, broker: KafkaBroker, proxy: Proxy, topic: str) -> None:
        self._broker = broker
        self._proxy = proxy
        self._topic = topic
        broker.create_topic(topic)

    def make_sink(self) -> KafkaSink:
        producer = {"bootstrap.servers": self._proxy.address if self._broker.real else self._broker.bootstrap}
        return KafkaSink("contract", TopicTemplate.parse(self._topic), producer, STALL_SECONDS)

    def received(self) -> Sequence[Received]:
        return [_received(record) for record in self._broker.read_all(self._topic)]

    def break_destination(self) -> None:
        self._only_real("cannot be put behind a proxy")
        self._proxy.cut()

    def mend_destination(self) -> None:
        self._proxy.restore()

    def poison(self, event: StoredEvent) -> StoredEvent:
        self._only_real("takes records of any size")
        return event._replace(payload=b"x" * TOO_MANY_BYTES)

    def _only_real(self, why: str) -> None:
        if not self._broker.real:
            pytest.skip(f"needs Apache Kafka; the substitute {why}")


def _received(record: Record) -> Received:
    headers = {name: (value or b"").decode() for name, value in record.headers.items()}
    uid, kind, content_type = (headers.pop(name) for name in ("id", "type", "content-type"))
    key = None if record.key is None else record.key.decode()
    assert record.value is not None
    return Received(key, uid, record.value, kind, content_type, headers)
