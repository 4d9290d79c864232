"""Rolling restart of three brokers under load, with a relay in its own process."""

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
    """Run one of the three rounds of `make kafka-proof`, with 5,000 events per second."""
    try:
        jars()
    except NoKafka:
        absent("Apache Kafka", "openjdk-17-jre-headless", "maven")
    with KafkaCluster() as cluster, capsys.disabled():
        assert rolling(postgres, cluster, 1, 5_000)
