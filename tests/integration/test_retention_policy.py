"""The policy of the retention: the roles that may change it, and the time at which a lower value counts."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID, uuid4

import pytest
from psycopg import errors

from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database
from tests.support.days import Connection, begin, fill_days, one, relay_says, said
from tests.support.roles import new_role


@pytest.fixture
def owner(database: Database) -> Iterator[Connection]:
    """Yield a connection of the schema's owner, in autocommit mode."""
    with database.connect(autocommit=True) as connection:
        yield connection


def asks(connection: Connection, who: UUID, days: int) -> int:
    """Return the keep_days in force after a pass, with one live relay that asks for that number."""
    connection.execute("delete from outbox.relay")
    relay_says(connection, said(days))
    begin(connection, who)
    return one(connection, "select keep_days from outbox.retention")


def wait_for(connection: Connection, hours: int) -> None:
    """Let the policy have been asked for so long."""
    connection.execute("update outbox.retention set lower_since = lower_since - %s * interval '1 hour'", (hours,))


def test_a_relay_cannot_lower_the_policy_at_once(database: Database, owner: Connection) -> None:
    with new_role(database, "relay") as relay, new_role(database, "operate") as operate:
        migrate(database.dsn, grant_relay=[relay], grants={"operate": [operate]})
        relay_says(owner, None)
        with database.connect(user=relay, autocommit=True) as connection:
            for statement in (
                "select * from outbox_internal.begin_retention(gen_random_uuid(), 't', 60, true)",
                "update outbox.relay set retention = '{}'",
                "insert into outbox.relay (id, name, version, sinks, retention)"
                " values (gen_random_uuid(), 'r', '1', '{}', '{}')",
            ):
                with pytest.raises((errors.InsufficientPrivilege, errors.CheckViolation)):
                    connection.execute(statement.encode())
            assert (
                one(connection, "select lease from outbox_internal.begin_retention(gen_random_uuid(), 't', 60)")
                is not None
            )
        owner.execute("update outbox.retention set owner = null")
        with database.connect(user=operate, autocommit=True) as connection:
            assert (
                one(connection, "select lease from outbox_internal.begin_retention(gen_random_uuid(), 't', 60, true)")
                is not None
            )


@pytest.mark.parametrize("name", ["keep_days", "keep_uids_days"])
def test_the_first_file_of_a_new_database_waits_a_day_if_it_would_empty_something_at_once(
    owner: Connection, name: str
) -> None:
    """Goes red when a first file counts at once, whatever the log holds."""
    me = uuid4()
    fill_days(owner, 12, 12)
    relay_says(owner, {**said(30), name: 7})
    begin(owner, me)
    assert one(owner, f"select {name} from outbox.retention") == 30
    wait_for(owner, 25)
    begin(owner, me)
    assert one(owner, f"select {name} from outbox.retention") == 7
