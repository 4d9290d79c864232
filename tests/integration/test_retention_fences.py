"""A day is emptied only with an archive of all of its events, by every role and after every restore."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from psycopg import errors

from tests.support.database import Database
from tests.support.days import Connection, begin, date_ago, emit_ago, fill_days, keep, one


def is_archived(connection: Connection, lease: int) -> bool:
    """Check the old day, and return whether a verified archive has all of its events."""
    return one(connection, "select archived from outbox_internal.check_day(%s::date, %s)", date_ago(12), lease)


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


# -- rebase -----------------------------------------------------------------------------------------------------


def test_an_archive_from_before_a_rebase_counts_for_nothing(owner: Connection, archived: int) -> None:
    emit_ago(owner, 12)
    owner.execute("select outbox.rebase()")
    assert one(owner, f"select outbox_internal.empty_day('{date_ago(12)}', {archived}, 3)") == "again"
    assert not is_archived(owner, archived)
    assert one(owner, f"select outbox_internal.empty_day('{date_ago(12)}', {archived}, 3)") == "archive"


# -- archives ---------------------------------------------------------------------------------------------------


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
