"""Days that are emptied, and those that are kept: by sinks, transactions, the clock and the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from psycopg import errors

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
from tests.support.replays import act, start


@pytest.fixture
def owner(database: Database) -> Iterator[Connection]:
    """Yield a connection of the schema's owner, in autocommit mode."""
    with database.connect(autocommit=True) as connection:
        yield connection


def empty(connection: Connection, day: str, lease: int | None) -> str:
    """Empty a checked day, by one message as the relay sends it."""
    return one(connection, f"select outbox_internal.empty_day('{day}', {lease}, 3)")


def check(connection: Connection, day: str, lease: int | None) -> list[dict[str, Any]]:
    """Return the keepers of the day."""
    return one(connection, "select kept_by from outbox_internal.check_day(%s::date, %s)", day, lease)


# -- forty days ---------------------------------------------------------------------------------------------------


def test_each_day_of_forty_is_kept_by_what_needs_it_alone(database: Database, owner: Connection) -> None:
    fill_days(owner, 40, 21)
    register(owner, "crm", "now")
    owner.execute("update outbox.sink set paused = true")
    fill_days(owner, 20, 4)
    register(owner, "events", "now")
    owner.execute(DEAD.encode(), ("events", 1, one(owner, "select min(id) from outbox.event")))
    emit_ago(owner, 0)
    keep(owner, 7)
    replay = start(
        database, "events", to="events", since=f"{date_ago(38)}T00:00:00Z", until=f"{date_ago(36)}T00:00:00Z"
    )
    preview = retention(database, "run", "--dry-run", "--json").json
    assert preview["matched"] == 18
    assert events_of(owner, table_ago(40)) == 3
    ended = retention(database, "run", "--json")
    assert ended.code == 0, ended
    assert ended.json["emptied"] == [date_ago(n) for n in range(40, 20, -1) if n not in (38, 37)]
    for_replay, for_sink = [date_ago(38), date_ago(37)], [date_ago(n) for n in range(20, 7, -1)]
    assert list(ended.json["kept"]) == [*for_replay, *for_sink]
    assert all(f"replay {replay}" in ended.json["kept"][day] for day in for_replay)
    assert all("sink crm (paused)" in ended.json["kept"][day] for day in for_sink)
    assert [events_of(owner, table_ago(n)) for n in (38, 37, 36, 21, 20, 8, 7, 4)] == [3, 3, 0, 0, 3, 3, 3, 3]
    owner.execute("select outbox.drop_sink('crm', true, 1000, null, null)")
    act(database, "cancel", replay)
    assert retention(database, "run", "--json").json["left"] == 0
    assert one(owner, "select count(*) from outbox.delivery where state = 'dead'") == 1
    days = {day["day"]: day for day in retention(database, "status", "--json").json["days"]}
    assert (days[date_ago(39)]["emptied"] is not None, days[date_ago(39)]["events"]) == (True, 3)
    assert days[date_ago(7)]["emptied"] is None
    assert one(owner, "select sum(count) from outbox.audit where action = 'retention'") == 3 * 33


# -- what may change between the check and the lock -------------------------------------------------------------


@pytest.fixture
def checked(owner: Connection) -> int:
    """Return the lease under which the day of 12 days ago was checked, which nothing keeps."""
    fill_days(owner, 12, 12)
    emit_ago(owner, 0)
    keep(owner, 5)
    lease = begin(owner)
    assert lease is not None
    assert check(owner, date_ago(12), lease) == []
    return lease


@pytest.mark.fence("an event is committed into a day after it was checked")
def test_an_event_that_is_committed_after_the_check_is_kept(database: Database, owner: Connection) -> None:
    fill_days(owner, 12, 12)
    emit_ago(owner, 0)
    keep(owner, 5)
    lease = begin(owner)
    with database.connect() as late:
        late.execute("select pg_current_xact_id()")
        assert check(owner, date_ago(12), lease) == []
        emit_ago(late, 12)
        late.commit()
    assert empty(owner, date_ago(12), lease) == "again"
    emit_ago(owner, 12)
    assert empty(owner, date_ago(12), lease) == "again"
    assert events_of(owner, table_ago(12)) == 5
    assert check(owner, date_ago(12), lease) == []
    assert empty(owner, date_ago(12), lease) == "emptied"


@pytest.mark.fence("a sink is registered or moved back after the check")
@pytest.mark.parametrize("start", ["beginning", "now"])
def test_a_sink_that_is_registered_after_the_check_has_the_day_checked_again(
    owner: Connection, checked: int, start: str
) -> None:
    register(owner, "crm", start)
    assert empty(owner, date_ago(12), checked) == "again"
    assert events_of(owner, table_ago(12)) == 3
    kept = check(owner, date_ago(12), checked)
    assert [keeper["name"] for keeper in kept] == (["crm"] if start == "beginning" else [])


def test_a_latecomer_of_a_sinks_tick_keeps_its_day(database: Database, owner: Connection) -> None:
    fill_days(owner, 12, 12)
    emit_ago(owner, 0)
    keep(owner, 5)
    with database.connect() as late:
        late.execute("select pg_current_xact_id()")
        register(owner, "crm", "now")
        emit_ago(late, 12)
        late.commit()
    [keeper] = check(owner, date_ago(12), begin(owner))
    assert keeper["name"] == "crm"


@pytest.mark.fence("two processes empty a day, or one that was stopped wakes up")
def test_a_lease_that_another_process_has_claimed_counts_for_nothing(owner: Connection, checked: int) -> None:
    assert begin(owner) is None
    owner.execute("update outbox.retention set lease_until = now() - interval '1 second'")
    newer = begin(owner)
    assert newer not in (None, checked)
    for statement in (
        f"select outbox_internal.empty_day('{date_ago(12)}', {checked}, 3)",
        f"select outbox_internal.drop_day({checked})",
        f"select outbox_internal.renew_retention({checked})",
        f"select * from outbox_internal.trim_uids({checked}, 10)",
        f"select * from outbox_internal.trim_inbox({checked}, 10)",
        f"select outbox_internal.leave_day('{date_ago(12)}', {checked}, 'x')",
        f"select outbox_internal.record_archive('{date_ago(12)}', {checked}, 'x', 'y', 1)",
    ):
        with pytest.raises(errors.ObjectNotInPrerequisiteState, match="was taken over"):
            owner.execute(statement.encode())
    assert events_of(owner, table_ago(12)) == 3
    owner.execute("select outbox_internal.end_retention(%s)", (newer,))
    assert begin(owner) not in (None, newer)


def test_a_day_is_never_emptied_without_the_archive_that_the_policy_requires(owner: Connection, checked: int) -> None:
    keep(owner, 5, archive=True)
    assert empty(owner, date_ago(12), checked) == "archive"
    assert events_of(owner, table_ago(12)) == 3


# -- clock, policy and restores ---------------------------------------------------------------------------------


@pytest.mark.fence("the clock jumps ahead, and days are emptied too early")
def test_a_clock_that_jumps_ahead_empties_nothing(database: Database, owner: Connection) -> None:
    fill_days(owner, 12, 11)
    keep(owner, 5)
    ended = retention(database, "run")
    assert "the clock has jumped" in ended.out
    assert events_of(owner, table_ago(12)) == 3
    owner.execute("update outbox.retention set hold_until = null, clock_mark = now() - interval '3 days'")
    assert "the clock has jumped" in retention(database, "run").out
    held = one(owner, "select hold_until - now() from outbox.retention")
    assert 2.9 < held.total_seconds() / 86_400 < 3.1
    assert retention(database, "status", "--json").json["hold_until"]
    owner.execute("update outbox.retention set hold_until = now() - interval '1 second'")
    assert retention(database, "run", "--json").json["done"] == 2
