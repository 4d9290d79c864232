"""A day is emptied only with an archive of all of its events, by every role and after every restore."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from psycopg import errors

from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database
from tests.support.days import Connection, begin, date_ago, emit_ago, fill_days, keep, one
from tests.support.roles import new_role


@pytest.fixture
def owner(database: Database) -> Iterator[Connection]:
    """Yield a connection of the schema's owner, in autocommit mode, to a log with an old day that is to be archived."""
    with database.connect(autocommit=True) as connection:
        fill_days(connection, 12, 12)
        emit_ago(connection, 0)
        keep(connection, 5, archive=True)
        yield connection


@pytest.fixture
def archived(owner: Connection) -> int:
    """Return the lease under which the old day was checked and archived."""
    lease = begin(owner)
    assert lease is not None
    is_archived(owner, lease)
    owner.execute("select outbox_internal.begin_archive(%s::date, %s, 'a')", (date_ago(12), lease))
    owner.execute("select outbox_internal.record_archive(%s::date, %s, 'a', 'hash', 3)", (date_ago(12), lease))
    assert is_archived(owner, lease)
    return lease


def is_archived(connection: Connection, lease: int) -> bool:
    """Check the old day, and return whether a verified archive has all of its events."""
    return one(connection, "select archived from outbox_internal.check_day(%s::date, %s)", date_ago(12), lease)


# -- rebase -----------------------------------------------------------------------------------------------------


def test_an_archive_from_before_a_rebase_counts_for_nothing(owner: Connection, archived: int) -> None:
    emit_ago(owner, 12)
    owner.execute("select outbox.rebase()")
    assert one(owner, f"select outbox_internal.empty_day('{date_ago(12)}', {archived}, 3)") == "again"
    assert not is_archived(owner, archived)
    assert one(owner, f"select outbox_internal.empty_day('{date_ago(12)}', {archived}, 3)") == "archive"


def test_an_archive_that_is_written_during_a_rebase_is_not_recorded(owner: Connection) -> None:
    lease = begin(owner)
    assert lease is not None
    is_archived(owner, lease)
    owner.execute("select outbox_internal.begin_archive(%s::date, %s, 'a')", (date_ago(12), lease))
    owner.execute("select outbox.rebase()")
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="no check"):
        owner.execute("select outbox_internal.record_archive(%s::date, %s, 'a', 'hash', 3)", (date_ago(12), lease))


# -- archives ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("owner")
def test_a_role_without_payloads_cannot_say_that_a_day_is_archived(database: Database) -> None:
    with new_role(database, "operate") as operate:
        migrate(database.dsn, grants={"operate": [operate]})
        with database.connect(user=operate, autocommit=True) as connection:
            lease = begin(connection)
            assert lease is not None
            is_archived(connection, lease)
            for call in ("begin_archive(%s::date, %s, 'a')", "record_archive(%s::date, %s, 'a', 'hash', 0)"):
                with pytest.raises(errors.InsufficientPrivilege):
                    connection.execute(f"select outbox_internal.{call}".encode(), (date_ago(12), lease))
            assert one(connection, f"select outbox_internal.empty_day('{date_ago(12)}', {lease}, 3)") == "archive"


def test_only_the_archive_that_was_begun_can_be_recorded(owner: Connection) -> None:
    lease = begin(owner)
    assert lease is not None
    is_archived(owner, lease)
    record = "select outbox_internal.record_archive(%s::date, %s, %s, 'hash', 3)"
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="no archive b was begun"):
        owner.execute(record.encode(), (date_ago(12), lease, "b"))
    owner.execute("select outbox_internal.begin_archive(%s::date, %s, 'a')", (date_ago(12), lease))
    with pytest.raises(errors.ObjectNotInPrerequisiteState, match="no archive b was begun"):
        owner.execute(record.encode(), (date_ago(12), lease, "b"))
    owner.execute(record.encode(), (date_ago(12), lease, "a"))


def test_a_lease_cannot_be_guessed(owner: Connection) -> None:
    leases: list[int] = []
    for _ in range(5):
        lease = begin(owner)
        assert lease is not None
        leases.append(lease)
        for guess in (1, 2, leases[0] + 1, lease - 1, lease + 1):
            with pytest.raises(errors.ObjectNotInPrerequisiteState, match="was taken over"):
                owner.execute("select outbox_internal.renew_retention(%s)", (guess,))
        owner.execute("select outbox_internal.end_retention(%s)", (lease,))
    assert len(set(leases)) == 5
    assert all(abs(lease - leases[0]) > 1000 for lease in leases[1:])
