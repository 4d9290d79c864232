"""Scheduled events that are cancelled or moved: in time or not, before and after a sink has made rows of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import errors

from outbox_relay import outbox
from outbox_relay.outbox import InvalidEvent
from tests.support.database import Database, query
from tests.support.memory_sink import BOTH, MemorySink
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.replays import Clients, ended, start
from tests.support.sink_actions import seek
from tests.support.wait import auntil, becomes

HOUR = timedelta(hours=1)
SOON = "clock_timestamp() + interval '1 second'"
ROWS = "select state, due_at = deliver_at, deliver_at - clock_timestamp() > '30 minutes' from outbox.delivery"
MARKS = "select sink, reason, role_name from outbox.discarded order by sink"
CHANGES = "select outbox_internal.apply_scheduled_changes(500)"


@pytest.fixture
def conn(database: Database) -> Iterator[psycopg.Connection[Any]]:
    """Yield an application's connection, in a transaction."""
    with database.connect() as connection:
        yield connection


def scheduled(database: Database, after: str = "interval '1 hour'") -> UUID:
    """Emit an event that is due later, and return its uid."""
    [(uid,)] = query(database, f"select outbox.emit('job', '1', key => 'k', deliver_at => clock_timestamp() + {after})")
    return uid


def call(database: Database, statement: str, *parameters: Any) -> Any:
    """Return the only value of a statement."""
    [(value,)] = query(database, statement, *parameters)
    return value


async def parked(database: Database) -> None:
    """Wait until a sink has made a row."""
    await becomes(lambda: query(database, "select from outbox.delivery"), "the event is a row")


def state(database: Database, uid: UUID) -> Any:
    """Return what `why` says of the sink s."""
    return call(database, "select outbox.why(%s) -> 'sinks' -> 's'", uid)


# -- without a row ------------------------------------------------------------------------------------------------


@BOTH
async def test_an_event_that_was_cancelled_before_it_was_read_is_never_delivered(
    database: Database, keeps_order: bool
) -> None:
    uids = [scheduled(database, "interval '1 second'") for _ in range(3)]
    assert call(database, "select outbox.cancel(%s)", uids[1]) is True
    await becomes(lambda: call(database, f"select {SOON} > max(deliver_at) + '1 s' from outbox.event"), "all are due")
    sink = MemorySink(keeps_order=keeps_order)
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await _delivered(sink, 2)
        await harness.settled()
    assert [event.uid for event in sink.delivered] == [str(uids[0]), str(uids[2])]
    assert query(database, MARKS) == [("s", "cancelled", "postgres")]
    assert state(database, uids[1])["state"] == "discarded"


async def test_why_says_cancelled_before_any_sink_has_read_the_event(database: Database) -> None:
    async with running(database.dsn, (spec("s"), MemorySink())) as harness:
        await harness.settled()
    uid = scheduled(database)
    assert state(database, uid)["state"] == "scheduled"
    assert call(database, "select outbox.cancel(%s)", uid) is True
    told = state(database, uid)
    assert (told["state"], told["reason"], told["role"]) == ("discarded", "cancelled", "postgres")


@BOTH
async def test_an_event_that_was_moved_before_it_was_read_comes_at_its_new_time(
    database: Database, keeps_order: bool
) -> None:
    uid = scheduled(database)
    other = scheduled(database, "interval '0.1 seconds'")
    assert call(database, "select outbox.reschedule(%s, clock_timestamp() + interval '3 seconds')", uid) is True
    sink = MemorySink(keeps_order=keeps_order)
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await _delivered(sink, 2)
        await harness.settled()
    assert [event.uid for event in sink.delivered] == [str(other), str(uid)]
    moved = call(database, "select deliver_at from outbox.scheduled_change")
    assert sink.delivered[1].deliver_at == moved <= call(database, "select clock_timestamp()")


async def test_an_event_that_was_due_when_it_was_emitted_keeps_the_order_of_its_key(database: Database) -> None:
    with database.connect(autocommit=True) as connection:
        connection.execute("select outbox.emit('a', '1', key => 'k', deliver_at => now() - interval '1 hour')")
        connection.execute("select outbox.emit('b', '1', key => 'k')")
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await _delivered(sink, 2)
        await harness.settled()
        assert harness.store.calls["claim_rows"] == 0 or not harness.store.returned["claim_rows"]
    assert [event.type for event in sink.delivered] == ["a", "b"]


async def test_seeks_replays_and_new_sinks_leave_a_cancelled_event_out(database: Database) -> None:
    """Its change and its marks keep it out, each of them. Takes the time of a lease."""
    cancelled, other = (scheduled(database, "interval '0.3 seconds'") for _ in range(2))
    assert call(database, "select outbox.cancel(%s)", cancelled) is True
    sink, late, clients = MemorySink(), MemorySink(), Clients()
    options: Any = {"lease_seconds": 1.5, "expects": {"reload", "lease_lost"}, "replay_client": clients}
    async with running(database.dsn, (spec("s"), sink), (spec("late"), late), **options) as harness:
        await _delivered(sink, 1)
        await _delivered(late, 1)
        await _gone(database, harness)
        passed = "select from outbox_internal.backlog('s', null, 1000, 5.0) where events = 0"
        await becomes(lambda: query(database, passed), "a replay may deliver them")
        number = start(database, since="PT1H")
        await ended(database, number)
        await asyncio.to_thread(seek, database, "s", "beginning")
        await _delivered(sink, 2)
        await _gone(database, harness)
    assert [event.uid for event in [*sink.delivered, *late.delivered, *clients.delivered(number)]] == [str(other)] * 4


# -- with a row ---------------------------------------------------------------------------------------------------


@BOTH
async def test_a_row_of_a_cancelled_event_is_removed(database: Database, keeps_order: bool) -> None:
    uid = scheduled(database)
    async with running(database.dsn, (spec("s"), MemorySink(keeps_order=keeps_order))):
        await parked(database)
        assert call(database, "select outbox.cancel(%s)", uid) is True
        assert call(database, CHANGES) == 1
        assert query(database, ROWS) == []
    assert query(database, MARKS) == [("s", "cancelled", "postgres")]
    assert state(database, uid)["state"] == "discarded"


async def test_a_row_is_moved_to_an_earlier_time_and_to_a_later_one(database: Database) -> None:
    early, late = scheduled(database), scheduled(database, "interval '2 seconds'")
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)):
        await becomes(lambda: len(query(database, ROWS)) == 2, "both are rows")
        assert call(database, "select outbox.reschedule(%s, clock_timestamp() + interval '1 hour')", late) is True
        assert call(database, f"select outbox.reschedule(%s, {SOON})", early) is True
        assert call(database, CHANGES) == 2
        await _delivered(sink, 1)
        await becomes(lambda: query(database, ROWS) == [("waiting", True, True)], "the other one waits for its time")
    assert sink.delivered[0].uid == str(early)


async def test_a_change_that_no_relay_has_carried_out_is_obeyed_when_the_row_is_due(database: Database) -> None:
    """The claim looks for changes itself: nothing rests on the chore."""
    cancelled, moved, due = (scheduled(database, "interval '1.5 seconds'") for _ in range(3))
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)):
        await becomes(lambda: len(query(database, ROWS)) == 3, "all are rows")
        assert call(database, "select outbox.cancel(%s)", cancelled) is True
        assert call(database, "select outbox.reschedule(%s, clock_timestamp() + interval '1 hour')", moved) is True
        await _delivered(sink, 1)
        await becomes(lambda: query(database, ROWS) == [("waiting", True, True)], "the moved one waits for its time")
    assert sink.delivered[0].uid == str(due)
    assert query(database, MARKS) == [("s", "cancelled", "postgres")]


async def test_a_row_waits_for_the_transaction_that_may_have_changed_its_event(
    database: Database, conn: psycopg.Connection[Any]
) -> None:
    """While it is open neither answer is right. Other rows flow."""
    first, other = scheduled(database, "interval '1 second'"), scheduled(database, "interval '1.1 seconds'")
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)):
        assert outbox.cancel(conn, first) is True
        await _delivered(sink, 1)
        await becomes(
            lambda: query(database, "select from outbox.delivery where due_at > deliver_at"),
            "the row is looked at later",
        )
        conn.rollback()
        await _delivered(sink, 2)
    assert [event.uid for event in sink.delivered] == [str(other), str(first)]
    assert query(database, MARKS) == []


async def test_a_change_that_commits_while_its_row_is_made_is_obeyed(
    database: Database, conn: psycopg.Connection[Any]
) -> None:
    """The settlement that makes the row does not see it, and the application does not see the row."""
    uid = scheduled(database)
    assert outbox.reschedule(conn, uid, datetime.now(UTC) + timedelta(seconds=1)) is True
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)):
        await parked(database)
        assert query(database, ROWS) == [("waiting", True, True)]
        conn.commit()
        assert call(database, CHANGES) == 1
        await _delivered(sink, 1)
    assert query(database, "select looks, look_at > clock_timestamp() from outbox.scheduled_change") == [(1, True)]


async def test_changes_are_looked_at_twice_and_go_with_their_event(database: Database) -> None:
    uid = scheduled(database)
    async with running(database.dsn, (spec("s"), MemorySink())):
        await parked(database)
        call(database, "select outbox.cancel(%s)", uid)
        assert call(database, CHANGES) == 1
        assert call(database, CHANGES) == 0
        query(database, "update outbox.scheduled_change set look_at = clock_timestamp() returning 1")
        assert call(database, CHANGES) == 1
        assert query(database, "select looks, look_at from outbox.scheduled_change") == [(2, None)]
    assert call(database, "select outbox_internal.trim_scheduled_changes(100)") == 0
    query(database, "delete from outbox.event returning 1")
    query(database, "insert into outbox.event (shard, uid, type, payload) values (0, %s, 't', '') returning 1",
          uuid4())  # fmt: skip
    assert call(database, "select outbox_internal.trim_scheduled_changes(100)") == 1


# -- in time, or too late -----------------------------------------------------------------------------------------


def test_an_event_can_be_changed_in_its_own_transaction(database: Database, conn: psycopg.Connection[Any]) -> None:
    uid = outbox.emit(conn, "job", 1, deliver_at=datetime.now(UTC) + HOUR)
    assert outbox.reschedule(conn, uid, datetime.now(UTC) + 2 * HOUR) is True
    assert outbox.cancel(conn, uid) is True
    conn.commit()
    assert call(database, "select deliver_at is null from outbox.scheduled_change") is True


def test_a_change_that_is_rolled_back_has_not_happened(database: Database, conn: psycopg.Connection[Any]) -> None:
    uid = scheduled(database)
    assert outbox.cancel(conn, uid) is True
    conn.rollback()
    assert query(database, "select from outbox.scheduled_change") == []


def test_what_is_not_in_time_changes_nothing(database: Database, conn: psycopg.Connection[Any]) -> None:
    at_once = outbox.emit(conn, "job", 1)
    due = outbox.emit(conn, "job", 1, deliver_at=datetime.now(UTC))
    conn.commit()
    later = datetime.now(UTC) + HOUR
    for uid in (at_once, due, uuid4()):
        assert outbox.cancel(conn, uid) is False
        assert outbox.reschedule(conn, uid, later) is False
    assert query(database, "select from outbox.scheduled_change") == []


def test_a_cancelled_event_stays_cancelled(conn: psycopg.Connection[Any]) -> None:
    uid = outbox.emit(conn, "job", 1, deliver_at=datetime.now(UTC) + HOUR)
    assert outbox.cancel(conn, uid) is True
    assert outbox.cancel(conn, uid) is True
    assert outbox.reschedule(conn, uid, datetime.now(UTC) + HOUR) is False


async def test_an_event_whose_day_was_emptied_can_be_changed(database: Database) -> None:
    """Reminders for next year outlive the log."""
    cancelled, moved = scheduled(database), scheduled(database)
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await becomes(lambda: len(query(database, ROWS)) == 2, "both are rows")
        await harness.settled()
        query(database, "delete from outbox.event returning 1")
        assert call(database, "select outbox.cancel(%s)", cancelled) is True
        assert call(database, f"select outbox.reschedule(%s, {SOON})", moved) is True
        assert call(database, CHANGES) == 2
        await _delivered(sink, 1)
        await becomes(lambda: query(database, ROWS) == [], "no row is left")
    assert sink.delivered[0].uid == str(moved)
    assert query(database, MARKS) == [("s", "cancelled", "postgres")]


def test_a_change_locks_no_other_day_of_the_log(database: Database, conn: psycopg.Connection[Any]) -> None:
    """Emptying a day waits for every transaction that has it locked."""
    own = uuid4()
    first = scheduled(database)
    query(
        database, "select outbox.emit('job', '1', uid => %s, deliver_at => clock_timestamp() + interval '1 hour')", own
    )
    query(database, "select outbox_internal.make_partitions(10)")
    for uid in (first, own):
        assert outbox.cancel(conn, uid) is True
    found = conn.execute(
        "select count(distinct c.relname) from pg_locks l join pg_class c on c.oid = l.relation "
        "where l.pid = pg_backend_pid() and c.relispartition and c.relkind = 'r' and c.relname like 'event%%'"
    ).fetchone()
    assert found is not None
    assert 1 <= found[0] <= 2, "of eleven; two only around midnight"


def test_a_transaction_changes_a_bounded_number_of_events(database: Database, conn: psycopg.Connection[Any]) -> None:
    """Each holds a lock, of which the server has room for some thousands."""
    uids = query(
        database,
        "select outbox.emit('job', '1', deliver_at => now() + interval '1 hour') from generate_series(1, 1001)",
    )
    counted = "select count(*) filter (where outbox.cancel(u)) from unnest(%s::uuid[]) u"
    assert conn.execute(counted, ([uid for (uid,) in uids[:1000]],)).fetchall() == [(1000,)]
    with pytest.raises(InvalidEvent, match="a transaction can change at most 1000 scheduled events"):
        outbox.cancel(conn, uids[1000][0])
    conn.rollback()
    assert outbox.cancel(conn, uids[1000][0]) is True


@pytest.mark.parametrize("value", ["abc", "-5", "99999999999", " "])
def test_a_default_of_the_role_for_the_count_of_changes_is_no_error(database: Database, value: str) -> None:
    uid = scheduled(database)
    with database.connect() as connection:
        connection.execute("select set_config('outbox.scheduled_changes', %s, false)", (value,))
        assert outbox.cancel(connection, uid) is True


async def test_rows_of_open_changes_hold_up_no_others(database: Database, conn: psycopg.Connection[Any]) -> None:
    """However many of them are due, the next one that is not changed is claimed with them."""
    uids = query(
        database,
        "select outbox.emit('job', '1', deliver_at => now() + interval '1 second') from generate_series(1, 60)",
    )
    other = scheduled(database, "interval '1.2 seconds'")
    sink = MemorySink(keeps_order=False, max_in_flight=4)
    async with running(database.dsn, (spec("s"), sink)):
        for (uid,) in uids:
            assert outbox.cancel(conn, uid) is True
        await _delivered(sink, 1)
        [(late,)] = query(database, "select clock_timestamp() - deliver_at from outbox.event where uid = %s", other)
        conn.rollback()
    assert late < timedelta(seconds=5), "it waited for a turn for each four rows that are locked"
    assert sink.delivered[0].uid == str(other)


def test_an_event_that_was_moved_to_the_past_is_due(conn: psycopg.Connection[Any]) -> None:
    uid = outbox.emit(conn, "job", 1, deliver_at=datetime.now(UTC) + HOUR)
    assert outbox.reschedule(conn, uid, datetime(1999, 1, 1, tzinfo=UTC)) is True
    assert outbox.cancel(conn, uid) is False


async def test_an_event_that_a_sink_has_tried_cannot_be_changed(database: Database) -> None:
    """Not even if the clock of the server goes back behind its time."""
    uid = scheduled(database, "interval '0.2 seconds'")
    async with running(database.dsn, (spec("s"), MemorySink(lambda _event, _attempt: _failed()))):
        await becomes(lambda: query(database, "select from outbox.delivery where attempts > 0"), "it was tried")
    with database.connect(autocommit=True) as owner:
        owner.execute("update outbox.event set deliver_at = clock_timestamp() + interval '1 hour'")
    assert call(database, "select outbox.cancel(%s)", uid) is False


def test_only_the_role_that_emitted_an_event_may_change_it(database: Database) -> None:
    from outbox_relay.postgres.migrations import migrate

    with database.connect(autocommit=True) as owner:
        for role in ("changer_a", "changer_b"):
            owner.execute(f"drop role if exists {role}".encode())
            owner.execute(f"create role {role} login".encode())
    migrate(database.dsn, grant_emit=["changer_a", "changer_b"])
    try:
        with database.connect(user="changer_a") as mine:
            uid = outbox.emit(mine.cursor(), "job", 1, deliver_at=datetime.now(UTC) + HOUR)
            mine.commit()
            with database.connect(user="changer_b", autocommit=True) as other:
                with pytest.raises(InvalidEvent, match='was emitted by role "changer_a", and this is role "changer_b"'):
                    outbox.cancel(other, uid)
                with pytest.raises(errors.InsufficientPrivilege):
                    other.execute("select outbox_internal.change_scheduled(%s, null, 'x')", (uid,))
            assert outbox.cancel(mine, uid) is True
    finally:
        with database.connect(autocommit=True) as owner:
            owner.execute("drop owned by changer_a, changer_b; drop role changer_a, changer_b")


@pytest.mark.parametrize("at", ["infinity", "-infinity", "20000-01-01", "0044-03-15 BC", None])
def test_a_time_that_no_client_can_load_is_refused(database: Database, at: str | None) -> None:
    uid = scheduled(database)
    with pytest.raises(errors.InvalidParameterValue, match=r"outbox\.reschedule: at must be in the years 1 to 9998"):
        query(database, "select outbox.reschedule(%s, %s::timestamptz)", uid, at)
    with pytest.raises(errors.InvalidParameterValue, match=r"outbox\.cancel: uid must not be null"):
        query(database, "select outbox.cancel(null)")


def test_values_that_cannot_be_sent_are_refused(conn: psycopg.Connection[Any]) -> None:
    with pytest.raises(TypeError, match=r"uid must be a uuid\.UUID, not str"):
        outbox.cancel(conn, "a")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidEvent, match="at must have a time zone"):
        outbox.reschedule(conn, uuid4(), datetime(2030, 1, 1))  # noqa: DTZ001
    with pytest.raises(TypeError, match="cancel takes a psycopg Connection or Cursor"):
        outbox.cancel(object(), uuid4())  # pyright: ignore[reportArgumentType]


async def test_the_asynchronous_functions_do_the_same(database: Database) -> None:
    connection = await database.aconnect()
    async with connection:
        uid = await outbox.aemit(connection, "job", 1, deliver_at=datetime.now(UTC) + HOUR)
        assert await outbox.areschedule(connection, uid, datetime.now(UTC) + 2 * HOUR) is True
        assert await outbox.acancel(connection, uid) is True


# -- races --------------------------------------------------------------------------------------------------------


async def test_no_event_is_cancelled_and_delivered(database: Database) -> None:
    """Cancels race claims at the time at which events are due, within milliseconds. The last ones come at once."""
    total, sure = 150, 20
    due = query(
        database,
        "select outbox.emit('job', '1', deliver_at => at), at from generate_series(1, %s) n, "
        "lateral (select now() + interval '2 seconds' + n * interval '20 ms' as at) w "
        "order by n",
        total,
    )
    cancelled: set[UUID] = set()

    def cancel_each() -> None:
        with database.connect(autocommit=True) as connection:
            for n, (uid, at) in enumerate(due[-sure:] + due[:-sure]):
                if uid not in at_once:
                    early = 0.004 - 0.0001 * (n % 80)
                    connection.execute("select pg_sleep(extract(epoch from %s - clock_timestamp()) - %s)", (at, early))
                if outbox.cancel(connection, uid):
                    cancelled.add(uid)

    at_once = {uid for uid, _ in due[-sure:]}
    sink = MemorySink()
    canceller = threading.Thread(target=cancel_each)
    async with running(database.dsn, (spec("s"), sink)) as harness:
        canceller.start()
        await auntil(lambda: _ended(canceller), seconds=60, what="every event was cancelled or too late")
        await _gone(database, harness)
    delivered = [UUID(event.uid) for event in sink.delivered]
    assert len(set(delivered)) == len(delivered)
    assert set(delivered).isdisjoint(cancelled)
    assert set(delivered) | cancelled == {uid for uid, _ in due}
    assert at_once <= cancelled
    assert delivered


async def _gone(database: Database, harness: RelayHarness) -> None:
    await becomes(lambda: not query(database, "select from outbox.delivery"), "no row is left")
    await harness.settled()


async def _ended(thread: threading.Thread) -> bool:
    return not thread.is_alive()


def _failed() -> Any:
    from outbox_relay.domain.outcomes import Failed

    return Failed("no")


async def _delivered(sink: MemorySink, count: int) -> None:
    async def fact() -> bool:
        return len(sink.delivered) >= count

    await auntil(fact, seconds=30, what=f"{count} events were delivered")
