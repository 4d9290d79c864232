"""Retries and discards: order, fences, marks, and what is left."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from outbox_relay import admin
from outbox_relay.admin import delivery_actions
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Refused, Verdict
from outbox_relay.domain.window import BEGINNING, Position
from tests.support.database import Database
from tests.support.deliveries import delivered, emit, has, ids, in_order
from tests.support.ledger import Ledger
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import running, spec

DISCARD = "select done, under_way, unsettled from outbox.discard_deliveries(%s::jsonb, reason => 'no use')"
STATES = "select id, state from outbox.delivery order by id"


def quiet(_count: int) -> None:
    """Ignore the progress."""


def retry(books: Ledger, wanted: dict[str, Any], **options: Any) -> admin.Result:
    return admin.retry_deliveries(books.store, wanted, actor="anna@host", report=quiet, **options)


def discard(books: Ledger, wanted: dict[str, Any], reason: str = "no use") -> admin.Result:
    return admin.discard_deliveries(books.store, wanted, actor="anna@host", reason=reason, report=quiet)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let discards be tried only once."""
    monkeypatch.setattr(delivery_actions, "UNSETTLED_SECONDS", 0.0)


# -- retry --------------------------------------------------------------------------------------------------------


def test_a_retried_row_is_due_and_its_attempts_begin_again(books: Ledger) -> None:
    [event_id, other] = books.emit("k", "other")
    books.park(
        "s", books.row(event_id, "dead", attempts=30, claims=4, error="gone", status=410), books.row(other, "dead")
    )
    assert retry(books, {"key": "k"}) == admin.Result(done=1)
    assert books.query(STATES) == [(event_id, "waiting"), (other, "dead")]
    [row] = books.query(
        "select attempts, claims, lease, owner, last_error, last_status, last_attempt, due_at <= now() "
        "from outbox.delivery where state = 'waiting'"
    )
    assert row == (0, 0, None, None, None, None, None, True)
    [audit] = admin.audit(books.store, None, 10)
    assert (audit["action"], audit["count"], audit["actor"]) == ("dead retry", 1, "anna@host")
    assert audit["filter"]["key"].startswith("hash:")


def test_rows_that_are_delivered_now_are_left_and_counted(books: Ledger) -> None:
    leased, lapsed, killer = books.emit("a", "b", "c")
    rows = [
        books.row(leased, lease=uuid4(), lease_for=60.0, claims=1),
        books.row(lapsed, lease=uuid4(), lease_for=60.0, claims=2),
        books.row(killer, attempts=1, claims=3),
    ]
    books.park("s", *rows)
    books.do("update outbox.delivery set lease_until = now() - interval '1 second' where id = %s", lapsed)
    assert retry(books, {"states": ["waiting"]}) == admin.Result(done=2, under_way=1)
    found = books.query("select id, claims, lease is null from outbox.delivery order by id")
    assert found == [(leased, 1, False), (lapsed, 2, True), (killer, 3, True)]


@pytest.mark.fence("a row that dies again is retried endlessly")
def test_only_what_was_dead_before_the_action_is_retried(books: Ledger) -> None:
    first, second, third = books.emit("a", "b", "c")
    books.park("s", *(books.row(i, "dead") for i in (first, second, third)))
    step = "select audit_id, done, next_id, next_sink from outbox.retry_deliveries('{}', %s, %s, 1, audit_id => %s)"
    [(audit_id, done, next_id, sink)] = books.query(step, 0, "", None)
    assert (done, next_id, sink) == (1, first, "s")
    books.do("update outbox.delivery set state = 'dead' where id = %s", first)
    books.do("update outbox.delivery set last_attempt_at = clock_timestamp() where id = %s", second)
    assert books.query(step, 0, "", audit_id)[0][1] == 0, "died again, by a fault that leaves no attempt"
    assert books.query(step, first, "s", audit_id)[0][1] == 0, "died after the action began"
    assert books.query(step, second, "s", audit_id)[0][1] == 1
    assert books.query("select count from outbox.audit") == [(2,)]


def test_a_retry_waits_until_the_rows_that_are_due_have_been_delivered(books: Ledger) -> None:
    due, dead = books.emit("a", "b")
    books.park("s", books.row(due, due_in=0.0), books.row(dead, "dead"))
    full = "select done, is_full, next_id, due_mark is null from outbox.retry_deliveries('{}', most_due => %s)"
    assert books.query(full, 1) == [(0, True, 0, False)]
    assert books.query(full, 2) == [(1, False, None, True)]


def test_a_retry_that_nothing_follows_ends(books: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_actions, "FULL_SECONDS", 0.2)
    made = books.emit(*(f"k{n}" for n in range(2500)))
    books.park("s", *(books.row(i, "dead") for i in made))
    result = retry(books, {})
    assert (result.done, result.stalled, result.left) == (1000, True, 1500)


def test_a_rate_is_kept(books: Ledger) -> None:
    made = books.emit(*(f"k{n}" for n in range(30)))
    books.park("s", *(books.row(i, "dead") for i in made))
    assert (retry(books, {}, rate=20)).done == 30
    [(seconds, order)] = books.query(
        "select extract(epoch from max(due_at) - min(due_at))::float, array_agg(id order by due_at, id) "
        "from outbox.delivery"
    )
    assert 1.3 < seconds < 10
    assert order == made


@pytest.mark.parametrize(("hold", "rate"), [(False, 200.0), (True, None)], ids=["skip, rate", "hold, at once"])
def test_of_one_key_what_is_retried_comes_in_order(database: Database, *, hold: bool, rate: float | None) -> None:
    mended, failed_again = threading.Event(), set[int]()

    def script(event: StoredEvent, _attempt: int) -> Verdict:
        if not mended.is_set():
            return Refused("not yet", 400)
        if event.id not in failed_again and event.id % 7 == 0:
            failed_again.add(event.id)
            return Failed("once more")
        return DELIVERED

    sink = MemorySink(script, keeps_order=False)
    made = emit(database, [f"k{n % 3}" for n in range(60)])
    with running(database.dsn, (spec("s", hold=hold), sink)) as harness:
        dead = 3 if hold else len(made)
        has(database, f"select from outbox.delivery where state = 'dead' having count(*) = {dead}")
        mended.set()
        result = admin.retry_deliveries(harness.store, {}, actor="a", report=quiet, rate=rate)
        assert result.done == dead
        delivered(sink, made)
        harness.settled()
    assert in_order(sink.delivered)
    assert sorted(ids(sink)) == made


# -- discard ------------------------------------------------------------------------------------------------------


def test_a_discarded_event_leaves_a_mark_and_why_says_so(books: Ledger) -> None:
    [event_id] = books.emit("k")
    books.park("s", books.row(event_id, "dead"))
    books.catch_up("s")
    assert discard(books, {}, "wrong customer") == admin.Result(done=1)
    assert books.query(STATES) == []
    uid = UUID(books.uid(event_id))
    [action] = admin.audit(books.store, None, 10)
    assert (action["count"], action["filter"]) == (1, {"changed": [str(uid)]})
    [(sink, marked, found, actor, reason)] = books.query("select sink, id, uid, actor, reason from outbox.discarded")
    assert (sink, marked, found, actor, reason) == ("s", event_id, uid, "anna@host", "wrong customer")
    answer = admin.why(books.store, uid)
    assert answer["sinks"]["s"] | {"at": ""} == {
        "state": "discarded", "at": "", "by": "anna@host", "role": "postgres", "reason": "wrong customer",
        "attempts_recorded": [],
    }  # fmt: skip
    assert "by anna@host: wrong customer" in admin.why_text(answer)
    books.do("truncate outbox.event")
    assert (admin.why(books.store, uid))["sinks"]["s"] == answer["sinks"]["s"]


@pytest.mark.fence("a discarded event is read and delivered again")
@pytest.mark.usefixtures("impatient")
def test_a_row_that_a_session_would_read_again_is_left(books: Ledger) -> None:
    before, after = books.emit("k", "k")
    rows = [books.row(before, "dead"), books.row(after, "dead")]
    books.park("s", *rows)
    books.place("s", Position(BEGINNING, books.tick(), before))
    result = discard(books, {})
    assert (result.done, result.unsettled) == (1, 1)
    assert books.query(STATES) == [(after, "dead")]
    assert admin.positions_behind(books.store, {}) == "s"
    books.catch_up("s")
    assert discard(books, {}) == admin.Result(done=1)


@pytest.mark.fence("a discarded event is read and delivered again")
@pytest.mark.usefixtures("impatient")
def test_a_position_that_an_older_session_wrote_late_does_not_count(books: Ledger) -> None:
    """The newest session has read the position before it, and would deliver the event."""
    [event_id] = books.emit("k")
    books.park("s", books.row(event_id, "dead"))
    books.place("s", Position(BEGINNING))
    books.do("update outbox.shard set epoch = epoch + 1")
    books.catch_up("s")
    assert (discard(books, {})).unsettled == 1
    books.know_epochs("s")
    books.catch_up("s")
    assert (discard(books, {})).done == 1


def test_what_is_left_at_first_is_tried_again(books: Ledger) -> None:
    made = books.emit(*(f"k{n}" for n in range(1200)))
    books.park("s", *(books.row(i, "dead") for i in made))
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(discard, books, {})
        has(books.database, "select from outbox.audit")
        books.catch_up("s")
    assert asked.result() == admin.Result(done=1200)
    assert books.query("select count from outbox.audit") == [(1200,)]


def test_rows_under_a_lease_are_not_discarded(books: Ledger) -> None:
    leased, free = books.emit("a", "b")
    books.park("s", books.row(leased, lease=uuid4(), lease_for=60.0), books.row(free))
    books.catch_up("s")
    assert discard(books, {"states": ["waiting"]}) == admin.Result(done=1, under_way=1)


@pytest.mark.fence("a discarded event is read and delivered again")
def test_a_claim_passes_by_the_shards_of_a_discard(books: Ledger) -> None:
    """No shard is claimed, and no position set back, between the look at a position and the discard's commit."""
    [event_id] = books.emit("k")
    books.park("s", books.row(event_id, "dead"))
    books.catch_up("s")
    [(shard,)] = books.query("select shard from outbox.event")
    with books.database.connect() as connection, books.database.connect() as other:
        connection.execute(DISCARD.encode(), ("{}",))
        claim = "select from outbox.shard where shard = %s for update skip locked"
        assert other.execute(claim.encode(), (shard,)).fetchall() == []
        other.execute("set local lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            other.execute("update outbox.shard set epoch = epoch + 1 where shard = %s", (shard,))


def test_later_events_of_the_key_go_on(database: Database) -> None:
    """Rows that are held behind it are delivered, and then the key is delivered from the log again."""
    poison = set[int]()

    def script(event: StoredEvent, _attempt: int) -> Verdict:
        return Refused("never", 400) if event.id in poison else DELIVERED

    sink = MemorySink(script, keeps_order=False)
    made = emit(database, ["k"] * 5)
    poison.add(made[0])
    with running(database.dsn, (spec("s", hold=True), sink)) as harness:
        has(database, "select from outbox.delivery where state = 'dead'")
        has(database, "select from outbox.delivery where state = 'held' having count(*) = 4")
        result = admin.discard_deliveries(harness.store, {"states": ["dead"]}, actor="a", reason="poison", report=quiet)
        assert result == admin.Result(done=1)
        delivered(sink, made[1:])
        has(database, "select having not exists (select from outbox.delivery)")
        later = emit(database, ["k"])
        delivered(sink, later)
    assert ids(sink) == [*made[1:], *later]
