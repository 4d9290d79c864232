"""Sessions whose defaults switch off triggers."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from outbox_relay.domain.errors import DatabaseUnusable
from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database
from tests.support.relay_harness import CountingStore
from tests.support.roles import new_role

REPLICA = "alter role {} in database {} set session_replication_role = replica"


@pytest.fixture
def relay(database: Database) -> Generator[str]:
    with new_role(database, "relay") as name:
        migrate(database.dsn, grant_relay=[name])
        yield name


def run(database: Database, *statements: str) -> None:
    with database.connect(autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def test_a_relay_refuses_sessions_without_triggers_and_names_the_setting(database: Database, relay: str) -> None:
    run(database, REPLICA.format(relay, database.name))
    store = CountingStore(database.dsn_as(relay))
    try:
        with pytest.raises(DatabaseUnusable, match=r"session_replication_role.*alter role ROLE reset"):
            store.open()
    finally:
        store.close()
