"""Sessions whose defaults switch off triggers or hide views."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from outbox_relay.domain.errors import DatabaseUnusable
from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database
from tests.support.deliveries import delivered, emit
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import CountingStore, running, spec
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


@pytest.mark.slow
def test_views_are_read_whatever_the_database_restricts(database: Database, relay: str) -> None:
    with database.connect() as connection:
        if connection.execute("select current_setting('restrict_nonsystem_relation_kind', true)").fetchone() == (None,):
            pytest.skip("this server has no such setting")
    run(database, f"alter database {database.name} set restrict_nonsystem_relation_kind = 'view'")
    _delivers(database, relay)
    migrate(database.dsn)
    run(database, f"alter role {relay} in database {database.name} reset all")
    _delivers(database, relay)


def _delivers(database: Database, role: str) -> None:
    sink = MemorySink()
    with running(database.dsn_as(role), (spec("s"), sink)):
        delivered(sink, emit(database, ["a", None]))
