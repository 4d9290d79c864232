"""Recorded attempts: which are written, with what, and behind which fence."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest

from outbox_relay import admin
from outbox_relay.domain.attempts import AttemptRecord
from outbox_relay.domain.errors import LeaseLost
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Attempt, Delivered, Failed, Refused, Unavailable, Verdict
from outbox_relay.postgres.rows import DeliveredRow, RowUpdate
from tests.support import books as owned
from tests.support.database import Database, query
from tests.support.deliveries import emit, has
from tests.support.ledger import Ledger
from tests.support.memory_sink import BOTH, Gate, MemorySink, fails
from tests.support.relay_harness import running, spec
from tests.support.wait import until

books = owned.books

RECORDED = """
select a.number, a.outcome, a.status, a.error, a.relay, a.sink, a.milliseconds, a.detail
  from outbox.attempt a order by a.id, a.at, a.number"""
NOTHING_LEFT = "select 1 where not exists (select from outbox.delivery where state <> 'dead')"
KEPT = Attempt("http_500", 0.25, "oops \x00\ud800", (("connect", 0.01),))
"""Details of a failed attempt, with characters that JSON of the database cannot contain."""


def recorded(database: Database) -> list[tuple[Any, ...]]:
    """Return number, outcome, status and error of every recorded attempt, by event."""
    return [row[:4] for row in query(database, RECORDED)]


# -- what a relay records -----------------------------------------------------------------------------------------


@BOTH
def test_failures_and_the_delivery_that_ends_them_are_recorded(database: Database, keeps_order: bool) -> None:
    [event, _] = emit(database, ["k", "other"])
    sink = MemorySink(fails(2, [event], Failed("not now", 500, attempt=KEPT)), keeps_order=keeps_order)
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        has(database, "select from outbox.attempt where outcome = 'delivered'")
        harness.settled()
    failed = (500, "not now", "harness", "s", 250.0)
    detail = {"code": "http_500", "answer": "oops   ", "steps": {"connect": 0.01}}
    assert query(database, RECORDED) == [
        (1, "failed", *failed, detail),
        (2, "failed", *failed, detail),
        (3, "delivered", None, None, "harness", "s", None, None),
    ]


@BOTH
@pytest.mark.parametrize("verdict", [Failed("no", 500), Refused("never", 400)], ids=["dead", "refused"])
def test_the_attempt_after_which_an_event_is_dead_is_recorded_with_the_reason(
    database: Database, keeps_order: bool, verdict: Verdict
) -> None:
    emit(database, ["k"])
    sink = MemorySink(lambda _event, _attempt: verdict, keeps_order=keeps_order)
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        has(database, "select from outbox.delivery where state = 'dead'")
    failures = [] if isinstance(verdict, Refused) else [(n, "failed", 500, "no") for n in range(1, 5)]
    last = (1, "refused", 400, "never") if isinstance(verdict, Refused) else (5, "dead", 500, "no")
    assert recorded(database) == [*failures, last]


@BOTH
def test_what_counts_as_no_attempt_is_not_recorded(database: Database, keeps_order: bool) -> None:
    [part, _, down] = emit(database, ["part", None, "down"])

    def script(event: StoredEvent, attempt: int) -> Verdict:
        if attempt > 2 or event.id not in (part, down):
            return DELIVERED
        return Unavailable("topic t: unknown", part="t") if event.id == part else Unavailable("down")

    sink = MemorySink(script, keeps_order=keeps_order)
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        until(lambda: len(sink.delivered) == 3, seconds=20, what="all events are delivered")
        harness.settled()
    assert recorded(database) == []


@BOTH
def test_none_records_nothing_and_all_records_every_delivery_once_with_what_the_sink_says(
    database: Database, keeps_order: bool
) -> None:
    events = emit(database, [f"k{n % 7}" for n in range(300)])
    bad = events[5]

    def script(event: StoredEvent, attempt: int) -> Verdict:
        if event.id == bad and attempt == 1:
            return Failed("not now", 500)
        return Delivered(204, 0.0125, {"partition": event.shard, "offset": event.id})

    modes = ("all", "none")
    sinks = [(spec(mode, record_attempts=mode), MemorySink(script, keeps_order=keeps_order)) for mode in modes]
    with running(database.dsn, *sinks) as harness:
        harness.owns_all()
        has(database, "select from outbox.attempt where id = %s and outcome = 'delivered'", bad)
        harness.settled()
    columns = "id, number, outcome, status, milliseconds, sink"
    found = query(database, f"select {columns} from outbox.attempt order by id, at")
    wanted: list[tuple[Any, ...]] = [(event, 1, "delivered", 204, 12.5, "all") for event in events]
    at = events.index(bad)
    wanted[at : at + 1] = [(bad, 1, "failed", 500, None, "all"), (bad, 2, "delivered", 204, 12.5, "all")]
    assert found == wanted
    details = query(database, "select id, detail from outbox.attempt where outcome = 'delivered'")
    assert all(detail["offset"] == event for event, detail in details)
    early = "select from outbox.attempt a join outbox.event e using (uid) where a.at < e.created_at"
    assert query(database, early) == []


def test_all_records_a_slow_request_that_became_a_row(database: Database) -> None:
    [event] = emit(database, ["k"])
    answer = Gate()

    async def script(_event: StoredEvent, _attempt: int) -> Verdict:
        await answer.wait()
        return Delivered(200, 3.0)

    sink = MemorySink(script, keeps_order=False)
    with running(database.dsn, (spec("s", record_attempts="all", park_after_seconds=0.1), sink)) as harness:
        harness.owns_all()
        has(database, "select from outbox.delivery where lease is not null")
        [found] = admin.running(harness.store, 0.1)["running"]
        assert (found["sink"], found["key"], found["relay"], found["attempt"]) == ("s", "k", "harness", 1)
        assert 0.1 <= found["running_seconds"] < 20
        assert 0 < found["lease_seconds"] <= 20
        answer.set()
        has(database, NOTHING_LEFT)
    assert query(database, "select id, number, outcome, milliseconds from outbox.attempt") == [
        (event, 1, "delivered", 3000.0)
    ]


# -- fences -------------------------------------------------------------------------------------------------------


def a_record(event_id: int, uid: str, **changes: Any) -> AttemptRecord:
    """Return the record of a delivery that has just ended."""
    record = AttemptRecord(event_id, uid, 1, "delivered", time.monotonic())
    return record._replace(**changes)


def test_a_settlement_whose_fence_fails_records_nothing(books: Ledger) -> None:
    [event] = books.emit("k")
    row, record = books.row(event, attempts=1), a_record(event, books.uid(event))
    row = replace(row, record=record)
    with pytest.raises(LeaseLost):
        books.store.settle("s", uuid4(), {}, [row], books.epochs["s"], records=[record], relay="here")
    assert query(books.database, RECORDED) == []
    books.store.settle("s", books.relay, {}, [row], books.epochs["s"], records=[record], relay="here")
    assert len(query(books.database, RECORDED)) == 2


def test_a_row_that_is_no_longer_leased_records_nothing(books: Ledger) -> None:
    [event] = books.emit("k")
    lease = uuid4()
    books.park("s", books.row(event, lease=lease, lease_for=30.0))
    record = a_record(event, books.uid(event))
    assert books.store.delete_rows("s", [DeliveredRow(event, uuid4(), record)], relay="here") == {}
    update = RowUpdate(event, uuid4(), 1, "waiting", 0.0, "no", record=record)
    assert books.store.update_rows("s", [update], relay="here") == set()
    assert query(books.database, RECORDED) == []
    assert books.store.delete_rows("s", [DeliveredRow(event, lease, record)], relay="here") == {event: False}
    assert len(query(books.database, RECORDED)) == 1


def test_the_time_of_an_attempt_is_its_age_before_the_time_of_the_database(books: Ledger) -> None:
    [event] = books.emit("k")
    record = a_record(event, books.uid(event))._replace(ended_at=time.monotonic() - 3600.0)
    books.store.settle("s", books.relay, {}, [], {}, records=[record])
    [(age,)] = query(books.database, "select extract(epoch from now() - at)::float8 from outbox.attempt")
    assert 3590 < age < 3700
