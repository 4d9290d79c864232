"""The role of a consumer: it marks events and does nothing else, and `migrate` alone says which roles are consumers."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from outbox_relay.inbox import once
from outbox_relay.postgres.migrations import migrate
from tests.support.command import inside
from tests.support.database import Database, query
from tests.support.roles import STATEMENTS, callable_by, denied, new_role

FOREIGN = (STATEMENTS / "foreign_privileges.sql").read_text(encoding="utf-8")
"""The question of `check --online` about privileges that no role should have."""


@pytest.fixture
def consumer(database: Database) -> Iterator[str]:
    """Yield a consumer's role, made by the command."""
    with new_role(database, "consumer") as name:
        ended = inside("migrate", "--inbox", "--grant-consume", name, "--dsn", database.dsn)
        assert (ended.code, ended.err) == (0, "")
        assert ended.out.endswith(f"; granted consume to {name}\n")
        yield name


def test_a_consumer_marks_events(database: Database, consumer: str) -> None:
    uid = uuid4()
    with database.connect(user=consumer) as conn:
        assert once(conn, "billing", uid)
    with database.connect(user=consumer) as conn:
        assert not once(conn, "billing", uid)
        assert conn.execute("select outbox.once('mail', %s)", (uid,)).fetchone() == (True,)


def test_a_consumer_calls_one_function_and_no_other(database: Database, consumer: str) -> None:
    assert callable_by(database, consumer) == {"once"}
    held = query(
        database,
        "select object_type, name, privilege from outbox.privilege where kind = 'consume' order by 1",
    )
    assert held == [("function", "once", "EXECUTE"), ("schema", "outbox", "USAGE")]


def test_a_right_to_mark_that_was_granted_by_hand_is_named_and_revoked(database: Database, consumer: str) -> None:
    with new_role(database, "stranger") as name, database.connect(autocommit=True) as owner:
        owner.execute(f"grant usage on schema outbox to {name}".encode())
        owner.execute(f"grant execute on function outbox.once to {name}".encode())
        owner.execute(f"grant select on outbox.inbox to {consumer}".encode())
        assert query(database, FOREIGN) == [
            (f'role "{consumer}" has SELECT on table inbox: outbox-relay migrate --revoke-others revokes it',),
            (f'role "{name}" has EXECUTE on function once: outbox-relay migrate --revoke-others revokes it',),
            (f'role "{name}" has USAGE on schema outbox: outbox-relay migrate --revoke-others revokes it',),
        ]
        notes = migrate(database.dsn, revoke_others=True).notes
        assert f'revoked from role "{name}": EXECUTE on function once' in notes
        assert query(database, FOREIGN) == []
        denied(database, name, "select outbox.once('billing', gen_random_uuid())")
    with database.connect(user=consumer) as conn:
        assert once(conn, "billing", uuid4())
