"""Old events of the DEFAULT partition, empty partitions, spans, uids, dead letters, and what roles may do."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from psycopg import IsolationLevel, errors

from outbox_relay.postgres.migrations import migrate
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
    make_day,
    one,
    register,
    retention,
    table_ago,
)
from tests.support.roles import new_role


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


def test_a_partition_is_not_removed_while_an_emitter_is_open(database: Database, owner: Connection) -> None:
    make_day(owner, 12)
    keep(owner, 5)
    lease = begin(owner)
    with database.connect() as app:
        app.execute("select outbox.emit('a', '1')")
        assert one(owner, f"select outbox_internal.drop_day({lease})") is None
    assert str(one(owner, f"select outbox_internal.drop_day({lease})")) == date_ago(12)


@pytest.mark.parametrize(
    ("keep_days", "lengths"), [(0, {31}), (1, {1}), (13, {1}), (14, {2}), (90, {12}), (3650, {31})]
)
def test_the_span_of_partitions_grows_with_the_retention(owner: Connection, keep_days: int, lengths: set[int]) -> None:
    keep(owner, keep_days)
    before = one(owner, "select array_agg(part::text) from outbox_internal.partitions()")
    owner.execute("select outbox_internal.make_partitions(30)")
    owner.execute("select outbox_internal.make_partitions(30)")
    spans = owner.execute(
        "select p.day, (p.upto at time zone 'UTC')::date from outbox_internal.partitions() p"
        " where p.part::text <> all (%s) order by 1",
        (before,),
    ).fetchall()
    assert {(upto - day).days for day, upto in spans} == lengths
    assert [upto for _, upto in spans[:-1]] == [day for day, _ in spans[1:]]


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


def test_rows_that_are_left_do_not_hide_those_behind_them(owner: Connection) -> None:
    ids = emit_ago(owner, 0, 5)
    register(owner, "crm", "now")
    dead_rows(owner, ids[:4], days=1)
    dead_rows(owner, ids[4:])
    keep(owner, 0, keep_dead_days=10)
    assert [discard_step(owner, 2) for _ in range(4)] == [(0, True), (0, True), (1, False), (0, True)]


def test_a_mark_has_the_id_of_the_log_and_replaces_an_older_one(owner: Connection) -> None:
    [row_id] = emit_ago(owner, 0)
    register(owner, "crm", "now")
    dead_rows(owner, [row_id])
    owner.execute("update outbox.delivery set id = id + 1000000")
    owner.execute("insert into outbox.uid (uid, id) select uid, id from outbox.event")
    owner.execute(
        "insert into outbox.discarded (sink, id, uid, reason) values ('crm', %s, gen_random_uuid(), 'x')", (row_id,)
    )
    keep(owner, 0, keep_dead_days=10)
    assert discard_step(owner, 1000) == (1, False)
    uid = one(owner, "select uid from outbox.event")
    assert owner.execute("select id, uid from outbox.discarded").fetchall() == [(row_id, uid)]


MARK = "insert into outbox.discarded (sink, id, uid, at, reason) values (%s, %s, gen_random_uuid(), now() - %s, 'x')"


def test_marks_go_a_week_after_the_discard_once_their_events_have_left_the_log(owner: Connection) -> None:
    ids = emit_ago(owner, 0, 4)
    for sink in ("crm", "erp"):
        register(owner, sink, "now")
    old, young = timedelta(days=7, minutes=1), timedelta(days=6, hours=23)
    for row_id, age in zip(ids, (old, young, old, old), strict=True):
        owner.execute(MARK, ("crm", row_id, age))
    owner.execute(MARK, ("erp", ids[0], old))
    trim = "select outbox_internal.trim_discarded(1000)"
    assert one(owner, trim) == 0, "the log has every event"
    owner.execute("delete from outbox.event where id = any (%s)", (ids[1:],))
    assert one(owner, trim) == 0, "it has the first one, and ids are removed from the lowest on"
    owner.execute("delete from outbox.event")
    assert one(owner, trim) == 0, "the lowest id of an empty log is not known"
    emit_ago(owner, 0)
    assert one(owner, trim) == 4
    assert owner.execute("select sink, id from outbox.discarded").fetchall() == [("crm", ids[1])]


def test_marks_are_found_by_their_index_in_bounded_steps(owner: Connection) -> None:
    """Goes red when a step looks at all marks of a sink."""
    register(owner, "crm", "now")
    owner.execute("select setval('outbox.event_id_seq', 1000000)")
    emit_ago(owner, 0)
    owner.execute(
        "insert into outbox.discarded (sink, id, uid, at, reason) "
        "select 'crm', n, gen_random_uuid(), now() - interval '8 days', 'x' from generate_series(1, 5000) n"
    )
    owner.execute("vacuum analyze outbox.discarded")
    looked_at = (
        "select (seq_tup_read + idx_tup_fetch)::bigint from pg_stat_xact_user_tables "
        "where schemaname = 'outbox' and relname = 'discarded'"
    )
    with owner.transaction():
        assert one(owner, "select outbox_internal.trim_discarded(100)") == 100
        assert one(owner, looked_at) <= 200
    assert one(owner, "select min(id) from outbox.discarded") == 101
    assert one(owner, "select outbox_internal.trim_discarded(0)") == 1, "at least one"


def test_keep_dead_days_counts_from_the_death_and_not_from_the_parking(owner: Connection) -> None:
    """A row that dies by a fault has no attempt, and relays of version 2 do not set `since`."""
    [row_id] = emit_ago(owner, 0)
    register(owner, "crm", "now")
    dead_rows(owner, [row_id])
    owner.execute("update outbox.delivery set state = 'waiting'")
    owner.execute("update outbox.delivery set state = 'dead'")
    keep(owner, 0, keep_dead_days=10)
    assert discard_step(owner, 1000) == (0, False)
    assert one(owner, "select since > now() - interval '1 minute' from outbox.delivery")


def test_each_step_through_the_default_partition_begins_behind_the_one_before(
    database: Database, owner: Connection
) -> None:
    """An old snapshot keeps the index entries of deleted events, which each step would walk through again."""
    emit_ago(owner, 20, 10_500)
    owner.execute(
        "insert into outbox.event (shard, uid, type, payload, content_type, created_at)"
        " select 0, gen_random_uuid(), 't', '', 'x/y', now() + interval '40 days' from generate_series(1, 20000)"
    )
    owner.execute("analyze outbox.event_default")
    keep(owner, 5)
    lease = begin(owner)
    owner.execute(f"select outbox_internal.check_day('-infinity', {lease})".encode())
    with database.connect() as reader:
        reader.isolation_level = IsolationLevel.REPEATABLE_READ
        reader.execute("select from outbox.meta")
        pages = [pages_of(owner, f"select outbox_internal.empty_day('-infinity', {lease}, 0)") for _ in range(10)]
    assert max(pages[2:]) < pages[1] + 500, pages  # else 1,000 more with each step
    assert events_of(owner, "event_default") == 20_500


def pages_of(owner: Connection, statement: str) -> int:
    """Return the number of pages that a statement touches."""
    explained = f"explain (analyze, buffers, format json) {statement}"
    [(plan,)] = owner.execute(explained.encode(), prepare=False).fetchall()
    return plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"]


# -- roles ------------------------------------------------------------------------------------------------------


def test_who_may_do_what(database: Database, owner: Connection) -> None:
    fill_days(owner, 12, 12)
    emit_ago(owner, 0)
    keep(owner, 5)
    with (
        new_role(database, "operate") as operate,
        new_role(database, "read") as reader,
        new_role(database, "stranger") as stranger,
    ):
        migrate(database.dsn, grants={"operate": [operate], "read": [reader]})
        assert retention(database, "status", user=reader).code == 0
        for user, arguments in ((reader, ("run",)), (reader, ("run", "--dry-run"))):
            ended = retention(database, *arguments, user=user)
            assert (ended.code, "migrate --grant-operate ROLE" in ended.err) == (2, True), ended
        ended = retention(database, "status", user=stranger)
        assert ended.code == 2
        assert len(ended.err.splitlines()) == 1
        assert retention(database, "run", "--dry-run", user=operate).code == 0
        assert retention(database, "run", "--json", user=operate).json["done"] == 1
        with database.connect(user=operate) as connection, pytest.raises(errors.InsufficientPrivilege):
            connection.execute(
                f"select outbox_internal.read_day_events('{date_ago(12)}', 1, 0, gen_random_uuid(), 1, 1)".encode()
            )
        role = one(owner, "select role_name from outbox.audit where action = 'retention'")
        assert role == operate
