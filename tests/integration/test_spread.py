"""Scheduled events of one moment that are spread over a time, for each sink as its settings say."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from outbox_relay.admin.status import status
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Verdict
from outbox_relay.domain.sink_limits import SinkLimits, spread_of
from tests.support.database import Database, query
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import running, spec
from tests.support.wait import auntil, becomes

SPREAD = 600.0
CHANGES = "select outbox_internal.apply_scheduled_changes(500)"


def emit(database: Database, events: int, after: str = "1 hour") -> tuple[list[UUID], datetime]:
    """Emit events that are scheduled for one moment; return their uids and the moment."""
    [(at,)] = query(database, "select clock_timestamp() + %s::interval", after)
    rows = query(database, f"select outbox.emit('job', '1', deliver_at => %s) from generate_series(1, {events})", at)
    return [uid for (uid,) in rows], at


def spread(seconds: float = SPREAD, name: str = "s") -> Any:
    """Return the specification of a sink that spreads scheduled events."""
    return spec(name, limits=SinkLimits(spread_seconds=seconds))


def due(database: Database, sink: str = "s") -> dict[UUID, datetime]:
    """Return when the scheduled rows of a sink are due."""
    rows = query(database, "select uid, due_at, deliver_at from outbox.delivery where sink = %s", sink)
    assert all(at == deliver_at for _, at, deliver_at in rows)
    return {uid: at for uid, at, _ in rows}


def later(uid: UUID, at: datetime, seconds: float = SPREAD) -> datetime:
    """Return when an event is due that was scheduled for ``at``."""
    return at + timedelta(seconds=spread_of(str(uid), seconds))


async def test_each_sink_spreads_as_it_is_configured_and_the_same_event_always_to_the_same_time(
    database: Database,
) -> None:
    sinks = [(spread(), MemorySink()), (spec("other"), MemorySink())]
    async with running(database.dsn, *sinks) as harness:
        await harness.owns_all()
        uids, at = emit(database, 200)
        await becomes(lambda: len(due(database)) == len(due(database, "other")) == 200, "there are rows")
        found = due(database)
        assert found == {uid: later(uid, at) for uid in uids}
        assert max(found.values()) - min(found.values()) > timedelta(seconds=SPREAD / 2)
        assert set(due(database, "other").values()) == {at}
        said = (await status(harness.store))["sinks"]["s"]
        assert (said["scheduled"], said["backlog"], said["spread_seconds"]) == (200, 0, SPREAD)
        why = query(database, "select outbox.why(%s) -> 'sinks' -> 's' ->> 'due_in_seconds'", uids[0])
        [(wanted,)] = query(database, "select extract(epoch from %s - now())::float", later(uids[0], at))
        assert abs(float(why[0][0]) - wanted) < 5


async def test_no_event_comes_before_it_is_due_and_all_come(database: Database) -> None:
    """Goes red when rows are due at the moment for which they were scheduled."""
    early = list[str]()

    def on_time(event: StoredEvent, _attempt: int) -> Verdict:
        [(is_due,)] = query(database, "select %s <= clock_timestamp()", later(UUID(event.uid), at, 1.0))
        if not is_due:
            early.append(event.uid)
        return DELIVERED

    uids, at = emit(database, 20, "0.5 seconds")
    sink = MemorySink(on_time, keeps_order=False)
    async with running(database.dsn, (spread(1.0), sink)):
        await auntil(lambda: _is(len(sink.delivered) == 20), seconds=30, what="all come")
    assert early == []
    assert {event.uid for event in sink.delivered} == set(map(str, uids))


async def test_events_whose_moment_has_passed_before_they_are_read_are_spread_too(database: Database) -> None:
    uids, at = emit(database, 20, "0.2 seconds")
    await becomes(lambda: query(database, "select clock_timestamp() > %s", at)[0][0], "the moment has passed")
    async with running(database.dsn, (spread(), MemorySink())):
        await becomes(lambda: len(due(database)) > 15, "there are rows")
        assert due(database).items() <= {uid: later(uid, at) for uid in uids}.items()


async def test_cancelled_and_moved_events(database: Database) -> None:
    async with running(database.dsn, (spread(), MemorySink())) as harness:
        await harness.owns_all()
        uids, _ = emit(database, 3)
        await becomes(lambda: len(due(database)) == 3, "there are rows")
        assert query(database, "select outbox.cancel(%s)", uids[0]) == [(True,)]
        [(at,)] = query(database, "select clock_timestamp() + interval '2 hours'")
        assert query(database, "select outbox.reschedule(%s, %s)", uids[1], at) == [(True,)]
        for _ in range(2):  # each change is carried out twice
            query(database, CHANGES)
            assert due(database).keys() == set(uids[1:])
            assert due(database)[uids[1]] == later(uids[1], at)
            query(database, "update outbox.scheduled_change set look_at = now() returning 1")


def test_a_moved_row_is_claimed_when_it_is_due_in_its_sink(database: Database) -> None:
    """Goes red when a claim looks at the new time alone, which every sink shares."""
    _sink(database)
    [uid], _ = emit(database, 1)
    _row(database, uid)
    query(database, "update outbox.delivery set due_at = now() - interval '1 hour' returning 1")
    query(database, "select outbox.reschedule(%s, clock_timestamp())", uid)
    claim = "select outbox_internal.take_scheduled('s', array_agg(id)) from outbox.delivery"
    assert query(database, claim) == [([],)]
    query(database, "update outbox.sink set spread_seconds = null returning 1")
    query(database, "update outbox.delivery set due_at = now() - interval '1 hour' returning 1")
    query(database, "update outbox.scheduled_change set deliver_at = now() returning 1")
    assert query(database, claim)[0][0] != []


def test_why_shows_the_time_in_each_sink_before_it_has_read_the_event(database: Database) -> None:
    _sink(database)
    [uid], at = emit(database, 1, "-1 seconds")
    [late], at = emit(database, 1, "1 second")
    state = "select outbox.why(%s) -> 'sinks' -> 's'"
    assert query(database, state, uid)[0][0]["state"] == "pending"
    found = query(database, state, late)[0][0]
    [(wanted,)] = query(database, "select extract(epoch from %s - now())::float", later(late, at))
    assert found["state"] == "scheduled"
    assert abs(found["due_in_seconds"] - wanted) < 5


def test_python_and_sql_agree(database: Database) -> None:
    _sink(database)
    for seconds in (SPREAD, 0.5, 86_400.0, 0.0001):
        query(database, "update outbox.sink set spread_seconds = %s returning 1", seconds)
        uids = [uuid4() for _ in range(20)]
        found = query(database, "select u, outbox_internal.spread_of('s', u) from unnest(%s::uuid[]) u", uids)
        assert dict(found) == {uid: timedelta(seconds=spread_of(str(uid), seconds)) for uid in uids}
    assert query(database, "select outbox_internal.spread_of('other', %s)", uids[0]) == [(timedelta(0),)]


def test_the_last_times_are_not_spread(database: Database) -> None:
    _sink(database)
    query(database, "select outbox.emit('job', '1', deliver_at => '9998-12-31')")
    [(uid,)] = query(database, "select uid from outbox.event")
    _row(database, uid)
    assert query(database, "select deliver_at = '9998-12-31' from outbox.delivery") == [(True,)]


def _sink(database: Database) -> None:
    """Make a sink by hand that has read nothing."""
    query(
        database,
        "insert into outbox.sink (name, patterns, generation, start, spread_seconds)"
        " values ('s', '{*}', 1, 'beginning', 600) returning 1",
    )
    query(
        database,
        "insert into outbox.shard (sink, shard, epoch) select 's', n, 1 from generate_series(0, 63) n returning 1",
    )
    query(
        database,
        "insert into outbox.progress (sink, shards, epochs, a_seq, a_snapshot, a_next, last_id)"
        " select 's', array(select generate_series(0, 63)), array_fill(1::bigint, array[64]), 0, '3:3:', 3, 0"
        " returning 1",
    )


def _row(database: Database, uid: UUID) -> None:
    """Make the row of an event that was read."""
    query(
        database,
        "insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, payload, content_type,"
        " deliver_at, created_at, emitter)"
        " select 's', e.id, e.shard, 'waiting', false, e.deliver_at, e.uid, e.type, e.payload, 'application/json',"
        " e.deliver_at, e.created_at, e.emitter from outbox.event e where e.uid = %s returning 1",
        uid,
    )


async def _is(fact: bool) -> bool:
    return fact
