"""Old marks of the inbox are removed, those of events that may come again are kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest

from outbox_relay.inbox import once
from tests.support.database import Database
from tests.support.days import DEAD, Connection, begin, emit_ago, keep, one, relay_says, retention, said


@pytest.fixture
def owner(database: Database) -> Iterator[Connection]:
    """Yield a connection of the schema's owner, in autocommit mode."""
    with database.connect(autocommit=True) as connection:
        yield connection


def marked(owner: Connection, days: float, uid: UUID | None = None) -> UUID:
    """Mark an event as a consumer does, this number of days ago; return its uid."""
    made = uid or uuid4()
    with owner.transaction():
        assert once(owner, "billing", made)
    owner.execute(
        "update outbox.inbox set handled_at = now() - %s * interval '1 day' where uid = %s", (float(days), made)
    )
    return made


def left(owner: Connection) -> set[UUID]:
    """Return the uids whose marks are there."""
    return {uid for (uid,) in owner.execute("select uid from outbox.inbox").fetchall()}


def step(owner: Connection, most: int) -> tuple[Any, ...]:
    """Return the result of one step of a pass."""
    owner.execute("update outbox.retention set owner = null")
    [found] = owner.execute(f"select * from outbox_internal.trim_inbox({begin(owner)}, {most})".encode()).fetchall()
    return found


@pytest.mark.fence("a mark is removed whose event may come again")
def test_marks_are_kept_while_their_event_may_come_again(database: Database, owner: Connection) -> None:
    in_log, in_row = emit_ago(owner, 0, 2)
    uids = [one(owner, "select uid from outbox.event where id = %s", row_id) for row_id in (in_log, in_row)]
    owner.execute(DEAD.encode(), ("s", 0, in_row))
    owner.execute("delete from outbox.event where id = %s", (in_row,))
    for uid in uids:
        marked(owner, 20, uid)
    old, young = marked(owner, 11), marked(owner, 9)
    keep(owner, 0, keep_uids_days=10)
    assert "marks of the inbox removed: 1" in retention(database, "run").out
    assert left(owner) == {*uids, young}
    marked(owner, 0, old)


@pytest.mark.parametrize(
    "changed", [{"keep_uids_days": 0}, {"keep_uids_days": 10, "hold_until": "infinity"}], ids=["no limit", "clock"]
)
def test_no_mark_is_removed_without_a_limit_or_after_a_jump_of_the_clock(
    owner: Connection, changed: dict[str, Any]
) -> None:
    uid = marked(owner, 4000)
    lease = begin(owner)
    keep(owner, 0, **changed)
    found = owner.execute("select * from outbox_internal.trim_inbox(%s, 10)", (lease,)).fetchall()
    assert found == [(0, False)]
    assert left(owner) == {uid}


@pytest.mark.parametrize(("days", "kept"), [(60, 90), (20, 30)])
def test_a_lower_number_of_a_first_relay_waits_if_a_mark_is_past_it(owner: Connection, days: int, kept: int) -> None:
    """That of a relay which comes to the database of a consumer: the marks of its own days would go at once."""
    marked(owner, days)
    owner.execute("update outbox.retention set keep_uids_days = 90")
    relay_says(owner, said(30))
    begin(owner)
    assert one(owner, "select keep_uids_days from outbox.retention") == kept
