"""Row level security on tables of the schema: no event is passed over, and the fix is named."""

from __future__ import annotations

import pytest

from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database
from tests.support.deliveries import delivered, emit
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import running, spec
from tests.support.roles import new_role
from tests.support.wait import until

REFUSED = frozenset({"database_refused"})


def granted(database: Database, role: str) -> None:
    """Grant a relay's role what it needs, and give it a hostile default."""
    migrate(database.dsn, grant_relay=[role])
    with database.connect(autocommit=True) as connection:
        connection.execute(f"alter role {role} in database {database.name} set row_security = on".encode())


def secure(database: Database, table: str, *, enable: bool) -> None:
    with database.connect(autocommit=True) as connection:
        verb = "enable" if enable else "disable"
        connection.execute(f"alter table outbox.{table} {verb} row level security".encode())


def test_events_that_a_policy_hides_are_delivered_when_it_is_gone(database: Database) -> None:
    with new_role(database, "relay") as role:
        granted(database, role)
        sink = MemorySink()
        with running(database.dsn_as(role), (spec("s"), sink), expects=REFUSED) as harness:
            delivered(sink, emit(database, ["before"]))
            secure(database, "event", enable=True)
            hidden = emit(database, ["a", "b", None])
            until(lambda: bool(harness.ended), seconds=20, what="the relay refuses")
            assert "alter table outbox.NAME disable row level security" in str(harness.ended[0])
            secure(database, "event", enable=False)
            delivered(sink, hidden)


@pytest.mark.parametrize("table", ["delivery", "progress"])
def test_a_relay_refuses_tables_that_a_policy_hides(database: Database, table: str) -> None:
    with new_role(database, "relay") as role:
        granted(database, role)
        sink = MemorySink()
        with running(database.dsn_as(role), (spec("s"), sink), expects=REFUSED) as harness:
            delivered(sink, emit(database, ["before"]))
            secure(database, table, enable=True)
            hidden = emit(database, ["a", "b", None])
            until(lambda: bool(harness.ended), seconds=20, what="the relay refuses")
            secure(database, table, enable=False)
            delivered(sink, hidden)
