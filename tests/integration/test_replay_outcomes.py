"""The outcome of an event in the replays that mean it, as `why` shows it, and the counts of these outcomes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any
from uuid import UUID

import pytest

from outbox_relay import admin
from outbox_relay.domain.event import StoredEvent, pop_passed_by
from outbox_relay.postgres.rows import MOST_PAYLOAD
from tests.support.database import Database
from tests.support.ledger import ledger
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import running, spec
from tests.support.replay_ledger import ReplayLedger
from tests.support.replays import Clients, act, counts, ended, show, start, tend
from tests.support.sink_actions import call, register, remove, rename, seek

EVENTS = 6
DISCARD = "select * from outbox.discard_deliveries('{\"sink\": \"s\"}'::jsonb, reason => 'no use')"


@pytest.fixture
async def books(database: Database) -> AsyncGenerator[ReplayLedger]:
    """Yield a database with a sink `s` for every type that has passed over six events, and a replay of all of them."""
    async with ledger(database) as found:
        mine = ReplayLedger(database, found.store)
        mine.emit(*(f"k{n}" for n in range(EVENTS)))
        await mine.register(("s", ["*"], "now"))
        start(database, since="PT1H")
        yield mine


async def judged(books: ReplayLedger, event_id: int, sink: str = "s") -> tuple[str, list[dict[str, Any]]]:
    """Return the state of an event, and its replays."""
    found = (await admin.why(books.store, UUID(books.uid(event_id))))["sinks"][sink]
    return found["state"], found.get("replays", [])


async def said(books: ReplayLedger, event_id: int) -> str:
    return admin.why_text(await admin.why(books.store, UUID(books.uid(event_id)))).splitlines()[2]


async def test_a_replay_that_delivered_an_event_settles_it_as_its_position_moves(books: ReplayLedger) -> None:
    """Goes red when replays have no influence on the state, or when their positions are not looked at."""
    assert await judged(books, 1) == ("passed over", [{"id": 1, "state": "running", "outcome": "pending"}])
    epochs = await books.claim()
    await books.settle(epochs, 3, 3)
    assert await judged(books, 3) == ("settled", [{"id": 1, "state": "running", "outcome": "delivered"}])
    assert await judged(books, 4) == ("passed over", [{"id": 1, "state": "running", "outcome": "pending"}])
    act(books.database, "pause", 1)
    assert (await judged(books, 4))[1] == [{"id": 1, "state": "paused", "outcome": "pending"}]
    act(books.database, "resume", 1)
    await books.settle(epochs, EVENTS, 3)
    tend(books.database)
    assert await judged(books, 4) == ("settled", [{"id": 1, "state": "done", "outcome": "delivered"}])
    books.let_go()
    tend(books.database)
    assert books.query("select cleared from outbox.replay") == [(True,)]
    assert await judged(books, 4) == ("settled", [{"id": 1, "state": "done", "outcome": "delivered"}])
    assert await said(books, 4) == "s  delivered; no record was kept; in replay 1 (done): delivered"
    assert books.query("select outbox.why(%s) #>> '{sinks, s, state}'", books.uid(4)) == [("settled",)]


async def test_a_cancelled_replay_is_judged_by_the_positions_that_it_reached(books: ReplayLedger) -> None:
    """Goes red when the positions go with the ledger of the replay."""
    epochs = await books.claim()
    await books.settle(epochs, 3, 3, books.row(2))
    act(books.database, "cancel", 1)
    for _ in range(2):
        assert await judged(books, 1) == ("settled", [{"id": 1, "state": "cancelled", "outcome": "delivered"}])
        for undelivered in (2, 5):
            expected = ("passed over", [{"id": 1, "state": "cancelled", "outcome": "cancelled"}])
            assert await judged(books, undelivered) == expected
        books.let_go()
        tend(books.database)
    assert books.query("select cleared, dropped from outbox.replay") == [(True, 1)]
    assert books.query("select from outbox.discarded") == []


async def test_a_dead_letter_of_a_replay_is_failed_and_settled_only_once_it_was_delivered(books: ReplayLedger) -> None:
    """Goes red when dead letters that were given to the sink leave no exception: then it says "delivered"."""
    epochs = await books.claim()
    await books.settle(epochs, EVENTS, EVENTS, books.row(2, "dead"), books.row(3, "dead"))
    failed = [{"id": 1, "state": "running", "outcome": "failed"}]
    assert await judged(books, 2) == ("passed over", failed)
    tend(books.database)
    assert await judged(books, 2) == ("dead", [failed[0] | {"state": "done"}])
    books.do("delete from outbox.delivery where sink = 's' and id = 2")  # as by a retry that was delivered
    assert await judged(books, 2) == ("settled", [failed[0] | {"state": "done"}])
    call(books.database, DISCARD)
    assert await judged(books, 3) == ("discarded", [failed[0] | {"state": "done"}])
    assert counts(books.database, 1) == (6, 4, 2, 0)


async def test_a_read_says_what_it_passes_by_and_the_settlement_counts_that(database: Database) -> None:
    """Goes red when an event that is passed by is not written with the position that passes it."""
    async with ledger(database) as found:
        books = ReplayLedger(database, found.store)
        await books.register(("s", ["*"], "beginning"))
        await books.own("s")
        books.emit(*(f"k{n}" for n in range(EVENTS)))
        await books.park("s", books.row(2), books.row(4, "dead"))
        await books.catch_up("s")
        call(database, DISCARD.replace('"s"', '"s", "states": ["dead"]'))
        start(database, since="PT1H")
    sink, clients = MemorySink(), Clients()
    books.do("update outbox.delivery set due_at = now() + interval '1 hour'")
    books.do("update outbox.shard set owner = null")
    async with running(database.dsn, (spec("s"), sink), replay_client=clients):
        await ended(database, 1)
    assert sorted(clients.ids(1)) == [1, 3, 5, 6]
    assert counts(database, 1) == (6, 4, 0, 2)
    async with ledger(database) as found:
        books = ReplayLedger(database, found.store)
        entry = {"id": 1, "state": "done", "outcome": "passed by"}
        assert await judged(books, 2) == ("waiting", [entry | {"reason": "row"}])
        assert await judged(books, 4) == ("discarded", [entry | {"reason": "discarded"}])
        assert (await said(books, 4)).endswith("in replay 1 (done): passed by, it had been discarded")
        assert (await said(books, 2)).endswith("in replay 1 (done): passed by, the sink had a row of it")


async def read(
    books: ReplayLedger, rows: int = 100, payload_bytes: int = 1 << 20
) -> tuple[list[StoredEvent], list[StoredEvent]]:
    """Return the events that a relay would deliver of a first read, and those that it would pass by."""
    events = await books.store.read_replay(1, list(range(64)), (0, EVENTS), rows, payload_bytes, MOST_PAYLOAD, None)
    return events, pop_passed_by(events)


async def test_a_read_that_is_cut_names_only_what_lies_before_its_last_event(books: ReplayLedger) -> None:
    """Goes red when events after the cut are passed by: they would be counted twice, or skipped."""
    for event_id in (2, 5):
        books.do("insert into outbox.discarded (sink, id, uid, reason) values ('s', %s, %s, 'x')", event_id,
                 books.uid(event_id))  # fmt: skip
    events, passed_by = await read(books)
    assert ([event.id for event in events], [event.id for event in passed_by]) == ([1, 3, 4, 6], [2, 5])
    events, passed_by = await read(books, payload_bytes=5)
    assert ([event.id for event in events], [event.id for event in passed_by]) == ([1, 3], [2])
    events, passed_by = await read(books, rows=2)
    assert ([event.id for event in events], [event.id for event in passed_by]) == ([1], [2])


async def test_a_payload_above_the_ceiling_is_not_fetched_by_a_read_of_a_replay(books: ReplayLedger) -> None:
    """Goes red when the payload comes beside its fault: it would be in memory before it is refused."""
    books.do("update outbox.event set payload = %s where id = 3", bytes(2_000_000))
    events, _ = await read(books, payload_bytes=1 << 30)
    assert [event.id for event in events] == list(range(1, EVENTS + 1))
    assert [event.id for event in events if event.payload is None] == [3]


async def test_a_settlement_at_an_old_epoch_passes_nothing_by(books: ReplayLedger) -> None:
    """Goes red when exceptions are written without the fence."""
    old = await books.claim()
    await books.store.reclaim_shards("~1", books.relay, 60.0)
    assert not await books.settle(old, EVENTS, 5, passed_by={2: "row"})
    assert books.query("select from outbox.replay_exception") == []


async def test_outcomes_follow_a_rename_and_end_with_a_removal(books: ReplayLedger) -> None:
    epochs = await books.claim()
    await books.settle(epochs, 3, 3)
    delivered = [{"id": 1, "state": "running", "outcome": "delivered"}]
    seek(books.database, "s", "now")
    assert await judged(books, 1) == ("settled", delivered)
    rename(books.database, "s", "t")
    assert await judged(books, 1, "t") == ("settled", delivered)
    remove(books.database, "t")
    remove(books.database, "t", forget=True)
    register(books.database, "t", start="now")
    assert (await judged(books, 1, "t"))[1] == []


async def test_an_event_that_comes_again_after_a_replay_says_so(books: ReplayLedger) -> None:
    epochs = await books.claim()
    await books.settle(epochs, EVENTS, EVENTS)
    seek(books.database, "s", "beginning")
    found = (await admin.why(books.store, UUID(books.uid(1))))["sinks"]["s"]
    assert (found["state"], found["again"]) == ("pending", True)


async def test_counts_of_a_running_replay_have_the_events_that_it_passed_by(books: ReplayLedger) -> None:
    epochs = await books.claim()
    await books.settle(epochs, 3, 2, passed_by={2: "row"})
    assert show(books.database, 1)["passed_by"] == 1
    await books.settle(epochs, EVENTS, 3)
    tend(books.database)
    books.let_go()
    tend(books.database)
    assert counts(books.database, 1) == (6, 5, 0, 1)
    assert (await judged(books, 2))[1] == [{"id": 1, "state": "done", "outcome": "passed by", "reason": "row"}]


async def test_a_folded_ledger_keeps_the_count_of_events_that_were_passed_by(books: ReplayLedger) -> None:
    epochs = await books.claim()
    await books.settle(epochs, 1, 1)
    await books.settle(epochs, 2, 0, passed_by={2: "row"})
    books.do("insert into outbox.replay_progress (replay, shards, last_ids, seen) "
             "select 1, '{}', '{}', 0 from generate_series(1, 500)")  # fmt: skip
    tend(books.database)
    assert books.query("select count(*), sum(passed_by) from outbox.replay_progress") == [(1, 1)]


async def test_exceptions_go_with_the_events_of_the_log(books: ReplayLedger) -> None:
    epochs = await books.claim()
    await books.settle(epochs, EVENTS, 4, passed_by={2: "row", 5: "row"})
    books.do("delete from outbox.event where id < 4")
    assert await books.store.trim_routes() == 1
    assert books.query("select id from outbox.replay_exception") == [(5,)]
