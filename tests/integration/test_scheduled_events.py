"""Scheduled events: they wait in a table of their own, enter the log when due, and can be changed until then."""

from __future__ import annotations

import asyncio
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
from tests.support.command import inside
from tests.support.database import Database, query
from tests.support.memory_sink import BOTH, MemorySink
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.roles import new_role
from tests.support.wait import auntil, becomes

HOUR = timedelta(hours=1)
SOON = "clock_timestamp() + interval '1 second'"
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


@BOTH
async def test_an_event_comes_when_it_is_due_and_not_before(database: Database, keeps_order: bool) -> None:
    sink = MemorySink(keeps_order=keeps_order)
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await harness.owns_all()
        late, soon = scheduled(database, "interval '2 seconds'"), scheduled(database, "interval '1 second'")
        assert query(database, "select from outbox.event") == []
        await _delivered(sink, 2)
        await harness.settled()
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


def test_the_uid_of_an_event_finds_it_once_it_is_in_the_log(database: Database) -> None:
    """Goes red when the id that the log gives an event is not known: its uid has the one of the emit."""
    [uid] = due(database, 1)
    assert call(database, "select outbox_internal.event_id(%s)", uid) is None
    assert call(database, ENTER) == 1
    assert call(database, "select id = outbox_internal.event_id(uid) from outbox.event")
    assert call(database, "select id <> outbox_internal.id_in(uid) from outbox.event")
    assert call(database, "select outbox.why(%s) ->> 'in_log'", uid) == "true"
    assert call(database, "select outbox.emit('job', '1', uid => %s)", uid) == uid
    assert query(database, "select uid from outbox.event") == [(uid,)]


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


def test_events_enter_in_the_order_of_their_times_and_of_their_emits(database: Database) -> None:
    later = due(database, 1, "z")
    uids = due(database, 50)
    query(database, "update outbox.scheduled set deliver_at = now() where uid = %s returning 1", later[0])
    assert call(database, "select entered from outbox_internal.enter_scheduled(20, '-infinity', 0)") == 20
    assert call(database, ENTER) == 31
    entered = [uid for (uid,) in query(database, "select uid from outbox.event order by id")]
    assert entered == uids + later


async def test_from_then_on_the_key_keeps_its_order(database: Database) -> None:
    """Goes red when events that were scheduled leave the order of their key once they are in the log."""
    from outbox_relay.domain.outcomes import DELIVERED, Failed, Verdict

    uids = due(database, 3)
    fails = iter([Failed("no"), Failed("no")])

    def once(_event: Any, _attempt: int) -> Verdict:
        return next(fails, DELIVERED)

    sink = MemorySink(once)
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await _delivered(sink, 3)
        await harness.settled()
    assert [UUID(event.uid) for event in sink.delivered] == uids


def test_a_crash_before_the_commit_changes_nothing(database: Database, conn: psycopg.Connection[Any]) -> None:
    [uid] = due(database, 1)
    assert conn.execute(ENTER.encode()).fetchall() == [(1,)]
    conn.rollback()
    assert query(database, WAITING) == [(uid,)]
    assert query(database, "select from outbox.event") == []
    assert call(database, ENTER) == 1


def test_one_session_at_a_time_lets_events_enter(database: Database, conn: psycopg.Connection[Any]) -> None:
    """Goes red when two sessions take events of a key, and commit in any order."""
    due(database, 4)
    assert conn.execute("select entered from outbox_internal.enter_scheduled(2, '-infinity', 0)").fetchall() == [(2,)]
    assert call(database, ENTER) is None
    conn.commit()
    assert call(database, ENTER) == 2


def test_no_other_role_stops_entries(database: Database) -> None:
    """Goes red when entries exclude each other by an advisory lock, which any role of the database may hold."""
    due(database, 1)
    with new_role(database, "anybody") as name, database.connect(user=name) as holder:
        holder.execute("select pg_advisory_lock(1869967971, n) from generate_series(1, 9) n")
        assert call(database, ENTER) == 1


def test_a_role_that_was_renamed_still_changes_its_events(database: Database) -> None:
    """Goes red when a role has its scheduled events by its name alone."""
    with new_role(database, "shop") as name, new_role(database, "other") as other:
        migrate(database.dsn, grant_emit=[name, other])
        with database.connect(user=name) as shop:
            uids = [outbox.emit(shop, "job", 1, deliver_at=datetime.now(UTC) + HOUR) for _ in range(2)]
        with database.connect(autocommit=True) as owner:
            owner.execute(f"alter role {name} rename to {name}_now".encode())
        try:
            with database.connect(user=f"{name}_now", autocommit=True) as shop:
                assert outbox.cancel(shop, uids[0]) is True
                assert outbox.reschedule(shop, uids[1], datetime.now(UTC) - HOUR) is True
                assert shop.execute("select outbox.emit('job', '1', uid => %s)", (uids[1],)).fetchone() == (uids[1],)
                assert call(database, ENTER) == 1
                assert shop.execute("select outbox.emit('job', '1', uid => %s)", (uids[1],)).fetchone() == (uids[1],)
            with database.connect(user=other) as stranger, pytest.raises(psycopg.errors.InvalidParameterValue):
                stranger.execute("select outbox.emit('job', '1', uid => %s)", (uids[1],))
        finally:
            with database.connect(autocommit=True) as owner:
                owner.execute(f"alter role {name}_now rename to {name}".encode())
    assert call(database, "select count(*) from outbox.event") == 1


def test_a_look_behind_a_place_leaves_out_what_is_before_it(database: Database) -> None:
    due(database, 4)
    [(time_, last)] = query(
        database, "select last_time, last_id from outbox_internal.enter_scheduled(1, '-infinity', 0)"
    )
    again = "select entered, last_time from outbox_internal.enter_scheduled(1000, %s, %s)"
    assert query(database, again, time_, last) == [(3, time_)]
    assert query(database, again, time_, last) == [(0, None)]


async def test_an_event_that_was_committed_after_it_was_due_comes(
    database: Database, conn: psycopg.Connection[Any]
) -> None:
    """Goes red when every look begins behind the last event that entered."""
    uid = outbox.emit(conn, "job", 1, deliver_at=datetime.now(UTC) + timedelta(seconds=0.2))
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)):
        scheduled(database, "interval '0.5 seconds'")
        await _delivered(sink, 1)
        conn.commit()
        await _delivered(sink, 2)
    assert sink.delivered[1].uid == str(uid)


@BOTH
async def test_two_relays_deliver_each_event_once(database: Database, keeps_order: bool) -> None:
    text = (
        "select outbox.emit('job', '1', key => 'k' || n %% 7, deliver_at => now() + interval '2 seconds') "
        "from generate_series(1, 5000) n"
    )
    uids = [str(uid) for (uid,) in query(database, text)]
    first, second = MemorySink(keeps_order=keeps_order), MemorySink(keeps_order=keeps_order)
    async with running(database.dsn, (spec("s"), first)) as one, running(database.dsn, (spec("s"), second)) as two:
        await auntil(lambda: _is(len(first.delivered) + len(second.delivered) >= 5000), seconds=60, what="all come")
        await becomes(lambda: query(database, WAITING) == [], "none is left")
        del one, two
    found = [*first.delivered, *second.delivered]
    assert sorted(event.uid for event in found) == sorted(uids)
    if keeps_order:
        for sink in (first, second):
            for key in {event.key for event in sink.delivered}:
                ids = [event.id for event in sink.delivered if event.key == key]
                assert ids == sorted(ids)


def test_a_sink_that_was_added_meanwhile_gets_the_event(database: Database) -> None:
    uid = scheduled(database)
    query(database, "insert into outbox.sink (name, patterns, start) values ('s', '{job}', 'now') returning 1")
    query(database, "insert into outbox.sink (name, patterns, start) values ('o', '{other}', 'now') returning 1")
    found = call(database, "select outbox.why(%s)", uid)
    assert (found["in_log"], found["id"], found["type"], found["key"]) == (False, None, "job", "k")
    assert found["sinks"]["o"] == {"state": "not routed"}
    assert found["sinks"]["s"]["state"] == "scheduled"
    assert 3500 < found["sinks"]["s"]["due_in_seconds"] <= 3600


def test_emitted_shows_scheduled_events_in_the_order_of_emits(conn: psycopg.Connection[Any]) -> None:
    later = datetime.now(UTC) + HOUR
    uids = [outbox.emit(conn, "job", 1, deliver_at=at) for at in (None, later, None, later)]
    shown = "select uid from outbox.emitted()"
    assert [uid for (uid,) in conn.execute(shown).fetchall()] == uids
    with conn.transaction():
        assert outbox.cancel(conn, uids[1]) is True
    assert [uid for (uid,) in conn.execute(shown).fetchall()] == [uids[0], *uids[2:]]
    conn.commit()
    assert conn.execute(shown).fetchall() == []


# -- in time, or too late -----------------------------------------------------------------------------------------


async def test_a_cancelled_event_is_never_delivered_and_a_moved_one_at_its_new_time(database: Database) -> None:
    cancelled, moved, other = (scheduled(database, "interval '1.5 seconds'") for _ in range(3))
    assert call(database, "select outbox.cancel(%s)", cancelled) is True
    assert call(database, "select outbox.reschedule(%s, clock_timestamp() + interval '3 seconds')", moved) is True
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await _delivered(sink, 2)
        await harness.settled()
    assert [event.uid for event in sink.delivered] == [str(other), str(moved)]
    assert sink.delivered[1].deliver_at == call(
        database, "select deliver_at from outbox.event order by id desc limit 1"
    )
    assert call(database, "select outbox.why(%s)", cancelled) is None


async def test_an_event_that_is_moved_to_the_past_comes_at_once(database: Database) -> None:
    """Goes red when looks begin at the last event that entered, and never before."""
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)):
        scheduled(database, "interval '0.2 seconds'")
        await _delivered(sink, 1)
        uid = scheduled(database)
        assert call(database, "select outbox.reschedule(%s, '1999-01-01Z')", uid) is True
        await _delivered(sink, 2)
        assert call(database, "select outbox.cancel(%s)", uid) is False


def test_an_event_can_be_changed_in_its_own_transaction(database: Database, conn: psycopg.Connection[Any]) -> None:
    uid = outbox.emit(conn, "job", 1, deliver_at=datetime.now(UTC) + HOUR)
    assert outbox.reschedule(conn, uid, datetime.now(UTC) + 2 * HOUR) is True
    assert outbox.cancel(conn, uid) is True
    assert outbox.cancel(conn, uid) is False
    conn.commit()
    assert query(database, WAITING) == []


def test_a_change_that_is_rolled_back_has_not_happened(database: Database, conn: psycopg.Connection[Any]) -> None:
    [uid] = due(database, 1)
    assert outbox.cancel(conn, uid) is True
    assert call(database, ENTER) == 0, "an entry passes by what is being changed"
    conn.rollback()
    assert call(database, ENTER) == 1


def test_an_entry_obeys_a_change_that_was_committed_while_it_looked(
    database: Database, conn: psycopg.Connection[Any]
) -> None:
    """Whichever comes first has the row: a cancel that waits for an entry is too late."""
    [uid] = due(database, 1)
    answers = list[bool]()

    def cancel() -> None:
        with database.connect(autocommit=True) as connection:
            answers.append(outbox.cancel(connection, uid))

    assert conn.execute(ENTER.encode()).fetchall() == [(1,)]
    waiting = threading.Thread(target=cancel)
    waiting.start()
    time.sleep(0.3)
    assert answers == []
    conn.commit()
    waiting.join(10)
    assert answers == [False]


def test_what_is_not_in_time_changes_nothing(conn: psycopg.Connection[Any]) -> None:
    at_once = outbox.emit(conn, "job", 1)
    past = outbox.emit(conn, "job", 1, deliver_at=datetime.now(UTC))
    conn.commit()
    later = datetime.now(UTC) + HOUR
    for uid in (at_once, past, uuid4()):
        assert outbox.cancel(conn, uid) is False
        assert outbox.reschedule(conn, uid, later) is False


async def test_an_event_that_was_due_when_it_was_emitted_keeps_the_order_of_its_key(database: Database) -> None:
    with database.connect(autocommit=True) as connection:
        connection.execute("select outbox.emit('a', '1', key => 'k', deliver_at => now() - interval '1 hour')")
        connection.execute("select outbox.emit('b', '1', key => 'k')")
    assert query(database, WAITING) == []
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        await _delivered(sink, 2)
        await harness.settled()
    assert [event.type for event in sink.delivered] == ["a", "b"]


async def test_no_event_is_cancelled_and_delivered(database: Database) -> None:
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
    async with running(database.dsn, (spec("s"), sink)) as harness:
        canceller.start()
        await auntil(lambda: _is(not canceller.is_alive()), seconds=60, what="every event was cancelled or too late")
        await _gone(database, harness)
    delivered = [UUID(event.uid) for event in sink.delivered]
    assert len(set(delivered)) == len(delivered)
    assert set(delivered).isdisjoint(cancelled)
    assert set(delivered) | cancelled == {uid for uid, _ in times}
    assert at_once <= cancelled
    assert delivered


# -- roles and values ---------------------------------------------------------------------------------------------


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
        outbox.reschedule(conn, uuid4(), datetime(2030, 1, 1))  # noqa: DTZ001 - a time without a zone is what is refused
    with pytest.raises(TypeError, match="cancel takes a psycopg Connection or Cursor"):
        outbox.cancel(object(), uuid4())  # pyright: ignore[reportArgumentType]


async def test_the_asynchronous_functions_do_the_same(database: Database) -> None:
    connection = await database.aconnect()
    async with connection:
        uid = await outbox.aemit(connection, "job", 1, deliver_at=datetime.now(UTC) + HOUR)
        assert await outbox.areschedule(connection, uid, datetime.now(UTC) + 2 * HOUR) is True
        assert await outbox.acancel(connection, uid) is True


def test_the_uid_of_a_scheduled_event_is_used(database: Database) -> None:
    """Goes red when an event that waits longer than keep_uids_days can be emitted again."""
    own = uuid4()
    emit = "select outbox.emit('job', '1', uid => %s, deliver_at => clock_timestamp() + interval '1 hour')"
    assert call(database, emit, own) == own
    query(database, "delete from outbox.uid returning 1")
    assert call(database, emit, own) == own
    assert call(database, "select outbox.emit('job', '1', uid => %s)", own) == own
    assert query(database, WAITING) == [(own,)]
    assert query(database, "select from outbox.event") == []


# -- people -------------------------------------------------------------------------------------------------------


async def test_people_list_count_and_discard_scheduled_events(database: Database) -> None:
    for name, patterns in (("s", "{job}"), ("o", "{*}")):
        query(
            database,
            "insert into outbox.sink (name, patterns, start) values (%s, %s, 'now') returning 1",
            name,
            patterns,
        )
    uid, other = scheduled(database), scheduled(database, kind="mail")
    count = "select matched from outbox.count_deliveries(%s::jsonb)"
    assert call(database, count, '{"states": ["scheduled"]}') == 3
    assert call(database, count, '{"states": ["scheduled"], "sink": "s"}') == 1
    listed = "select uid, sink, state, due_at > now(), key from outbox.deliveries(%s::jsonb)"
    assert query(database, listed, '{"states": ["scheduled"]}') == [
        (other, "o", "scheduled", True, "k"),
        (uid, "s", "scheduled", True, "k"),
        (uid, "o", "scheduled", True, "k"),
    ]
    groups = 'select sink, type, count from outbox.delivery_summary(\'{"states": ["scheduled"]}\') order by 1, 2'
    assert query(database, groups) == [("o", "job", 1), ("o", "mail", 1), ("s", "job", 1)]
    ended = await asyncio.to_thread(
        inside, *("dead", "discard", "--state", "scheduled", "--sink", "s", "--reason", "no", "--yes"),
        *("--dsn", database.dsn),
    )  # fmt: skip
    assert (ended.code, ended.out) == (0, "discarded 1 delivery\n"), ended
    assert query(database, WAITING) == [(other,)]
    assert query(database, "select action, count, reason from outbox.audit") == [("dead discard", 1, "no")]


async def test_a_scheduled_event_is_not_erased_but_undelivered(database: Database) -> None:
    uid = scheduled(database)
    for subject in (("--key", "k"), ("--uid", str(uid))):
        ended = await asyncio.to_thread(inside, "erase", *subject, "--reason", "r", "--yes", "--dsn", database.dsn)
        assert ended.code == 1
        assert f"event {uid} is scheduled" in ended.err
    assert call(database, "select key from outbox.scheduled") == "k"


def test_no_event_enters_while_an_erasure_begins(database: Database, conn: psycopg.Connection[Any]) -> None:
    """Goes red when an event can enter behind the last id that the erasure looks at, before the scheduled ones."""
    [uid] = due(database, 1)
    step = "select phase, undelivered from outbox.erase('{\"key\": \"k\"}', reason => 'r', erasure_id => null)"
    assert conn.execute(step.encode()).fetchall() == [
        ("refused", [{"uid": str(uid), "sink": "", "state": "scheduled"}])
    ]
    assert call(database, ENTER) is None


def test_a_unique_key_is_in_use_while_its_event_is_scheduled(database: Database) -> None:
    emit = "select outbox.emit('job', '1', unique_key => 'u', deliver_at => clock_timestamp() + %s::interval)"
    first = call(database, emit, "0.2 seconds")
    query(database, "update outbox.unique_key set look_at = now() returning 1")
    assert call(database, "select outbox_internal.finish_unique_keys(10)") == 0
    assert call(database, emit, "1 hour") == first
    time.sleep(0.25)
    assert call(database, ENTER) == 1
    query(database, "update outbox.unique_key set look_at = now() returning 1")
    assert call(database, "select outbox_internal.finish_unique_keys(10)") == 1, "no sink has it to deliver"


async def _gone(database: Database, harness: RelayHarness) -> None:
    await becomes(lambda: not query(database, WAITING), "no event is scheduled")
    await harness.settled()


async def _is(fact: bool) -> bool:
    return fact


async def _delivered(sink: MemorySink, count: int) -> None:
    await auntil(lambda: _is(len(sink.delivered) >= count), seconds=30, what=f"{count} events were delivered")
