"""Erasures while relays, applications and operators go on: nothing is half erased, and no erased event is delivered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from psycopg import errors

from outbox_relay.domain.errors import DatabaseUnusable
from outbox_relay.postgres.migrations import rebase
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, has, ids
from tests.support.erasing import CONTENTS, Erasure, aerase
from tests.support.ledger import Ledger
from tests.support.memory_sink import MemorySink
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.sink_actions import call, register, seek
from tests.support.wait import auntil

KEYS = ["k", "other", "k", None, "k"]
ERASE = "update outbox.event set payload = '', headers = null, key = null, content_type = 'application/x-erased'"


# -- between look and change --------------------------------------------------------------------------------------


async def test_a_seek_between_look_and_change_leaves_every_event_as_it_is(books: Ledger) -> None:
    """The first event stays passed: it goes red when the counter of configurations is not compared."""
    books.emit("k", payload=b"kept")
    [(at,)] = books.query("select clock_timestamp()::text")
    books.emit("k", payload=b"kept")
    await books.catch_up("s")
    erasure = Erasure(books.database, {"key": "k"}, most_ids=1)
    erasure.until("erasing")
    seek(books.database, "s", at)
    assert erasure.run()["phase"] == "refused"
    assert [row[0] for row in books.query(CONTENTS)] == [b"kept"] * 2


async def test_a_sink_that_is_registered_meanwhile_has_all_looked_at_again(books: Ledger) -> None:
    books.emit("k", "k", payload=b"kept")
    await books.catch_up("s")
    erasure = Erasure(books.database, {"key": "k"})
    erasure.until("erasing")
    register(books.database, "new")
    assert erasure.run()["undelivered"][0]["sink"] == "new"
    assert [row[0] for row in books.query(CONTENTS)] == [b"kept"] * 2


async def test_a_registration_waits_for_the_step_that_changes_events(books: Ledger) -> None:
    """Goes red when the step does not lock the row of the counter."""
    books.emit("k")
    await books.catch_up("s")
    erasure = Erasure(books.database, {"key": "k"})
    erasure.until("erasing")
    with books.database.connect() as step:
        step.execute(
            "select outbox.erase('{\"key\": \"k\"}', 'tester', 'asked for', erasure_id => %s)", (erasure.number,)
        )
        with pytest.raises(errors.LockNotAvailable):
            call(books.database, "set lock_timeout = '50ms'; select outbox_internal.raise_config()")
        step.rollback()


async def test_an_event_that_is_committed_meanwhile_is_left_whole(books: Ledger) -> None:
    """Its id is below the others. Goes red when the snapshot of the look is not heeded."""
    with books.database.connect() as late:
        late.execute("select outbox.emit_raw('t', 'late', key => 'k')")
        books.emit("k", payload=b"early")
        await books.catch_up("s")
        erasure = Erasure(books.database, {"key": "k"})
        erasure.until("erasing")
        late.commit()
    books.emit("k", payload=b"later")
    last = erasure.run()
    assert (last["phase"], last["done"], last["left_over"]) == ("done", 1, 1)
    assert [row[0] for row in books.query(CONTENTS)] == [b"late", b"", b"later"]
    sink = MemorySink()
    async with running(books.database.dsn, (spec("s"), sink), expects={"lease_lost"}):
        books.do("update outbox.shard set owner = null, lease_until = now()")
        await auntil(lambda: _says(sink, {b"late", b"later"}), seconds=20, what="both are delivered")


async def _says(sink: MemorySink, wanted: set[bytes]) -> bool:
    return {event.payload for event in sink.delivered} == wanted


async def test_a_row_that_appears_meanwhile_stops_the_erasure(books: Ledger) -> None:
    """Goes red when events are not looked at once more before they are changed."""
    *first, last = books.emit(*["k"] * 3, payload=b"kept")
    await books.catch_up("s")
    erasure = Erasure(books.database, {"key": "k"}, most_ids=2)
    erasure.until("erasing")
    books.do("update outbox.shard set owner = null")
    books.do("update outbox.shard set owner = %s", books.relay)
    await books.park("s", books.row(last))
    said = erasure.run()
    assert (said["phase"], said["done"]) == ("refused", len(first))
    ended = await aerase(books.database, "--key", "k", "--json")
    assert ended.json["undelivered"] == [{"uid": books.uid(last), "sink": "s", "state": "waiting"}]
    assert books.query("select count from outbox.audit") == [(2,)]


async def test_two_erasures_of_a_key_count_each_event_once(books: Ledger) -> None:
    books.emit("k", "k", "k")
    await books.catch_up("s")
    both = [Erasure(books.database, {"key": "k"}, most_ids=1) for _ in range(2)]
    for erasure in both:
        erasure.until("erasing")
    assert [erasure.run()["done"] for erasure in both] == [3, 0]
    assert [erasure.last["left_over"] for erasure in both] == [0, 0]


async def test_an_erasure_that_was_interrupted_is_finished_by_the_next(books: Ledger) -> None:
    books.emit(*["customer-7"] * 3)
    books.do("select outbox.set_paused('s', true, 'me', 'customer-7 asked')")
    await books.catch_up("s")
    first = Erasure(books.database, {"key": "customer-7"})
    first.until("audit")
    ended = await aerase(books.database, "--key", "customer-7")
    assert (ended.code, ended.out) == (0, "0 events erased\n")
    [(reason,)] = books.query("select reason from outbox.audit where action = 'pause'")
    assert reason.startswith("hash:")
    assert reason.endswith(" asked")


async def test_the_audit_is_not_changed_for_a_key_without_events(books: Ledger) -> None:
    books.do("select outbox.set_paused('s', true, 'me', 'customer-7 asked')")
    assert (await aerase(books.database, "--key", "customer-7")).code == 0
    assert books.query("select reason from outbox.audit where action = 'pause'") == [("customer-7 asked",)]


async def test_a_key_inside_a_word_is_another_word(books: Ledger) -> None:
    books.emit("1234", "a.c*")
    books.do("select outbox.set_paused('s', true, 'me', 'of 12345 and 1234')")
    books.do("select outbox.set_paused('s', false, 'me', 'of a.c* and abcc')")
    await books.catch_up("s")
    assert [(await aerase(books.database, "--key", key)).code for key in ("1234", "a.c*")] == [0, 0]
    first, second = (reason for (reason,) in books.query("select reason from outbox.audit where reason like 'of%%'"))
    assert first.startswith("of 12345 and hash:")
    assert second.endswith(" and abcc")
    assert second.startswith("of hash:")


# -- relays -------------------------------------------------------------------------------------------------------


async def delivered_and_erased(database: Database, harness: RelayHarness, sink: MemorySink) -> list[int]:
    """Deliver events, and erase those of the key k; return the ids of the others."""
    wanted = emit(database, KEYS)
    await delivered(sink, wanted)
    await harness.settled()
    ended = await aerase(database, "--key", "k", "--json")
    assert (ended.code, ended.json["done"]) == (0, 3), ended
    return [event_id for event_id, key in zip(wanted, KEYS, strict=True) if key != "k"]


async def test_no_erased_event_is_delivered_after_a_seek(database: Database) -> None:
    """Goes red when the functions that read the log do not pass erased events by."""
    sink = MemorySink()
    async with running(database.dsn, (spec("s"), sink), lease_seconds=3.0, expects={"reload", "lease_lost"}) as harness:
        others = await delivered_and_erased(database, harness, sink)
        before = len(sink.delivered)
        found = await asyncio.to_thread(seek, database, "s", "beginning")
        assert found["again"] == len(others)
        others += emit(database, ["new"])
        await delivered(sink, others)
        await auntil(lambda: _again(sink, before, others), seconds=20, what="the others come again")
        await harness.settled()
    assert sorted(ids(sink)[before:]) == sorted(others)
    assert query(database, "select count(*) from outbox.delivery") == [(0,)]


async def _again(sink: MemorySink, before: int, wanted: list[int]) -> bool:
    return set(ids(sink)[before:]) >= set(wanted)


async def test_no_erased_event_is_delivered_to_a_new_sink_or_after_a_rebase(database: Database) -> None:
    sink, later, rebased = MemorySink(), MemorySink(), MemorySink()
    async with running(database.dsn, (spec("s"), sink)) as harness:
        others = await delivered_and_erased(database, harness, sink)
        await harness.stop()
    async with running(database.dsn, (spec("later"), later)) as harness:
        await delivered(later, others)
        await harness.settled()
        await harness.stop()
    call(database, "delete from outbox.relay")
    call(database, "update outbox.meta set system_identifier = 1")
    call(database, "delete from outbox.progress")
    await asyncio.to_thread(rebase, database.dsn)
    async with running(database.dsn, (spec("s"), rebased)) as harness:
        await delivered(rebased, others)
        await harness.settled()
    assert ids(later) == ids(rebased) == others


async def test_a_paused_sink_keeps_its_events_until_it_has_delivered_them(database: Database) -> None:
    sink, other = MemorySink(), MemorySink()
    async with running(database.dsn, (spec("s"), sink), (spec("other"), other)) as harness:
        await harness.owns_all()
        call(database, "update outbox.sink set paused = true where name = 's'")
        await auntil(lambda: _released(harness), seconds=20, what="the sink is released")
        wanted = emit(database, ["k", "k"])
        await delivered(other, wanted)
        refused = await asyncio.to_thread(Erasure(database, {"key": "k"}).run)
        assert {(each["sink"], each["state"]) for each in refused["undelivered"]} >= {("s", "pending")}
        call(database, "update outbox.sink set paused = false where name = 's'")
        await delivered(sink, wanted)
        assert (await aerase(database, "--key", "k")).out == "2 events erased\n"
    assert [event.payload for event in sink.delivered] == [b'{"n":0}', b'{"n":1}']


async def _released(harness: RelayHarness) -> bool:
    return not harness.lease_manager.held["s"]


async def test_no_row_is_made_of_an_erased_event(books: Ledger) -> None:
    """A copy of the log would be delivered empty. Goes red when outbox_internal.settle makes one."""
    [event_id] = books.emit("k")
    row = books.row(event_id)
    books.do(ERASE)
    with pytest.raises(DatabaseUnusable, match="no longer in the log"):
        await books.park("s", row)
    assert books.query("select count(*) from outbox.delivery") == [(0,)]


@pytest.mark.parametrize("late", [False, True])
async def test_an_event_that_version_2_took_under_this_content_type_is_delivered(
    database: Database, late: bool
) -> None:
    sink = MemorySink()
    with database.connect() as connection:
        connection.execute(
            "insert into outbox.event (shard, uid, type, payload, content_type) "
            "values (0, gen_random_uuid(), 't', 'x', 'application/x-erased'), "
            "(0, gen_random_uuid(), 't', '', 'application/x-erased')"
        )
        if not late:
            connection.commit()
        async with running(database.dsn, (spec("s"), sink)) as harness:
            await harness.owns_all()
            wanted = emit(database, ["k"])
            await delivered(sink, wanted)
            connection.commit()
            await has(database, "select from outbox_internal.backlog('s', null, 1000, 5.0) where events = 0")
            await harness.settled()
    assert sorted(event.payload or b"" for event in sink.delivered) == [b"x", b'{"n":0}']


# -- shards -------------------------------------------------------------------------------------------------------


def emitted(database: Database, content_type: str) -> Any:
    """Emit an event of a content type."""
    return call(database, "select outbox.emit_raw('t', '', content_type => %s)", content_type)


@pytest.mark.parametrize("content_type", ["application/x-erased", "Application/X-Erased"])
def test_the_content_type_of_erased_events_is_refused(database: Database, content_type: str) -> None:
    with pytest.raises(errors.InvalidParameterValue, match="stands for erased events"):
        emitted(database, content_type)
    assert emitted(database, "application/x-erased-not")


def test_new_partitions_compute_no_shard_and_keep_no_statistics(database: Database) -> None:
    call(database, "select outbox_internal.make_partitions(9)")
    call(database, "select outbox_internal.make_partitions(9, 'attempt')")
    assert (
        query(database, "select attrelid::regclass from pg_attribute where attname = 'shard' and attgenerated <> ''")
        == []
    )
    kept = """select a.attrelid::regclass::text, a.attname from outbox_internal.content_columns() c
                join pg_attribute a on a.attrelid = c.part and a.attnum = c.attnum
               where a.attstattarget is distinct from 0 and c.name <> 'delivery.key'"""
    assert query(database, kept) == []
