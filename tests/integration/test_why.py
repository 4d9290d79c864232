"""Why: where one event is, sink by sink, in every place that an event can be."""

from __future__ import annotations

import json
from collections.abc import Generator
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import pytest

from outbox_relay import admin
from outbox_relay.domain.errors import NotFound
from outbox_relay.domain.window import Position
from tests.support.database import Database
from tests.support.ledger import Ledger, emit, ledger


@pytest.fixture
def books(database: Database) -> Generator[Ledger]:
    """Yield a database with one sink `s` for every type, owned by the relay `here`."""
    with ledger(database) as found:
        found.register(("s", ["*"], "beginning"))
        found.live("here", "s")
        found.own("s")
        yield found


def why(books: Ledger, event_id: int, sink: str = "s") -> dict[str, Any]:
    """Return the answer of why for an event and a sink that recorded no attempt of it."""
    found = (admin.why(books.store, UUID(books.uid(event_id))))["sinks"][sink]
    assert found.pop("attempts_recorded") == []
    return found


def said(books: Ledger, event_id: int) -> str:
    """Return the text for people."""
    return admin.why_text(admin.why(books.store, UUID(books.uid(event_id))))


def to_the_end(books: Ledger, sink: str = "s") -> None:
    """Move every position of ``sink`` behind everything that is committed now."""
    books.catch_up(sink)


def test_an_unknown_event_is_not_found_and_may_not_be_committed_yet(books: Ledger) -> None:
    uid = uuid4()
    with pytest.raises(NotFound, match=f"{uid}.*not committed yet"):
        admin.why(books.store, uid)
    with books.database.connect() as open_transaction:
        event_id = emit(open_transaction, "k")
        row = open_transaction.execute("select uid from outbox.event where id = %s", (event_id,)).fetchone()
        assert row is not None
        with pytest.raises(NotFound):
            admin.why(books.store, row[0])


def test_the_event_itself_is_described_without_payload_and_header_values(books: Ledger) -> None:
    [event_id] = books.emit(
        "order-1", type="order.created", payload=b"SECRET-P", headers='{"authorization": "SECRET-H"}'
    )
    found = admin.why(books.store, UUID(books.uid(event_id)))
    described = {name: found[name] for name in ("type", "key", "id", "in_log")}
    assert described == {"type": "order.created", "key": "order-1", "id": event_id, "in_log": True}
    assert found["age_seconds"] < 30
    assert "SECRET" not in json.dumps(found) + admin.why_text(found)


def test_in_a_window_it_is_settled_up_to_the_last_id_done(books: Ledger) -> None:
    with books.database.connect() as first, books.database.connect() as second:
        late, later = emit(first, "k"), emit(second, "k")
        [seen] = books.emit("k")
        a = books.tick()
        first.commit()
        done, left = books.emit("k", "k")
        b = books.tick()
        second.commit()
        [after] = books.emit("k")
    books.place("s", Position(a, b, done))
    states = {event_id: (why(books, event_id))["state"] for event_id in (late, later, seen, done, left, after)}
    assert states == {
        late: "settled",
        later: "pending",
        seen: "settled",
        done: "settled",
        left: "pending",
        after: "pending",
    }
    books.place("s", Position(a, b, 0))
    assert (why(books, late))["state"] == "pending"


def test_after_a_rebase_what_was_not_done_is_read_once_more(books: Ledger) -> None:
    [done] = books.emit("k")
    to_the_end(books)
    [again] = books.emit("k")
    books.query("delete from outbox.relay returning 1")
    books.query("select outbox.rebase()")
    [new] = books.emit("k")
    window = (books.store.positions("s", [0]))[0]
    books.own("s")
    states: list[list[str]] = []
    for position in (window, window.at(again), window.closed()):
        books.place("s", position)
        states.append([(why(books, event_id))["state"] for event_id in (done, again, new)])
    assert states == [
        ["unknown", "pending", "pending"],
        ["unknown", "settled", "pending"],
        ["unknown", "settled", "pending"],
    ]


def test_a_sink_that_began_later_has_passed_it_over(books: Ledger) -> None:
    [event_id] = books.emit("k")
    books.register(("new", ["*"], "now"))
    found = why(books, event_id, "new")
    assert datetime.fromisoformat(found.pop("at")).tzinfo is not None
    assert found == {"state": "passed over", "by": "start"}
    assert 'passed over: emitted before this sink began, with start = "now", at ' in said(books, event_id)
    [next_id] = books.emit("k")
    to_the_end(books, "new")
    assert why(books, next_id, "new") == {"state": "settled"}


def test_a_waiting_event_tells_its_attempts_its_last_error_and_when_it_is_due(books: Ledger) -> None:
    [event_id] = books.emit("k")
    books.park("s", books.row(event_id, due_in=100.0, attempts=3, error="no such field", status=422))
    found = why(books, event_id)
    assert 60 < found.pop("due_in_seconds") <= 100
    assert found == {
        "state": "waiting",
        "attempts": 3,
        "last_error": "no such field",
        "last_status": 422,
        "last_attempt": None,
        "behind": None,
        "behind_state": None,
        "paused": False,
        "circuit": "closed",
        "sink_error": None,
    }
    assert "attempts: 3; last error: no such field (status 422)" in said(books, event_id)


def test_a_held_event_names_the_event_at_the_head_of_its_key(books: Ledger) -> None:
    dead, head, middle, last = books.emit("k", "k", "k", "k")
    books.emit("other")
    rows = [books.row(dead, "dead"), books.row(head, due_in=9.0), books.row(middle, "held"), books.row(last, "held")]
    books.park("s", *rows)
    assert (why(books, last))["state"] == "held"
    assert (why(books, last))["behind"] == books.uid(head)
    assert (why(books, middle))["behind"] == books.uid(head)
    assert f"held, behind {books.uid(head)} of its key" in said(books, last)
    [follower] = books.emit("k")
    assert (why(books, follower))["behind"] == books.uid(head)
    assert (why(books, head))["behind_state"] == "dead"


def test_an_event_under_way_names_the_relay_and_its_lease(books: Ledger) -> None:
    [event_id] = books.emit("k")
    books.park("s", books.row(event_id, due_in=0.0, lease=uuid4(), lease_for=30.0, claims=1))
    found = why(books, event_id)
    assert (found["state"], found["relay"]) == ("waiting", "here")
    assert 0 < found["lease_seconds"] <= 30
    assert "under way at relay here, leased for" in said(books, event_id)
    books.do("update outbox.delivery set lease_until = now() - interval '1 second'")
    found = why(books, event_id)
    assert (found["state"], "relay" in found) == ("waiting", False)


def test_a_dead_letter_tells_its_reason_and_since_when(books: Ledger) -> None:
    [event_id] = books.emit("k")
    books.park("s", books.row(event_id, "dead", attempts=30, error="gone", status=410))
    to_the_end(books)
    found = why(books, event_id)
    assert 0 <= found.pop("since_seconds") < 30
    assert found == {"state": "dead", "attempts": 30, "last_error": "gone", "last_status": 410, "last_attempt": None}
    assert "dead for " in said(books, event_id)


def test_rows_are_found_when_the_log_no_longer_has_the_event(books: Ledger) -> None:
    books.register(("t", ["*"], "beginning"), ("u", ["other.*"], "beginning"))
    [event_id] = books.emit("k", type="order.created")
    uid = UUID(books.uid(event_id))
    books.park("s", books.row(event_id, "dead", error="gone"))
    for sink in ("s", "t"):
        to_the_end(books, sink)
    books.do("truncate outbox.event")
    found = admin.why(books.store, uid)
    assert {name: sink["state"] for name, sink in found["sinks"].items()} == {
        "s": "dead",
        "t": "unknown",
        "u": "unknown",
    }
    assert (found["in_log"], found["type"]) == (False, "order.created")
    assert "no longer in the log" in admin.why_text(found)
    assert found["sinks"]["t"]["reason"] == "past retention"
