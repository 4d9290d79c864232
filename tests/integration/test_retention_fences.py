"""A day is emptied only with an archive of all of its events, by every role and after every restore."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

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


def discard(connection: Connection, sink: str, row_id: int) -> None:
    """Mark an event as discarded."""
    connection.execute(
        "insert into outbox.discarded (sink, id, uid, reason) values (%s, %s, %s, 'test')", (sink, row_id, uuid4())
    )


# -- rebase -----------------------------------------------------------------------------------------------------


def test_a_rebase_is_recorded(owner: Connection) -> None:
    floor = one(owner, "select outbox.rebase()")
    assert one(owner, "select filter from outbox.audit where action = 'rebase'") == {"floor": floor}


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


def test_ids_go_on_above_those_of_discarded_events(owner: Connection) -> None:
    discard(owner, "crm", 5000)
    assert one(owner, "select outbox.rebase()") >= 5000
    assert emit_ago(owner, 0)[0] > 5000


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


@pytest.mark.parametrize("said", ["null", "0", "-5"])
def test_the_audit_of_an_archived_day_counts_what_the_archive_has(owner: Connection, archived: int, said: str) -> None:
    assert one(owner, f"select outbox_internal.empty_day('{date_ago(12)}', {archived}, {said})") == "emptied"
    assert one(owner, "select count from outbox.audit where action = 'retention'") == 3


def test_a_day_is_checked_without_a_look_at_the_default_partition(owner: Connection, archived: int) -> None:
    scans = "select pg_stat_get_xact_numscans('outbox.event_default_created_at'::regclass)"
    with owner.transaction():
        before = one(owner, scans)
        assert is_archived(owner, archived)
        assert one(owner, scans) == before
        owner.execute("select * from outbox_internal.past_days()")
        assert one(owner, scans) > before
