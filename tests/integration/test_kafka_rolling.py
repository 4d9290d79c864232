"""Three brokers that are restarted in turn under load, with a relay in a process of its own: one round."""

import pytest

from tests.bench.rolling import rolling
from tests.support.installed import absent
from tests.support.kafka import KafkaCluster
from tests.support.kafka.jars import NoKafka, jars
from tests.support.postgres import PostgresServer

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(400)]


def test_a_rolling_restart_loses_and_reorders_nothing(
    postgres: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """One round of what `make kafka-proof` does three times, under 5,000 events a second."""
    try:
        jars()
    except NoKafka:
        absent("Apache Kafka", "openjdk-17-jre-headless", "maven")
    with KafkaCluster() as cluster, capsys.disabled():
        assert rolling(postgres, cluster, 1, 5_000)
