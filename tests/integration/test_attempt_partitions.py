"""Partitions of recorded attempts: made ahead, and removed when they are old."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tests.support.database import Database, query
from tests.support.days import one, retention

PARTITIONS = """
select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid
 where i.inhparent = 'outbox.attempt'::regclass order by c.relname"""
PUT = """
insert into outbox.attempt (at, uid, sink, id, number, relay, outcome)
values (%s, gen_random_uuid(), 's', 1, 1, 'r', 'failed')"""
ONE_DAY_OLD = """
create table outbox.{0} (like outbox.attempt including defaults);
alter table outbox.attempt attach partition outbox.{0} for values from ('{1}') to ('{2}')"""


def name_of(day: datetime) -> str:
    """Return the name of the partition of a day."""
    return f"attempt_{day:%Y%m%d}"


def old_partition(database: Database, days_ago: int) -> str:
    """Attach the partition of a day in the past, with one attempt, and return its name."""
    day = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=days_ago)
    with database.connect(autocommit=True) as connection:
        connection.execute(ONE_DAY_OLD.format(name_of(day), day, day + timedelta(days=1)).encode())
        connection.execute(PUT, (day,))
    return name_of(day)


def trim(database: Database, change: str = "keep_attempts_days = 14", user: str | None = None) -> int:
    """Do one step under a lease, with a changed policy, and return the number of removed partitions or rows."""
    with database.connect(autocommit=True) as connection:
        connection.execute(f"update outbox.retention set owner = null, {change}".encode())
    with database.connect(autocommit=True, **({"user": user} if user else {})) as connection:
        lease = one(connection, "select lease from outbox_internal.begin_retention(gen_random_uuid(), 'test', 60)")
        if "hold_until" in change:
            with database.connect(autocommit=True) as admin_connection:
                admin_connection.execute(f"update outbox.retention set {change}".encode())
        return one(connection, f"select outbox_internal.trim_attempts({lease})")


def test_partitions_are_made_ahead_and_each_finds_a_uid_by_its_index(database: Database) -> None:
    today = datetime.now(UTC)
    wanted = [*(name_of(today + timedelta(days=n)) for n in range(4)), "attempt_default"]
    assert [name for (name,) in query(database, PARTITIONS)] == wanted
    assert query(database, "select outbox_internal.make_partitions(5, 'attempt')") == [(2,)]
    assert query(database, "select outbox_internal.make_partitions(null, 'attempt')") == [(0,)]
    assert len(query(database, PARTITIONS)) == 7
    indexed = query(
        database,
        "select count(*) from pg_indexes where schemaname = 'outbox' and indexdef like '%%ON outbox.attempt\\_%%(uid)'",
    )
    assert indexed == [(7,)]


def test_old_attempts_are_removed_a_step_at_a_time_and_young_ones_kept(database: Database) -> None:
    kept = [old_partition(database, days) for days in (14, 13, 1)]
    gone = [old_partition(database, days) for days in (16, 40)]
    with database.connect(autocommit=True) as connection:
        default = connection.cursor()
        long_ago = datetime(2020, 1, 1, tzinfo=UTC)
        default.executemany(PUT.encode(), [(long_ago + timedelta(seconds=n),) for n in range(1500)])
        default.execute(PUT.encode(), (datetime.now(UTC) - timedelta(days=13, hours=23, minutes=50),))
    steps = [trim(database) for _ in range(5)]
    assert steps == [1, 1, 1000, 500, 0]
    names = {name for (name,) in query(database, PARTITIONS)}
    assert names >= {*kept, "attempt_default"}
    assert not names & set(gone)


def test_a_pass_removes_attempts_that_are_older_than_the_policy(database: Database) -> None:
    old, kept = old_partition(database, 40), old_partition(database, 20)
    with database.connect(autocommit=True) as connection:
        connection.execute("update outbox.retention set keep_attempts_days = 30")
    assert "partitions and rows of old attempts removed: 1" in retention(database, "run").out
    names = {name for (name,) in query(database, PARTITIONS)}
    assert (old in names, kept in names) == (False, True)
