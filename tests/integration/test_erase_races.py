"""Erasures while relays, applications and operators go on: nothing is half erased, and no erased event is delivered."""

from __future__ import annotations

import pytest
from psycopg import errors

from outbox_relay.domain.errors import DatabaseUnusable
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, ids
from tests.support.erasing import CONTENTS, Erasure, erase
from tests.support.ledger import Ledger
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.sink_actions import call, seek
from tests.support.wait import until

KEYS = ["k", "other", "k", None, "k"]
ERASE = "update outbox.event set payload = '', headers = null, key = null, content_type = 'application/x-erased'"


# -- between look and change --------------------------------------------------------------------------------------


@pytest.mark.fence("a position is put back between the look of an erasure and its change")
def test_a_seek_between_look_and_change_leaves_every_event_as_it_is(books: Ledger) -> None:
    """The first event stays passed: it goes red when the counter of configurations is not compared."""
    books.emit("k", payload=b"kept")
    [(at,)] = books.query("select clock_timestamp()::text")
    books.emit("k", payload=b"kept")
    books.catch_up("s")
    erasure = Erasure(books.database, {"key": "k"}, most_ids=1)
    erasure.until("erasing")
    seek(books.database, "s", at)
    assert erasure.run()["phase"] == "refused"
    assert [row[0] for row in books.query(CONTENTS)] == [b"kept"] * 2


@pytest.mark.fence("a position is put back between the look of an erasure and its change")
def test_a_registration_waits_for_the_step_that_changes_events(books: Ledger) -> None:
    """Goes red when the step does not lock the row of the counter."""
    books.emit("k")
    books.catch_up("s")
    erasure = Erasure(books.database, {"key": "k"})
    erasure.until("erasing")
    with books.database.connect() as step:
        step.execute(
            "select outbox.erase('{\"key\": \"k\"}', 'tester', 'asked for', erasure_id => %s)", (erasure.number,)
        )
        with pytest.raises(errors.LockNotAvailable):
            call(books.database, "set lock_timeout = '50ms'; select outbox_internal.raise_config()")
        step.rollback()


@pytest.mark.fence("an event of an erased key is committed after the look, and erased undelivered")
def test_an_event_that_is_committed_meanwhile_is_left_whole(books: Ledger) -> None:
    """Its id is below the others. Goes red when the snapshot of the look is not heeded."""
    with books.database.connect() as late:
        late.execute("select outbox.emit_raw('t', 'late', key => 'k')")
        books.emit("k", payload=b"early")
        books.catch_up("s")
        erasure = Erasure(books.database, {"key": "k"})
        erasure.until("erasing")
        late.commit()
    books.emit("k", payload=b"later")
    last = erasure.run()
    assert (last["phase"], last["done"], last["left_over"]) == ("done", 1, 1)
    assert [row[0] for row in books.query(CONTENTS)] == [b"late", b"", b"later"]
    sink = MemorySink()
    with running(books.database.dsn, (spec("s"), sink), expects={"lease_lost"}):
        books.do("update outbox.shard set owner = null, released_at = now()")
        until(lambda: _says(sink, {b"late", b"later"}), seconds=20, what="both are delivered")


def _says(sink: MemorySink, wanted: set[bytes]) -> bool:
    return {event.payload for event in sink.delivered} == wanted


@pytest.mark.fence("a row of an event appears after the look of an erasure")
def test_a_row_that_appears_meanwhile_stops_the_erasure(books: Ledger) -> None:
    """Goes red when events are not looked at once more before they are changed."""
    *first, last = books.emit(*["k"] * 3, payload=b"kept")
    books.catch_up("s")
    erasure = Erasure(books.database, {"key": "k"}, most_ids=2)
    erasure.until("erasing")
    books.do("update outbox.shard set owner = null")
    books.do("update outbox.shard set owner = %s", books.relay)
    books.park("s", books.row(last))
    said = erasure.run()
    assert (said["phase"], said["done"]) == ("refused", len(first))
    ended = erase(books.database, "--key", "k", "--json")
    assert ended.json["undelivered"] == [{"uid": books.uid(last), "sink": "s", "state": "waiting"}]
    assert books.query("select count from outbox.audit") == [(2,)]


# -- relays -------------------------------------------------------------------------------------------------------


def delivered_and_erased(database: Database, harness: RelayHarness, sink: MemorySink) -> list[int]:
    """Deliver events, and erase those of the key k; return the ids of the others."""
    wanted = emit(database, KEYS)
    delivered(sink, wanted)
    harness.settled()
    ended = erase(database, "--key", "k", "--json")
    assert (ended.code, ended.json["done"]) == (0, 3), ended
    return [event_id for event_id, key in zip(wanted, KEYS, strict=True) if key != "k"]


@pytest.mark.fence("an erased event is read again, after a seek or a rebase, or by a new sink")
def test_no_erased_event_is_delivered_after_a_seek(database: Database) -> None:
    """Goes red when the functions that read the log do not pass erased events by."""
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink), lease_seconds=3.0, expects={"reload", "lease_lost"}) as harness:
        others = delivered_and_erased(database, harness, sink)
        before = len(sink.delivered)
        found = seek(database, "s", "beginning")
        assert found["again"] == len(others)
        others += emit(database, ["new"])
        delivered(sink, others)
        until(lambda: _again(sink, before, others), seconds=20, what="the others come again")
        harness.settled()
    assert sorted(ids(sink)[before:]) == sorted(others)
    assert query(database, "select count(*) from outbox.delivery") == [(0,)]


def _again(sink: MemorySink, before: int, wanted: list[int]) -> bool:
    return set(ids(sink)[before:]) >= set(wanted)


@pytest.mark.fence("a relay parks its copy of an event that was erased meanwhile")
def test_no_row_is_made_of_an_erased_event(books: Ledger) -> None:
    """A copy of the log would be delivered empty. Goes red when outbox_internal.settle makes one."""
    [event_id] = books.emit("k")
    row = books.row(event_id)
    books.do(ERASE)
    with pytest.raises(DatabaseUnusable, match="no longer in the log"):
        books.park("s", row)
    assert books.query("select count(*) from outbox.delivery") == [(0,)]


# -- shards -------------------------------------------------------------------------------------------------------
