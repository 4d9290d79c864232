"""A destination that asks for less, is gone, is down for days, or has one part in trouble: nothing is lost."""

from __future__ import annotations

import pytest

from outbox_relay.admin import resume, status
from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Unavailable, Verdict
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, has, ids, in_order
from tests.support.memory_sink import Late, MemorySink, fails
from tests.support.relay_harness import running, spec
from tests.support.wait import until

TOPIC = "topic orders"


def test_one_that_asks_for_less_is_left_alone_at_once_and_then_gets_half(database: Database) -> None:
    late = Late()
    late.script = fails(99, None, Unavailable("slow down", 429, 0.2, throttled=True))
    sink = MemorySink(late, keeps_order=False, max_in_flight=64)
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        wanted = emit(database, [None] * 40)
        until(lambda: _true(harness.loops[0].circuit == "open"), seconds=10, what="the circuit opens")
        assert harness.loops[0].in_flight_limit <= 32
        late.script = None
        delivered(sink, wanted)
        harness.settled()
        assert 0 < harness.loops[0].in_flight_limit < 64
    assert query(database, "select count(*) from outbox.delivery") == [(0,)]


def test_one_that_is_gone_is_paused_with_its_reason_and_nothing_is_lost(database: Database) -> None:
    late = Late()
    sink = MemorySink(late, keeps_order=False)
    late.script = fails(99, None, Unavailable("410 Gone", 410, gone=True))
    with running(database.dsn, (spec("s"), sink), lease_seconds=3, expects={"handed_over"}) as harness:
        wanted = emit(database, ["a", "a", "b", None])
        has(database, "select 1 from outbox.sink where paused and paused_reason = '410 Gone'")
        has(database, "select 1 from outbox.shard where owner is not null having count(*) = 0")
        found = status(harness.store)["sinks"]["s"]
        assert (found["paused"], found["paused_reason"], found["backlog"]) == (True, "410 Gone", 4)
        asked = len(sink.attempts)
        more = emit(database, ["c"])
        late.script = None
        assert resume(harness.store, "s")
        delivered(sink, [*wanted, *more])
        harness.settled()
        assert status(harness.store)["sinks"]["s"]["paused_reason"] is None
    assert asked <= 4
    assert in_order(sink.delivered)
    assert query(database, "select count(*) from outbox.delivery") == [(0,)]


def test_one_that_is_down_for_too_long_is_paused_and_resumed_it_gets_its_whole_time_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox_relay.relay.report.REMIND_SECONDS", 0.5)
    monkeypatch.setattr("outbox_relay.relay.report.PAUSE_AFTER_SECONDS", 10)
    late = Late()
    sink = MemorySink(late)
    late.script = fails(999, None, Unavailable("connection refused"))
    circuit = CircuitPolicy(open_after=1, probe_seconds=0.05, probe_max_seconds=0.05)
    with running(database.dsn, (spec("s", circuit=circuit), sink), lease_seconds=3) as harness:
        wanted = emit(database, ["a"])
        has(database, "select 1 from outbox.sink where circuit_since is not null and not paused")
        query(database, "update outbox.sink set circuit_since = now() - interval '2 hours' returning 1")
        [(reason,)] = has(database, "select paused_reason from outbox.sink where paused")
        assert reason == "the destination was down for 10 seconds: connection refused"
        assert resume(harness.store, "s")
        assert query(database, "select paused, paused_reason, circuit_since is null from outbox.sink") != [
            (True, reason, False)
        ]
        late.script = None
        delivered(sink, wanted)


def _trouble(event: StoredEvent, _attempt: int) -> Verdict:
    """Make events of the topic with trouble wait, and deliver all others."""
    if event.key is not None and event.key.startswith("orders"):
        return Unavailable("topic orders: unknown topic", None, 0.05, part=TOPIC)
    return DELIVERED


def test_trouble_of_one_part_makes_rows_without_attempts_and_the_others_flow(database: Database) -> None:
    late = Late()
    late.script = _trouble
    sink = MemorySink(late)
    with running(database.dsn, (spec("s"), sink)) as harness:
        wanted = emit(database, [f"{'orders' if n % 2 else 'users'}-{n % 6}" for n in range(60)])
        delivered(sink, wanted[::2])
        has(database, "select 1 from outbox.delivery having count(*) = 30")
        assert query(database, "select distinct attempts from outbox.delivery") == [(0,)]
        has(database, "select 1 from outbox.sink where circuit = 'closed' and last_error like 'topic orders:%%'")
        late.script = None
        delivered(sink, wanted)
        harness.settled()
    assert sorted(ids(sink)) == wanted
    assert in_order(sink.delivered)


def test_when_enough_rows_stand_for_a_part_the_position_stands_still_and_status_says_why(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox_relay.relay.limits.COUNT_SECONDS", 0.1)
    monkeypatch.setattr("outbox_relay.relay.report.RECORD_SECONDS", 0.1)
    late = Late()
    late.script = _trouble
    sink = MemorySink(late)
    sink.max_batch = 20
    with running(database.dsn, (spec("s", pending_max=40), sink)) as harness:
        wanted = emit(database, [f"orders-{n}" for n in range(400)])
        [(error,)] = has(database, "select last_error from outbox.sink where last_error like '%%no more%%'")
        assert error.startswith("topic orders: unknown topic; ")
        [(rows,)] = query(database, "select count(*) from outbox.delivery")
        assert 40 <= rows <= 40 + sink.max_in_flight * sink.max_batch
        assert status(harness.store)["sinks"]["s"]["backlog"] == 400
        late.script = None
        delivered(sink, wanted)
        harness.settled()
    assert sorted(ids(sink)) == wanted


def _true(value: bool) -> bool:
    return value
