"""A destination that asks for less, is gone, is down for days, or has one part in trouble: nothing is lost."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import pytest

from outbox_relay.admin import resume, status, why
from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Attempt, Failed, RetryPolicy, Unavailable, Verdict
from outbox_relay.domain.sink_spec import SinkLimits
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


def test_what_a_relay_that_is_gone_said_of_fewer_requests_is_forgotten(database: Database) -> None:
    sink = MemorySink(keeps_order=False)
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        query(database, "update outbox.sink set in_flight_limit = 8 returning 1")
        until(lambda: _true(harness.leases("s").row.in_flight_limit == 8), seconds=10, what="it is known")
        delivered(sink, emit(database, [None]))
        has(database, "select 1 from outbox.sink where in_flight_limit is null")


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
    late = Late()
    sink = MemorySink(late)
    late.script = fails(999, None, Unavailable("connection refused"))
    circuit = CircuitPolicy(open_after=1, probe_seconds=0.05, probe_max_seconds=0.05, pause_after_seconds=10)
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


def test_all_parts_in_trouble_are_shown_until_they_recover(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox_relay.relay.limits.TROUBLE_SECONDS", 0.5)
    monkeypatch.setattr("outbox_relay.relay.limits.COUNT_SECONDS", 0.1)
    monkeypatch.setattr("outbox_relay.relay.report.RECORD_SECONDS", 0.1)

    def troubles(event: StoredEvent, _attempt: int) -> Verdict:
        topic = f"topic {event.key}"
        return DELIVERED if event.key == "c" else Unavailable(f"{topic}: unknown", None, 0.05, part=topic)

    late = Late()
    late.script = troubles
    sink = MemorySink(late)
    with running(database.dsn, (spec("s"), sink)) as harness:
        wanted = emit(database, ["a", "b", "c"])
        [(error,)] = has(database, "select last_error from outbox.sink where last_error like '%%; %%'")
        assert sorted(error.split("; ")) == ["topic a: unknown", "topic b: unknown"]
        delivered(sink, emit(database, ["c"]))
        assert status(harness.store)["sinks"]["s"]["last_error"], "other parts take events"
        late.script = None
        delivered(sink, wanted)

        def mended() -> bool:
            emit(database, ["c"])
            found = status(harness.store)["sinks"]["s"]
            return found["last_error"] is None and found["last_error_mended_at"] is not None

        until(mended, seconds=20, what="the error is over")


@pytest.mark.parametrize("keeps_order", [True, False])
def test_probe_that_meets_the_trouble_of_a_part_leaves_the_next_to_another(
    database: Database, keeps_order: bool
) -> None:
    """Otherwise the circuit waits without end for the outcome of a probe that is not sent any more."""
    late = Late()
    late.script = _trouble
    sink = MemorySink(late, keeps_order=keeps_order)
    with running(database.dsn, (spec("s", circuit=CircuitPolicy(open_after=1, probe_seconds=0.05)), sink)) as harness:
        emit(database, ["orders"])
        has(database, "select 1 from outbox.delivery where state = 'waiting'")
        late.script = fails(999, None, Unavailable("connection refused"))
        until(lambda: _true(harness.loops[0].circuit != "closed"), seconds=10, what="the circuit opens")
        late.script, asked = _trouble, len(sink.attempts)
        until(lambda: _true(len(sink.attempts) > asked), seconds=10, what="a probe is sent")
        delivered(sink, emit(database, ["users"]))


def test_when_enough_rows_stand_for_a_part_the_position_stands_still_and_status_says_why(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox_relay.relay.limits.COUNT_SECONDS", 0.1)
    monkeypatch.setattr("outbox_relay.relay.report.RECORD_SECONDS", 0.1)
    late = Late()
    late.script = _trouble
    sink = MemorySink(late)
    sink.max_batch = 20
    with running(database.dsn, (spec("s", parked_max=40), sink)) as harness:
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


def test_a_part_that_answers_again_is_forgotten_whatever_events_are_scheduled(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than ``parked_max`` events wait for their part of a spread: they count for nothing, and must not stop it."""
    monkeypatch.setattr("outbox_relay.relay.limits.TROUBLE_SECONDS", 0.5)
    monkeypatch.setattr("outbox_relay.relay.limits.COUNT_SECONDS", 0.1)
    monkeypatch.setattr("outbox_relay.relay.report.RECORD_SECONDS", 0.1)
    late = Late()
    sink = MemorySink(late)
    sink.max_batch = 20
    with running(database.dsn, (spec("s", parked_max=40, limits=SinkLimits(spread_seconds=80_000.0)), sink)) as harness:
        emit(database, [None] * 60, deliver_at=datetime.now(UTC))
        has(database, "select 1 from outbox.delivery having count(*) > 50")
        late.script = _trouble
        waited = emit(database, ["orders-1"])
        has(database, "select 1 from outbox.sink where last_error like 'topic orders:%%'")
        late.script = None
        delivered(sink, waited)
        for _ in range(3):
            more = emit(database, [f"users-{n}" for n in range(30)])
            delivered(sink, more)
        assert harness.ended == []


def test_the_last_attempt_is_kept_with_its_row_and_why_shows_it(database: Database) -> None:
    kept = Attempt("http_500", 0.25, "oops \x00\ud800 \x1b[31m", (("connect", 0.01),))
    for keeps_order in (True, False):
        late = Late()
        sink = MemorySink(late, keeps_order=keeps_order)
        name = f"s{int(keeps_order)}"
        late.script = fails(99, None, Failed("status 500", 500, None, kept))
        with running(database.dsn, (spec(name), sink)) as harness:
            [wanted] = emit(database, ["a"])
            for minimum in (1, 2, 5):
                sql = "select uid from outbox.delivery where sink = %s and id = %s and attempts >= %s"
                [(uid,)] = has(database, sql, name, wanted, minimum)
                found = (why(harness.store, UUID(str(uid))))["sinks"][name]["last_attempt"]
                ago = found.pop("seconds_ago")
                assert 0 <= ago < 30
                assert found == {
                    "code": "http_500",
                    "seconds": 0.25,
                    "answer": "oops     [31m",
                    "steps": {"connect": 0.01},
                }


def test_events_that_fail_again_neither_open_the_circuit_nor_keep_it_open(database: Database) -> None:
    late = Late()
    sink = MemorySink(late, keeps_order=False)
    circuit = CircuitPolicy(open_after=20, probe_seconds=600.0)
    together = RetryPolicy(attempts=5, base_seconds=1.0, max_seconds=1.0, jitter=0.0)
    wanted = emit(database, [None] * 500)
    late.script = fails(2, wanted[::5])
    with running(database.dsn, (spec("s", circuit=circuit, retry=together), sink)) as harness:
        delivered(sink, wanted)
        harness.settled()
    assert sorted(ids(sink)) == wanted


def _true(value: bool) -> bool:
    return value
