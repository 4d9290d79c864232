"""Scheduled events of one moment that are spread over a time, for each sink as its settings say."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

from outbox_relay.admin.status import status
from outbox_relay.domain.sink_limits import spread_of
from tests.support.database import Database, query
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import running, spec
from tests.support.wait import becomes, until

SPREAD = 600.0


def emit(database: Database, events: int, after: str = "1 hour") -> tuple[list[UUID], datetime]:
    """Emit events that are scheduled for one moment; return their uids and the moment."""
    [(at,)] = query(database, "select clock_timestamp() + %s::interval", after)
    rows = query(database, f"select outbox.emit('job', '1', deliver_at => %s) from generate_series(1, {events})", at)
    return [uid for (uid,) in rows], at


def spread(seconds: float = SPREAD, **values: Any) -> Any:
    """Return the specification of a sink that spreads scheduled events."""
    return spec("s", spread_seconds=seconds, **values)


def due(database: Database, sink: str = "s") -> dict[UUID, datetime]:
    """Return when the scheduled rows of a sink are due."""
    rows = query(database, "select uid, due_at, deliver_at from outbox.delivery where sink = %s", sink)
    assert all(abs(at - deliver_at) < timedelta(milliseconds=1) for _, at, deliver_at in rows)
    return {uid: at for uid, at, _ in rows}


def later(uid: UUID, at: datetime, seconds: float = SPREAD) -> datetime:
    """Return when an event is due that was scheduled for ``at``."""
    return at + timedelta(seconds=spread_of(str(uid), seconds))


def test_each_sink_spreads_as_it_is_configured_and_the_same_event_always_to_the_same_time(
    database: Database,
) -> None:
    """Goes red when rows that wait for their part of the time count as parked: the sink stops at ten."""
    plain = MemorySink()
    sinks = [(spread(pending_max=10), MemorySink()), (spec("other"), plain)]
    with running(database.dsn, *sinks) as harness:
        harness.owns_all()
        uids, at = emit(database, 200, "0.5 seconds")
        becomes(lambda: len(due(database)) > 190, "there are rows")
        assert due(database).items() <= {uid: later(uid, at) for uid in uids}.items()
        assert max(due(database).values()) - min(due(database).values()) > timedelta(seconds=SPREAD / 2)
        until(lambda: _true(len(plain.delivered) == 200), seconds=30, what="the other sink delivers at once")
        assert due(database, "other") == {}
        said = status(harness.store)["sinks"]["s"]
        assert (said["scheduled"], said["spread_seconds"]) == (0, SPREAD)
        becomes(lambda: status(harness.store)["sinks"]["s"]["oldest_seconds"] == 0.0, "events wait as rows only")
        times = due(database)
        last = max(times, key=lambda uid: times[uid])
        why = query(database, "select outbox.why(%s) -> 'sinks' -> 's' ->> 'due_in_seconds'", last)
        [(wanted,)] = query(database, "select extract(epoch from %s - now())::float", later(last, at))
        assert abs(float(why[0][0]) - wanted) < 5


def test_why_shows_the_time_in_each_sink_before_it_has_read_the_event(database: Database) -> None:
    _sink(database)
    [late], at = emit(database, 1)
    state = "select outbox.why(%s) -> 'sinks' -> 's'"
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


def _true(value: bool) -> bool:
    return value
