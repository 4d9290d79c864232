"""Fixtures for all tests: servers once per run, databases and topics once per test."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from uuid import uuid4

import pytest

from tests.support.database import Database
from tests.support.kafka import KafkaBroker
from tests.support.postgres import PostgresServer

TEMPLATE = "outbox_template"
# A fixture's name, and the marker that tests get which ask for it, directly or through other fixtures.
MARKERS = {"postgres": "postgres", "own_postgres": "postgres", "kafka": "kafka", "own_kafka": "kafka"}
# Each has a make target of its own.
ON_REQUEST = ("debezium", "image", "thorough")


def pytest_configure() -> None:
    """Forget settings of the shell that would reach libpq or the relay."""
    for name in [name for name in os.environ if name.startswith(("PG", "OUTBOX_RELAY_"))]:
        del os.environ[name]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by the servers that their fixtures start; leave out those that run only when `-m` names them.

    Where several processes share the tests, a file stays in one, and one has all that need a broker.
    """
    unasked = [marker for marker in ON_REQUEST if marker not in config.option.markexpr]
    left_out = [item for item in items if any(map(item.get_closest_marker, unasked))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if marker := MARKERS.get(fixture):
                item.add_marker(marker)
        item.add_marker(pytest.mark.xdist_group("kafka" if item.get_closest_marker("kafka") else item.path.name))


@pytest.fixture(scope="session")
def postgres() -> Generator[PostgresServer]:
    """The run's PostgreSQL server; a test that breaks it must leave it running again."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def own_postgres() -> Generator[PostgresServer]:
    """A PostgreSQL server for this test alone, without the schema."""
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def template(postgres: PostgresServer) -> str:
    """The name of a database to which all migrations have been applied."""
    from outbox_relay.postgres.migrations import migrate

    postgres.create_database(TEMPLATE)
    migrate(postgres.dsn(TEMPLATE))
    return TEMPLATE


@pytest.fixture
def empty_database(postgres: PostgresServer) -> Generator[Database]:
    """A new database without the schema."""
    with _database(postgres, "template1") as database:
        yield database


@pytest.fixture
def database(postgres: PostgresServer, template: str) -> Generator[Database]:
    """A new database with the schema."""
    with _database(postgres, template) as database:
        yield database


@contextmanager
def _database(server: PostgresServer, template: str) -> Generator[Database]:
    name = f"test_{uuid4().hex}"
    server.create_database(name, template=template)
    try:
        yield Database(server, name)
    finally:
        server.drop_database(name)


@pytest.fixture(scope="session")
def kafka() -> Generator[KafkaBroker]:
    """The run's broker; a test that breaks it must leave it running again."""
    with KafkaBroker() as broker:
        yield broker


@pytest.fixture
def own_kafka() -> Generator[KafkaBroker]:
    """A broker for this test alone."""
    with KafkaBroker() as broker:
        yield broker


@pytest.fixture
def real_kafka(kafka: KafkaBroker) -> KafkaBroker:
    """The run's broker where it is Apache Kafka; elsewhere the test is skipped."""
    if not kafka.real:
        pytest.skip("needs Apache Kafka, and this is the substitute")
    return kafka


@pytest.fixture
def topic() -> str:
    """The name of a topic that does not exist yet; brokers make it at the first record."""
    return f"test.{uuid4().hex}"
