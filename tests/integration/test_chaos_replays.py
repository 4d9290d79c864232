"""The judge of replays in the chaos suite reads from a database what its unit tests give it."""

from __future__ import annotations

from uuid import UUID

from tests.chaos import days, replays
from tests.support.database import Database
from tests.support.ledger import ledger
from tests.support.replay_ledger import ReplayLedger
from tests.support.replays import start, tend


def test_the_judge_finds_exceptions_and_rows_that_are_no_longer_there(database: Database) -> None:
    """Goes red when the judge sees only the rows and the exceptions that are left at the end."""
    with ledger(database) as found:
        books = ReplayLedger(database, found.store)
        events = books.emit("a", "b", "c", "d")
        with database.connect() as connection:
            connection.execute(days.PREPARE.encode())  # from now on, events may be of a day in the past
        books.register(("s", ["*"], "now"))
        books.own("s")
        replays.prepare(database.dsn)
        books.park("s", books.row(events[1]))
        books.do("delete from outbox.delivery")
        start(database, since="PT1H")
        epochs = books.claim()
        books.settle(epochs, events[-1], 3, books.row(events[2], "dead"), passed_by={events[1]: "row"})
        tend(database)
        uids = [UUID(books.uid(event_id)).bytes for event_id in events]
        books.do("delete from outbox.replay_exception")
    arrived = {("s", 1): {uids[0], uids[3]}}
    assert list(replays.violations(database.dsn, arrived, 0)) == []
    arrived = {("s", 1): {uids[0]}}
    assert list(replays.violations(database.dsn, arrived, 0)) == [
        "replay 1 of s: 1 events did not arrive, were not passed by and did not die",
        "replay 1 of s: it counted 2 events as delivered, and 1 arrived",
    ]
