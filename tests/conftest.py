"""Fixtures for all tests: servers once per run, databases and topics once per test."""

import gc
import os
import signal
import sys
from collections.abc import Generator
from uuid import uuid4

import pytest
import structlog
from hypothesis import settings

from tests.support.database import Database, new_database
from tests.support.kafka import KafkaBroker
from tests.support.kafka.broker import QUICK_START
from tests.support.postgres import TEMPLATE, PostgresServer

# A fixture's name, and the marker that tests get which ask for it, directly or through other fixtures.
MARKERS = {"postgres": "postgres", "own_postgres": "postgres", "kafka": "kafka", "own_kafka": "kafka"}
# Each has a make target of its own.
ON_REQUEST = ("debezium", "image", "slow", "thorough")
# Number of new objects after which garbage is collected. With the default of 700, that takes a tenth of the time.
GARBAGE_OBJECTS = 20_000


# The time of an example says nothing on a busy machine.
settings.register_profile("patient", parent=settings(), deadline=None)
settings.load_profile("patient")


def pytest_configure() -> None:
    """Forget settings of the shell that would reach libpq or the relay, and let Python keep compiled modules.

    Images of Python often forbid the latter. Then each process of the tests compiles all modules again, and so does
    each relay that a test starts.

    A shell ignores SIGINT for commands in its background, and every process that they start would ignore Ctrl-C too.

    Modules and tests are made without garbage collection, which each process of the tests would spend seconds on.
    """
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in [name for name in os.environ if name.startswith(("PG", "OUTBOX_RELAY_", "PYTHONDONTWRITEBYTECODE"))]:
        del os.environ[name]
    sys.dont_write_bytecode = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by the servers that their fixtures start; leave out those that run only when `-m` names them."""
    unasked = [marker for marker in ON_REQUEST if marker not in config.option.markexpr]
    left_out = [item for item in items if any(map(item.get_closest_marker, unasked))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if marker := MARKERS.get(fixture):
                item.add_marker(marker)
    if getattr(config.option, "loadgroup", False):
        _distribute(items)


def pytest_collection_finish() -> None:
    """Collect garbage again, but not among what was made so far."""
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS)
    gc.enable()


def _distribute(items: list[pytest.Item]) -> None:
    """Set the groups of tests, and begin with those that have a time limit of their own, since these take longest."""
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)
    for item in items:
        if group := _group(item):
            _append_to_name(item, group)


def _group(item: pytest.Item) -> str | None:
    """Return the name of the tests that one process runs together, or None where any process may run this one alone.

    Only two processes start the broker of the run, one for tests of sinks and one for tests of relays. Quick tests stay
    together, since distributing them one by one takes longer than running them. Tests of a database are distributed one
    by one, so that all processes end at the same time, unless the mark `xdist_group` keeps them together, for example
    because fixtures of their file take long.
    """
    if marker := item.get_closest_marker("xdist_group"):
        return str(marker.args[0])
    has_database = item.get_closest_marker("postgres") is not None
    if "kafka" in getattr(item, "fixturenames", ()):
        return "kafka and postgres" if has_database else "kafka"
    return None if has_database else item.path.name


def _append_to_name(item: pytest.Item, group: str) -> None:
    """Tell pytest-xdist the group of a test.

    Version 3.8 appends the group to an attribute that pytest 9.2 no longer reads, and so ignores every group
    (https://github.com/pytest-dev/pytest-xdist/issues/1386).
    """
    item._id = type(item.id).parse(f"{item.nodeid}@{group}")  # pyright: ignore[reportPrivateUsage]


@pytest.fixture(autouse=True)
def unconfigured_logs() -> None:
    """Let each test find structlog as an application does: `capture_logs` leaves it configured for all tests after."""
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def postgres() -> Generator[PostgresServer]:
    """Yield the run's PostgreSQL server; a test that breaks it must leave it running again."""
    with PostgresServer(kind="migrated") as server:
        yield server


@pytest.fixture
def own_postgres() -> Generator[PostgresServer]:
    """Yield a PostgreSQL server for this test alone, without the schema."""
    with PostgresServer(kind="empty") as server:
        yield server


@pytest.fixture(scope="session")
def template() -> str:
    """Return the name of the database with the schema."""
    return TEMPLATE


@pytest.fixture
def empty_database(postgres: PostgresServer) -> Generator[Database]:
    """Yield a new database without the schema."""
    with new_database(postgres, "template1") as database:
        yield database


@pytest.fixture
def database(postgres: PostgresServer) -> Generator[Database]:
    """Yield a new database with the schema."""
    with new_database(postgres, TEMPLATE) as database:
        yield database


@pytest.fixture(scope="module")
def shared_database(postgres: PostgresServer) -> Generator[Database]:
    """Yield a database with the schema, for tests of a module that leave it as it is."""
    with new_database(postgres, TEMPLATE) as database:
        yield database


@pytest.fixture(scope="session")
def kafka() -> Generator[KafkaBroker]:
    """Yield the run's broker; a test that breaks it must leave it running again."""
    with KafkaBroker(java=QUICK_START) as broker:
        yield broker


@pytest.fixture
def own_kafka() -> Generator[KafkaBroker]:
    """Yield a broker for this test alone."""
    with KafkaBroker(java=QUICK_START) as broker:
        yield broker


@pytest.fixture
def real_kafka(kafka: KafkaBroker) -> KafkaBroker:
    """Return the run's broker where it is Apache Kafka; elsewhere the test is skipped."""
    if not kafka.real:
        pytest.skip("needs Apache Kafka, and this is the substitute")
    return kafka


@pytest.fixture
def topic() -> str:
    """Return the name of a topic that does not exist yet; brokers make it at the first record."""
    return f"test.{uuid4().hex}"
