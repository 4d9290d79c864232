"""One PostgreSQL server with logical decoding and one Kafka Connect worker for the tests of this directory.

Tests with the marker `debezium` run when they are asked for: `make debezium-test`.
"""

from collections.abc import Generator

import pytest

from tests.support.connect import ConnectWorker
from tests.support.kafka import KafkaBroker
from tests.support.kafka.jars import NoKafka
from tests.support.postgres import PostgresServer

SLOTS = 16


@pytest.fixture(scope="package")
def logical() -> Generator[PostgresServer]:
    """Yield a server with logical decoding."""
    settings = {"wal_level": "logical", "max_replication_slots": SLOTS, "max_wal_senders": SLOTS}
    with PostgresServer(settings) as server:
        yield server


@pytest.fixture(scope="package")
def worker(kafka: KafkaBroker) -> Generator[ConnectWorker]:
    """Yield a worker beside the run's broker; without Java, Maven or Apache Kafka the test is skipped."""
    if not kafka.real:
        pytest.skip("needs Apache Kafka, and this is the substitute")
    try:
        new = ConnectWorker(kafka.bootstrap)
    except NoKafka as reason:
        pytest.skip(str(reason))
    with new as running:
        yield running
