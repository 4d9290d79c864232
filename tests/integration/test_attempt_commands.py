"""The commands attempts and running, and the recorded attempts that why shows."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

from outbox_relay import admin
from outbox_relay.domain.attempts import AttemptRecord
from outbox_relay.relay.calls import new_row_lease
from tests.support import books as owned
from tests.support.command import Ended, inside
from tests.support.database import Database
from tests.support.ledger import Ledger

books = owned.books


def ask(database: Database, *arguments: str) -> Ended:
    """Run a command on `database`, which has an event loop of its own."""
    return inside(*arguments, "--dsn", database.dsn)


def three(books: Ledger, uid: str, event: int) -> None:
    """Record three attempts of an event, the last of which delivered it."""
    now = time.monotonic()
    detail = {"code": "http_500", "answer": "oops"}
    failed = AttemptRecord(event, uid, 1, "failed", now - 90, 0.25, 500, "answered 500", detail)
    delivered = AttemptRecord(event, uid, 3, "delivered", now - 10, 0.0125, 204, None, {"partition": 3, "offset": 12})
    records = [delivered, failed._replace(number=2, ended_at=now - 50), failed]
    books.store.settle("s", books.relay, {}, [], {}, records=records, relay="here")


def test_attempts_are_listed_oldest_first(books: Ledger) -> None:
    [event] = books.emit("k")
    uid = books.uid(event)
    three(books, uid, event)
    found = admin.attempts(books.store, UUID(uid))
    assert found["uid"] == uid
    assert [(each["number"], each["outcome"]) for each in found["attempts"]] == [
        (1, "failed"),
        (2, "failed"),
        (3, "delivered"),
    ]
    first = found["attempts"][0]
    age = datetime.now(UTC) - datetime.fromisoformat(first.pop("at"))
    assert 80 < age.total_seconds() < 120
    assert first == {
        "sink": "s",
        "number": 1,
        "relay": "here",
        "outcome": "failed",
        "status": 500,
        "milliseconds": 250.0,
        "error": "answered 500",
        "detail": {"code": "http_500", "answer": "oops"},
    }
    ended = ask(books.database, "attempts", uid)
    assert (ended.code, ended.err) == (0, "")
    header, one, _, three_ = ended.out.splitlines()
    assert header.split() == ["AT", "SINK", "ATTEMPT", "OUTCOME", "TOOK", "STATUS", "RELAY", "DETAILS"]
    assert one.split(maxsplit=1)[1] == "s     1        failed     250.0 ms  500     here   answered 500, answered: oops"
    assert three_.endswith("s     3        delivered  12.5 ms   204     here   partition 3, offset 12")
    assert (ask(books.database, "attempts", uid, "--json")).json == admin.attempts(books.store, UUID(uid))


def test_why_tells_when_an_event_was_delivered_and_what_came_before(books: Ledger) -> None:
    books.register(("t", ["*"], "beginning"))
    books.do("update outbox.sink set created_at = created_at - interval '1 hour'")  # the attempts lie in the past
    [event] = books.emit("k")
    uid = books.uid(event)
    for sink in ("s", "t"):
        books.catch_up(sink)
    three(books, uid, event)
    found = admin.why(books.store, UUID(uid))
    assert [each["number"] for each in found["sinks"]["s"]["attempts_recorded"]] == [1, 2, 3]
    assert found["sinks"]["t"] == {"state": "settled", "attempts_recorded": []}
    lines = admin.why_text(found).splitlines()
    [delivered] = [line for line in lines if line.startswith("s  delivered 20")]
    assert delivered.endswith("by relay here, attempt 3, status 204, took 12.5 ms, partition 3, offset 12")
    timeline = lines[lines.index(delivered) + 1 :]
    assert [line.split()[1:4] for line in timeline[:3]] == [
        ["attempt", "1", "failed"],
        ["attempt", "2", "failed"],
        ["attempt", "3", "delivered"],
    ]
    assert timeline[3] == "t  delivered; no record was kept"


def test_running_shows_leased_rows_longest_first(books: Ledger) -> None:
    old, young, unknown, ended, waiting = books.emit("a", "b", "c", "d", None)
    now = datetime.now(UTC)
    for event, lease in (
        (old, new_row_lease(now - timedelta(seconds=100))),
        (young, new_row_lease(now)),
        (unknown, uuid4()),
        (ended, new_row_lease(now)),
    ):
        books.park("s", books.row(event, due_in=0.0, lease=lease, lease_for=60.0, claims=1))
    books.park("s", books.row(waiting))
    books.do("update outbox.delivery set lease_until = now() - interval '1 s' where id = %s", ended)
    books.do("update outbox.delivery set state = 'held' where id = %s", young)
    found = (admin.running(books.store, 0.0))["running"]
    assert [each["uid"] for each in found] == [books.uid(unknown), books.uid(old), books.uid(young)]
    assert (found[0]["since"], found[0]["running_seconds"]) == (None, None)
    assert 99 < found[1]["running_seconds"] < 130
    assert (found[1]["relay"], found[1]["attempt"], found[1]["type"]) == ("here", 1, "test.event")
    long = (admin.running(books.store, 60.0))["running"]
    assert [each["uid"] for each in long] == [books.uid(unknown), books.uid(old)]
    ended_command = ask(books.database, "running", "--longer-than", "60")
    assert (ended_command.code, ended_command.err) == (0, "")
    header, *rows = ended_command.out.splitlines()
    assert header.split() == ["UID", "SINK", "TYPE", "KEY", "ATTEMPT", "RUNNING", "RELAY", "LEASE", "LEFT"]
    assert [row.split()[0] for row in rows] == [books.uid(unknown), books.uid(old)]
    assert "unknown" in rows[0]


def test_an_event_that_is_still_to_be_delivered_names_the_error_and_since_when(books: Ledger) -> None:
    [event] = books.emit("k")
    uid = books.uid(event)
    books.do(
        "update outbox.sink set circuit = 'open', circuit_since = now() - interval '45 minutes', "
        "last_error = 'Connection refused', last_error_at = now() - interval '10 s'"
    )
    ended = ask(books.database, "attempts", uid)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("s: not delivered yet; counted attempts: 0; the destination has been down for 45 min")
    assert "attempts meanwhile are neither counted nor recorded; last error " in ended.out
    assert ended.out.endswith("s ago: Connection refused\n")
    [outstanding] = (ask(books.database, "attempts", uid, "--json")).json["outstanding"]
    assert 2700 <= outstanding.pop("down_seconds") < 2760
    assert 10 <= outstanding.pop("error_seconds_ago") < 70
    assert outstanding == {
        "sink": "s", "state": "pending", "behind": None, "attempts": 0, "error": "Connection refused",
        "circuit": "open",
    }  # fmt: skip
