"""Old events of the DEFAULT partition, empty partitions, spans, uids, dead letters, and what roles may do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from tests.support.database import Database
from tests.support.days import (
    DEAD,
    Connection,
    begin,
    date_ago,
    emit_ago,
    events_of,
    fill_days,
    keep,
    one,
    register,
    retention,
    table_ago,
)


@pytest.fixture
def owner(database: Database) -> Iterator[Connection]:
    """Yield a connection of the schema's owner, in autocommit mode."""
    with database.connect(autocommit=True) as connection:
        yield connection


def test_old_events_of_the_default_partition_go_and_newer_ones_stay(database: Database, owner: Connection) -> None:
    emit_ago(owner, 20, 2500)
    owner.execute(
        "insert into outbox.event (shard, uid, type, payload, content_type, created_at)"
        " select 0, gen_random_uuid(), 'odd', '', 'x/y', t from unnest(array['infinity', now() + interval '9 years',"
        " now() + interval '40 days']::timestamptz[]) t"
    )
    emit_ago(owner, 0)
    keep(owner, 5)
    register(owner, "crm", "beginning")
    assert set(retention(database, "run", "--json").json["kept"]) == {"default"}
    owner.execute("select outbox.drop_sink('crm', true, 1000, null, null)")
    assert retention(database, "run", "--json").json["emptied"] == ["default"]
    assert events_of(owner, "event_default") == 3
    recorded = owner.execute("select count from outbox.audit where action = 'retention' order by id").fetchall()
    assert recorded == [(1000,), (1000,), (500,)]
    assert retention(database, "run", "--json").json["done"] == 0


@pytest.mark.fence("a partition with an event is removed")
def test_an_empty_partition_is_removed_and_one_with_an_event_is_not(database: Database, owner: Connection) -> None:
    fill_days(owner, 12, 11)
    emit_ago(owner, 0)
    keep(owner, 5)
    assert retention(database, "run", "--json").json["done"] == 2
    assert one(owner, "select to_regclass(%s)::text", f"outbox.{table_ago(12)}") is None
    emit_ago(owner, 11)
    [(again,)] = owner.execute("select day::text from outbox_internal.past_days()").fetchall()
    assert again == date_ago(11)
    assert one(owner, f"select outbox_internal.drop_day({begin(owner)})") is None
    assert events_of(owner, table_ago(11)) == 1
    owner.execute("update outbox.retention set owner = null")
    retention(database, "run")
    parts = owner.execute("select part, events from outbox.day where day = %s order by part", (date_ago(11),))
    assert parts.fetchall() == [(1, 3), (2, 1)]


def test_uids_are_kept_while_an_event_or_a_row_has_them(database: Database, owner: Connection) -> None:
    uids = [uuid4() for _ in range(4)]
    for uid in uids:
        owner.execute("select outbox.emit('t', '1', uid => %s)", (uid,))
    owner.execute("update outbox.uid set created_at = now() - interval '20 days' where uid <> %s", (uids[3],))
    [row_id] = emit_ago(owner, 0)
    owner.execute("update outbox.event set uid = %s where id = %s", (uids[1], row_id))
    owner.execute(DEAD.encode(), ("s", 0, row_id))
    owner.execute("delete from outbox.event where uid = any (%s)", (uids[1:],))
    keep(owner, 0, keep_uids_days=10)
    assert "uids removed: 1" in retention(database, "run").out
    left = {uid for (uid,) in owner.execute("select uid from outbox.uid").fetchall()}
    assert left == {uids[0], uids[1], uids[3]}


def test_dead_letters_are_discarded_by_the_time_of_their_death(database: Database, owner: Connection) -> None:
    ids = emit_ago(owner, 0, 4)
    register(owner, "crm", "now")
    for row_id, since in zip(ids, (20, 20, 3, 20), strict=True):
        owner.execute(DEAD.encode(), ("crm", since, row_id))
    owner.execute("update outbox.delivery set due_at = since")
    owner.execute("update outbox.delivery set last_attempt_at = now() - interval '1 day' where id = %s", (ids[1],))
    owner.execute("update outbox.delivery set state = 'waiting' where id = %s", (ids[3],))
    keep(owner, 0, keep_dead_days=10)
    assert "dead letters discarded: 1" in retention(database, "run").out
    assert one(owner, "select array_agg(id order by id) from outbox.delivery") == ids[1:]
    marks = owner.execute("select sink, id, reason, actor from outbox.discarded").fetchall()
    [(sink, row_id, reason, actor)] = marks
    assert (sink, row_id, "keep_dead_days" in reason, "@" in actor) == ("crm", ids[0], True, True)
    assert one(owner, "select count from outbox.audit where action = 'retention dead'") == 1


def dead_rows(owner: Connection, ids: list[int], days: int = 20) -> None:
    """Add dead rows that died so many days ago."""
    for row_id in ids:
        owner.execute(DEAD.encode(), ("crm", days, row_id))
    owner.execute("update outbox.delivery set due_at = since")


def discard_step(owner: Connection, most: int) -> tuple[Any, ...]:
    """Return the result of one step of a pass."""
    owner.execute("update outbox.retention set owner = null")
    [found] = owner.execute(
        f"select * from outbox_internal.discard_expired({begin(owner)}, {most})".encode()
    ).fetchall()
    return found


@pytest.mark.fence("a discarded event is read and delivered again")
def test_a_dead_letter_that_would_be_read_again_is_not_discarded(owner: Connection) -> None:
    """A session that begins at the stored position delivers the event, which a mark would not prevent on version 2."""
    ids = emit_ago(owner, 0, 4)
    register(owner, "crm", "beginning")
    dead_rows(owner, ids)
    keep(owner, 0, keep_dead_days=10)
    assert discard_step(owner, 1000) == (0, False)
    assert one(owner, "select count(*) from outbox.discarded") == 0
    owner.execute("update outbox.progress set a_seq = %s, a_snapshot = pg_current_snapshot()", (ids[-1],))
    newer = "update outbox.shard set epoch = epoch + 1 where shard = (select shard from outbox.event where id = %s)"
    owner.execute(newer.encode(), (ids[0],))
    stale = one(owner, "select count(*) from outbox.event e join outbox.shard s using (shard) where s.epoch & 1 = 1")
    assert stale >= 1
    assert discard_step(owner, 1000) == (4 - stale, False)


# -- roles ------------------------------------------------------------------------------------------------------
