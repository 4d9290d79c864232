"""Recorded attempts: which are written, with what, and behind which fence."""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from outbox_relay.domain.attempts import AttemptRecord
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Attempt, Delivered, Failed, Unavailable, Verdict
from outbox_relay.postgres.rows import DeliveredRow, RowUpdate
from tests.support import books as owned
from tests.support.database import Database, query
from tests.support.deliveries import emit, has
from tests.support.ledger import Ledger
from tests.support.memory_sink import BOTH, MemorySink, fails
from tests.support.relay_harness import running, spec
from tests.support.wait import until

books = owned.books

RECORDED = """
select a.number, a.outcome, a.status, a.error, a.relay, a.sink, a.milliseconds, a.detail
  from outbox.attempt a order by a.id, a.at, a.number"""
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


# -- fences -------------------------------------------------------------------------------------------------------


def a_record(event_id: int, uid: str, **changes: Any) -> AttemptRecord:
    """Return the record of a delivery that has just ended."""
    record = AttemptRecord(event_id, uid, 1, "delivered", time.monotonic())
    return record._replace(**changes)


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
