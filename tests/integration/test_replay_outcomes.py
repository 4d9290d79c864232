"""The outcome of an event in the replays that mean it, as `why` shows it, and the counts of these outcomes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest

from outbox_relay import admin
from tests.support.database import Database
from tests.support.ledger import ledger
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import running, spec
from tests.support.replay_ledger import ReplayLedger
from tests.support.replays import Clients, act, counts, ended, start, tend
from tests.support.sink_actions import call

EVENTS = 6
DISCARD = "select * from outbox.discard_deliveries('{\"sink\": \"s\"}'::jsonb, reason => 'no use')"


@pytest.fixture
def books(database: Database) -> Iterator[ReplayLedger]:
    """Yield a database with a sink `s` for every type that has passed over six events, and a replay of all of them."""
    with ledger(database) as found:
        mine = ReplayLedger(database, found.store)
        mine.emit(*(f"k{n}" for n in range(EVENTS)))
        mine.register(("s", ["*"], "now"))
        start(database, since="PT1H")
        yield mine


def judged(books: ReplayLedger, event_id: int, sink: str = "s") -> tuple[str, list[dict[str, Any]]]:
    """Return the state of an event, and its replays."""
    found = (admin.why(books.store, UUID(books.uid(event_id))))["sinks"][sink]
    return found["state"], found.get("replays", [])


def said(books: ReplayLedger, event_id: int) -> str:
    return admin.why_text(admin.why(books.store, UUID(books.uid(event_id)))).splitlines()[2]


def test_a_replay_that_delivered_an_event_settles_it_as_its_position_moves(books: ReplayLedger) -> None:
    """Goes red when replays have no influence on the state, or when their positions are not looked at."""
    assert judged(books, 1) == ("passed over", [{"id": 1, "state": "running", "outcome": "pending"}])
    epochs = books.claim()
    books.settle(epochs, 3, 3)
    assert judged(books, 3) == ("settled", [{"id": 1, "state": "running", "outcome": "delivered"}])
    assert judged(books, 4) == ("passed over", [{"id": 1, "state": "running", "outcome": "pending"}])
    act(books.database, "pause", 1)
    assert (judged(books, 4))[1] == [{"id": 1, "state": "paused", "outcome": "pending"}]
    act(books.database, "resume", 1)
    books.settle(epochs, EVENTS, 3)
    tend(books.database)
    assert judged(books, 4) == ("settled", [{"id": 1, "state": "done", "outcome": "delivered"}])
    books.let_go()
    tend(books.database)
    assert books.query("select cleared from outbox.replay") == [(True,)]
    assert judged(books, 4) == ("settled", [{"id": 1, "state": "done", "outcome": "delivered"}])
    assert said(books, 4) == "s  delivered; no record was kept; in replay 1 (done): delivered"
    assert books.query("select outbox.why(%s) #>> '{sinks, s, state}'", books.uid(4)) == [("settled",)]


def test_a_dead_letter_of_a_replay_is_failed_and_settled_only_once_it_was_delivered(books: ReplayLedger) -> None:
    """Goes red when dead letters that were given to the sink leave no exception: then it says "delivered"."""
    epochs = books.claim()
    books.settle(epochs, EVENTS, EVENTS, books.row(2, "dead"), books.row(3, "dead"))
    failed = [{"id": 1, "state": "running", "outcome": "failed"}]
    assert judged(books, 2) == ("passed over", failed)
    tend(books.database)
    assert judged(books, 2) == ("dead", [failed[0] | {"state": "done"}])
    books.do("delete from outbox.delivery where sink = 's' and id = 2")  # as by a retry that was delivered
    assert judged(books, 2) == ("settled", [failed[0] | {"state": "done"}])
    call(books.database, DISCARD)
    assert judged(books, 3) == ("discarded", [failed[0] | {"state": "done"}])
    assert counts(books.database, 1) == (6, 4, 2, 0)


def test_a_read_says_what_it_passes_by_and_the_settlement_counts_that(database: Database) -> None:
    """Goes red when an event that is passed by is not written with the position that passes it."""
    with ledger(database) as found:
        books = ReplayLedger(database, found.store)
        books.register(("s", ["*"], "beginning"))
        books.own("s")
        books.emit(*(f"k{n}" for n in range(EVENTS)))
        books.park("s", books.row(2), books.row(4, "dead"))
        books.catch_up("s")
        call(database, DISCARD.replace('"s"', '"s", "states": ["dead"]'))
        start(database, since="PT1H")
    sink, clients = MemorySink(), Clients()
    books.do("update outbox.delivery set due_at = now() + interval '1 hour'")
    books.do("update outbox.shard set owner = null")
    with running(database.dsn, (spec("s"), sink), replay_client=clients):
        ended(database, 1)
    assert sorted(clients.ids(1)) == [1, 3, 5, 6]
    assert counts(database, 1) == (6, 4, 0, 2)
    with ledger(database) as found:
        books = ReplayLedger(database, found.store)
        entry = {"id": 1, "state": "done", "outcome": "passed by"}
        assert judged(books, 2) == ("waiting", [entry | {"reason": "row"}])
        assert judged(books, 4) == ("discarded", [entry | {"reason": "discarded"}])
        assert (said(books, 4)).endswith("in replay 1 (done): passed by, it had been discarded")
        assert (said(books, 2)).endswith("in replay 1 (done): passed by, the sink had a row of it")


@pytest.mark.fence("an event that a replay leaves out counts as delivered, or one that it delivers as passed by")
def test_a_settlement_at_an_old_epoch_passes_nothing_by(books: ReplayLedger) -> None:
    """Goes red when exceptions are written without the fence."""
    old = books.claim()
    books.store.reclaim_shards("~1", books.relay)
    assert not books.settle(old, EVENTS, 5, passed_by={2: "row"})
    assert books.query("select from outbox.replay_exception") == []
