"""Notices of days that cannot be emptied: one for the same keepers, and none if their receiver keeps a day alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.database import Database
from tests.support.days import (
    Connection,
    begin,
    date_ago,
    emit_ago,
    events_of,
    fill_days,
    keep,
    one,
    retention,
    table_ago,
)
from tests.support.notices import notices, pass_hours, register_receiver
from tests.support.sink_actions import call, register

BLOCKED = "outbox.retention.blocked"


@pytest.fixture
def owner(database: Database) -> Iterator[Connection]:
    """Yield a connection of the schema's owner, in autocommit mode, to a database with three old days that are kept."""
    with database.connect(autocommit=True) as connection:
        fill_days(connection, 12, 10)
        emit_ago(connection, 0)
        keep(connection, 5)
        yield connection


@pytest.mark.usefixtures("owner")
def test_what_keeps_days_is_told_once_for_the_same_keepers(database: Database) -> None:
    register(database, "crm")
    register_receiver(database)
    retention(database, "run")
    [(kind, payload)] = notices(database)
    keepers = [(keeper["kind"], keeper["name"], bool(keeper["since"])) for keeper in payload["kept_by"]]
    assert (kind, payload["day"]) == (BLOCKED, date_ago(12))
    assert keepers == [("sink", "crm", True), ("sink", "ops", True)]
    pass_hours(database, 2)
    retention(database, "run")
    assert len(notices(database)) == 1, "no news"
    register(database, "erp")
    retention(database, "run")
    assert [len(found["kept_by"]) for _, found in notices(database)] == [2, 3]


def test_a_receiver_that_keeps_days_alone_is_not_told(database: Database, owner: Connection) -> None:
    register_receiver(database)
    retention(database, "run")
    assert events_of(owner, table_ago(12)) == 3
    assert notices(database) == []


def test_a_notice_that_cannot_be_written_hinders_no_check(database: Database, owner: Connection) -> None:
    register(database, "crm")
    register_receiver(database)
    lease = begin(owner)
    call(database, "alter table outbox.event add constraint none check (type not like 'outbox.%%')")
    assert one(owner, "select changed from outbox_internal.check_day(%s, %s)", date_ago(12), lease) is True
    assert one(owner, "select jsonb_array_length(kept_by) from outbox.day where day = %s", date_ago(12)) == 2


def test_notices_are_archived_and_emptied_as_other_events_are(database: Database, owner: Connection) -> None:
    register(database, "crm")
    register_receiver(database)
    call(database, "select outbox.set_paused('crm', true, null, null)")
    moved = "update outbox.event set created_at = %s::date + interval '12 hours' where type ^@ 'outbox.' returning 1"
    call(database, moved, date_ago(11))
    assert events_of(owner, table_ago(11)) == 4
    for sink in ("crm", "ops"):
        call(database, "select deliveries from outbox.drop_sink(%s, true, 1000, null, null)", sink)
    emit_ago(owner, 0)  # the clock of the newest event is today's
    retention(database, "run")
    assert events_of(owner, table_ago(11)) == 0
