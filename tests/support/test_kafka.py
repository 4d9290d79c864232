"""The tests' broker does what tests rely on."""

from collections.abc import Callable, Generator

import pytest
from confluent_kafka import Producer

from tests.support.kafka import KafkaBroker
from tests.support.wait import NotInTime

pytestmark = pytest.mark.thorough


def produce(broker: KafkaBroker, topic: str, *values: bytes) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for value in values:
        producer.produce(topic, key=b"k", value=value, headers={"id": "1"})
    assert producer.flush(20) == 0


def test_records_come_back_as_they_were_sent(kafka: KafkaBroker, topic: str) -> None:
    kafka.create_topic(topic, partitions=2)
    produce(kafka, topic, b"one", b"two")
    records = kafka.consume(topic, count=2)
    assert [record.value for record in records] == [b"one", b"two"]
    assert {(record.key, record.headers["id"]) for record in records} == {(b"k", b"1")}


def test_reading_ends_when_the_test_has_enough(kafka: KafkaBroker, topic: str) -> None:
    produce(kafka, topic, b"one", b"two")
    records = kafka.consume(topic, enough=lambda seen: any(record.value == b"two" for record in seen))
    assert [record.value for record in records] == [b"one", b"two"]


def test_reading_ends_at_the_deadline(kafka: KafkaBroker, topic: str) -> None:
    produce(kafka, topic, b"one")
    with pytest.raises(NotInTime, match="1 records"):
        kafka.consume(topic, count=2, seconds=2)


def test_read_all_returns_what_is_there(real_kafka: KafkaBroker, topic: str) -> None:
    real_kafka.create_topic(topic, partitions=3)
    assert real_kafka.read_all(topic) == []
    produce(real_kafka, topic, *(b"%d" % number for number in range(2_500)))
    assert [record.value for record in real_kafka.read_all(topic)] == [b"%d" % number for number in range(2_500)]


def test_topic_settings_are_applied(real_kafka: KafkaBroker, topic: str) -> None:
    real_kafka.create_topic(topic, config={"max.message.bytes": "1000"})
    producer = Producer({"bootstrap.servers": real_kafka.bootstrap})
    errors: list[object] = []
    producer.produce(topic, value=b"x" * 2_000, on_delivery=lambda error, _: errors.append(error))
    producer.flush(20)
    assert "MSG_SIZE_TOO_LARGE" in str(errors)


@pytest.fixture(scope="module")
def breakable() -> Generator[KafkaBroker]:
    """Yield a broker to break, which notices soon that it was dead, and makes no topics by itself.

    By default it says every two seconds that it lives, and would be taken for dead in between.
    """
    noticed = {"broker.session.timeout.ms": "2000", "broker.heartbeat.interval.ms": "500"}
    with KafkaBroker({**noticed, "auto.create.topics.enable": "false"}) as broker:
        yield broker
    assert not broker.directory.exists()


def test_settings_reach_the_broker(breakable: KafkaBroker, topic: str) -> None:
    if not breakable.real:
        pytest.skip("the substitute knows no settings")
    with pytest.raises(NotInTime, match="is there"):
        breakable.consume(topic, count=1, seconds=1)


def test_frozen_broker_answers_after_it_is_thawed(breakable: KafkaBroker, topic: str) -> None:
    breakable.create_topic(topic)
    producer = Producer({"bootstrap.servers": breakable.bootstrap})
    with breakable.frozen():
        producer.produce(topic, value=b"one")
        assert producer.flush(0.5) == 1
    assert producer.flush(20) == 0


@pytest.mark.parametrize("end", [KafkaBroker.stop, KafkaBroker.kill])
def test_broker_comes_back_with_its_data(
    breakable: KafkaBroker, topic: str, end: Callable[[KafkaBroker], None]
) -> None:
    if not breakable.real:
        pytest.skip("the substitute keeps nothing")
    breakable.create_topic(topic)
    produce(breakable, topic, b"one")
    end(breakable)
    breakable.start()
    assert [record.value for record in breakable.consume(topic, count=1)] == [b"one"]
