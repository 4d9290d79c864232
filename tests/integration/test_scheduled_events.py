"""Scheduled events: they wait in a table of their own, enter the log when due, and can be changed until then."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import errors

from outbox_relay import outbox
from outbox_relay.outbox import InvalidEvent
from outbox_relay.postgres.migrations import migrate
from tests.support.database import Database, query
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.wait import becomes, until

HOUR = timedelta(hours=1)
ENTER = "select entered from outbox_internal.enter_scheduled(1000, '-infinity', 0)"
WAITING = "select uid from outbox.scheduled order by deliver_at, id"


@pytest.fixture
def conn(database: Database) -> Iterator[psycopg.Connection[Any]]:
    """Yield an application's connection, in a transaction."""
    with database.connect() as connection:
        yield connection


def scheduled(database: Database, after: str = "interval '1 hour'", kind: str = "job") -> UUID:
    """Emit an event that is due later, and return its uid."""
    text = f"select outbox.emit(%s, '1', key => 'k', deliver_at => clock_timestamp() + {after})"
    [(uid,)] = query(database, text, kind)
    return uid


def due(database: Database, count: int, kind: str = "job", key: str = "k") -> list[UUID]:
    """Emit events of one key that are due when this returns, in one transaction; return their uids."""
    text = (
        "select outbox.emit(%s, to_jsonb(n), key => %s, deliver_at => now() + interval '0.3 seconds') "
        "from generate_series(1, %s) n"
    )
    uids = [uid for (uid,) in query(database, text, kind, key, count)]
    time.sleep(0.35)
    return uids


def call(database: Database, statement: str, *parameters: Any) -> Any:
    """Return the only value of a statement."""
    [(value,)] = query(database, statement, *parameters)
    return value


def state(database: Database, uid: UUID) -> Any:
    """Return what `why` says of the sink s."""
    return call(database, "select outbox.why(%s) -> 'sinks' -> 's'", uid)


# -- the way into the log -----------------------------------------------------------------------------------------


def test_an_event_comes_when_it_is_due_and_not_before(database: Database) -> None:
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        late, soon = scheduled(database, "interval '2 seconds'"), scheduled(database, "interval '1 second'")
        assert query(database, "select from outbox.event") == []
        _delivered(sink, 2)
        harness.settled()
    assert [event.uid for event in sink.delivered] == [str(soon), str(late)]
    rows = query(
        database,
        "select created_at >= deliver_at, created_at - deliver_at < '2 seconds', emitted_at < deliver_at, "
        "pg_get_userbyid(emitter)::text, key from outbox.event",
    )
    assert rows == [(True, True, True, "postgres", "k")] * 2
    assert query(database, WAITING) == []
    assert query(database, "select from outbox.delivery") == []


def test_an_event_enters_as_it_was_emitted(database: Database) -> None:
    own = uuid4()
    query(
        database,
        "select outbox.emit_raw('job', '\\xff00', 'k', '{\"a\": \"1\"}', clock_timestamp() + '0.1 s', %s, 'text/x', "
        "'t', 7)",
        own,
    )
    columns = "uid, type, key, payload, content_type, headers, deliver_at, {}, tenant, priority"
    before = query(database, f"select {columns.format('emitter')} from outbox.scheduled")
    assert call(database, ENTER) == 0
    time.sleep(0.15)
    assert call(database, ENTER) == 1
    assert query(database, f"select {columns.format('pg_get_userbyid(emitter)::text')} from outbox.event") == before
    assert call(database, "select shard = outbox_internal.shard_of(key, uid) from outbox.event")
    assert call(database, "select outbox.emit_raw('job', '', uid => %s)", own) == own
    assert call(database, "select count(*) from outbox.event") == 1


def test_events_enter_in_the_order_of_their_times_and_of_their_emits(database: Database) -> None:
    later = due(database, 1, "z")
    uids = due(database, 50)
    query(database, "update outbox.scheduled set deliver_at = now() where uid = %s returning 1", later[0])
    assert call(database, "select entered from outbox_internal.enter_scheduled(20, '-infinity', 0)") == 20
    assert call(database, ENTER) == 31
    entered = [uid for (uid,) in query(database, "select uid from outbox.event order by id")]
    assert entered == uids + later


def test_from_then_on_the_key_keeps_its_order(database: Database) -> None:
    """Goes red when events that were scheduled leave the order of their key once they are in the log."""
    from outbox_relay.domain.outcomes import DELIVERED, Failed, Verdict

    uids = due(database, 3)
    fails = iter([Failed("no"), Failed("no")])

    def once(_event: Any, _attempt: int) -> Verdict:
        return next(fails, DELIVERED)

    sink = MemorySink(once)
    with running(database.dsn, (spec("s"), sink)) as harness:
        _delivered(sink, 3)
        harness.settled()
    assert [UUID(event.uid) for event in sink.delivered] == uids


@pytest.mark.fence("a relay crashes while events enter")
def test_a_crash_before_the_commit_changes_nothing(database: Database, conn: psycopg.Connection[Any]) -> None:
    [uid] = due(database, 1)
    assert conn.execute(ENTER.encode()).fetchall() == [(1,)]
    conn.rollback()
    assert query(database, WAITING) == [(uid,)]
    assert query(database, "select from outbox.event") == []
    assert call(database, ENTER) == 1


@pytest.mark.fence("two relays let events of a key enter, and commit in another order")
def test_one_session_at_a_time_lets_events_enter(database: Database, conn: psycopg.Connection[Any]) -> None:
    """Goes red when two sessions take events of a key, and commit in any order."""
    due(database, 4)
    assert conn.execute("select entered from outbox_internal.enter_scheduled(2, '-infinity', 0)").fetchall() == [(2,)]
    assert call(database, ENTER) is None
    conn.commit()
    assert call(database, ENTER) == 2


@pytest.mark.fence("an event is committed after it was due, or moved to the past, and looks begin behind it")
def test_an_event_that_was_committed_after_it_was_due_comes(database: Database, conn: psycopg.Connection[Any]) -> None:
    """Goes red when every look begins behind the last event that entered."""
    uid = outbox.emit(conn, "job", 1, deliver_at=datetime.now(UTC) + timedelta(seconds=0.2))
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)):
        scheduled(database, "interval '0.5 seconds'")
        _delivered(sink, 1)
        conn.commit()
        _delivered(sink, 2)
    assert sink.delivered[1].uid == str(uid)


# -- in time, or too late -----------------------------------------------------------------------------------------


def test_a_cancelled_event_is_never_delivered_and_a_moved_one_at_its_new_time(database: Database) -> None:
    cancelled, moved, other = (scheduled(database, "interval '1.5 seconds'") for _ in range(3))
    assert call(database, "select outbox.cancel(%s)", cancelled) is True
    assert call(database, "select outbox.reschedule(%s, clock_timestamp() + interval '3 seconds')", moved) is True
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness:
        _delivered(sink, 2)
        harness.settled()
    assert [event.uid for event in sink.delivered] == [str(other), str(moved)]
    assert sink.delivered[1].deliver_at == call(
        database, "select deliver_at from outbox.event order by id desc limit 1"
    )
    assert call(database, "select outbox.why(%s)", cancelled) is None


@pytest.mark.fence("an event is cancelled and enters the log at the same time")
def test_no_event_is_cancelled_and_delivered(database: Database) -> None:
    """Cancels race entries at the time at which events are due, within milliseconds. The last ones come at once."""
    total, sure = 150, 20
    times = query(
        database,
        "select outbox.emit('job', '1', deliver_at => at), at from generate_series(1, %s) n, "
        "lateral (select now() + interval '2 seconds' + n * interval '20 ms' as at) w "
        "order by n",
        total,
    )
    cancelled: set[UUID] = set()

    def cancel_each() -> None:
        with database.connect(autocommit=True) as connection:
            for n, (uid, at) in enumerate(times[-sure:] + times[:-sure]):
                if uid not in at_once:
                    early = 0.004 - 0.0001 * (n % 80)
                    connection.execute("select pg_sleep(extract(epoch from %s - clock_timestamp()) - %s)", (at, early))
                if outbox.cancel(connection, uid):
                    cancelled.add(uid)

    at_once = {uid for uid, _ in times[-sure:]}
    sink = MemorySink()
    canceller = threading.Thread(target=cancel_each)
    with running(database.dsn, (spec("s"), sink)) as harness:
        canceller.start()
        until(lambda: not canceller.is_alive(), seconds=60, what="every event was cancelled or too late")
        _gone(database, harness)
    delivered = [UUID(event.uid) for event in sink.delivered]
    assert len(set(delivered)) == len(delivered)
    assert set(delivered).isdisjoint(cancelled)
    assert set(delivered) | cancelled == {uid for uid, _ in times}
    assert at_once <= cancelled
    assert delivered


# -- roles and values ---------------------------------------------------------------------------------------------


def test_only_the_role_that_emitted_an_event_may_change_it(database: Database) -> None:

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
                with pytest.raises(errors.InvalidParameterValue, match='was emitted by role "changer_a", and this is'):
                    other.execute("select outbox.emit('job', '1', uid => %s)", (uid,))
                for forbidden in (
                    "select outbox_internal.change_scheduled(null, null, 'x')",
                    "select outbox_internal.enter_scheduled(1, '-infinity', 0)",
                    "select from outbox.scheduled",
                ):
                    with pytest.raises(errors.InsufficientPrivilege):
                        other.execute(forbidden.encode())
            assert outbox.cancel(mine, uid) is True
    finally:
        with database.connect(autocommit=True) as owner:
            owner.execute("drop owned by changer_a, changer_b; drop role changer_a, changer_b")


# -- people -------------------------------------------------------------------------------------------------------


@pytest.mark.fence("an erasure looks for events while one of its subject enters the log")
def test_no_event_enters_while_an_erasure_begins(database: Database, conn: psycopg.Connection[Any]) -> None:
    """Goes red when an event can enter behind the last id that the erasure looks at, before the scheduled ones."""
    [uid] = due(database, 1)
    step = "select phase, undelivered from outbox.erase('{\"key\": \"k\"}', reason => 'r', erasure_id => null)"
    assert conn.execute(step.encode()).fetchall() == [
        ("refused", [{"uid": str(uid), "sink": "", "state": "scheduled"}])
    ]
    assert call(database, ENTER) is None


def _gone(database: Database, harness: RelayHarness) -> None:
    becomes(lambda: not query(database, WAITING), "no event is scheduled")
    harness.settled()


def _delivered(sink: MemorySink, count: int) -> None:
    until(lambda: len(sink.delivered) >= count, seconds=30, what=f"{count} events were delivered")


@pytest.mark.fence("a transaction emits with the uid of a scheduled event, and stays open")
def test_an_event_enters_while_a_transaction_emits_with_its_uid(
    database: Database, conn: psycopg.Connection[Any]
) -> None:
    """Goes red when such an emit makes a row of outbox.uid: the entry waits for the transaction."""
    [uid] = due(database, 1)
    assert conn.execute("select outbox.emit('job', '2', uid => %s)", (uid,)).fetchone() == (uid,)
    with database.connect() as other:
        other.execute("set lock_timeout = '2s'")
        assert other.execute(ENTER.encode()).fetchone() == (1,)
    conn.commit()
    assert query(database, "select uid, payload from outbox.event") == [(uid, b"1")]
