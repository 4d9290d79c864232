"""Claim, deliver, settle with a scripted sink on a real database: what becomes of events, and who may write what."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from outbox_relay import outbox
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Refused, Verdict
from outbox_relay.relay.dispatch import BATCH_ROWS
from outbox_relay.relay.log_reader import CHUNK_EVENTS
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, has, ids, in_order
from tests.support.memory_sink import BOTH, Gate, Late, MemorySink, fails
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.wait import until


class Answering(MemorySink):
    """Notes how many events each call brings, and answers none before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.told = Gate()

    async def deliver(self, batch: Sequence[StoredEvent], until: float, attempt: int = 0, /) -> Sequence[Verdict]:
        self.sizes.append(len(batch))
        await self.told.wait()
        return await super().deliver(batch, until, attempt)


@BOTH
def test_followers_of_a_failing_key_are_held_and_come_after_it(database: Database, keeps_order: bool) -> None:
    late = Late()
    sink = MemorySink(late, keeps_order=keeps_order)
    wanted = emit(database, [f"k{n % 10}" for n in range(400)])
    late.script = fails(2, wanted[:100:11])
    with running(database.dsn, (spec("s"), sink)) as harness:
        delivered(sink, wanted)
        more = emit(database, [f"k{n % 10}" for n in range(100)])
        delivered(sink, more)
        harness.settled()
    assert sorted(set(ids(sink))) == [*wanted, *more]
    assert len(ids(sink)) == len(set(ids(sink)))
    assert in_order(sink.delivered)
    assert query(database, "select count(*) from outbox.delivery") == [(0,)]


def test_rows_of_a_session_that_ends_are_claimed_again_at_once_and_no_claim_counts(database: Database) -> None:
    """Their leases last longer than any request: a relay that goes on does not wait for its own."""
    stuck = Gate()

    async def script(_event: StoredEvent, attempt: int) -> Verdict:
        if attempt == 1:
            return Failed("once")
        if attempt == 2:
            stuck.set()
            await Gate().wait()
        return DELIVERED

    sink = MemorySink(script, keeps_order=False)
    with running(database.dsn, (spec("s", park_after_seconds=30.0), sink), expects={"lease_lost"}) as harness:
        wanted = emit(database, ["a"])
        stuck.becomes()
        assert query(database, "select claims from outbox.delivery where lease_until > now()") == [(1,)]
        query(database, "update outbox.shard set epoch = epoch + 1 where owner = %s returning 1", harness.relay)
        harness.keeper.round()
        emit(database, ["b"])
        until(lambda: bool(harness.ended), seconds=10, what="the session ends")
        delivered(sink, wanted)


@BOTH
def test_a_refused_event_is_dead_with_its_reason_and_its_neighbours_are_delivered(
    database: Database, keeps_order: bool
) -> None:
    late = Late()
    sink = MemorySink(late, keeps_order=keeps_order)
    wanted = emit(database, ["a", "a", "a", "b", None])
    late.script = fails(99, [wanted[1]], Refused("too strange", 422))
    with running(database.dsn, (spec("s"), sink)) as harness:
        delivered(sink, [i for i in wanted if i != wanted[1]])
        harness.settled()
    rows = query(database, "select id, state, last_error, last_status, attempts from outbox.delivery")
    assert rows == [(wanted[1], "dead", "too strange", 422, 1)]
    assert in_order(sink.delivered)


@BOTH
def test_hold_keeps_followers_behind_a_dead_letter_and_skip_lets_them_go(database: Database, keeps_order: bool) -> None:
    late = Late()
    hold, skip = MemorySink(late, keeps_order=keeps_order), MemorySink(late, keeps_order=keeps_order)
    wanted = emit(database, ["a"])
    late.script = fails(99, wanted, Refused("never"))
    with running(database.dsn, (spec("hold", hold=True), hold), (spec("skip"), skip)):
        has(database, "select 1 from outbox.delivery where state = 'dead' having count(*) = 2")
        behind = emit(database, ["a", "b"])
        delivered(skip, behind)
        delivered(hold, behind[1:])
        held = has(database, "select sink, id from outbox.delivery where state = 'held'")
    assert held == [("hold", behind[0])]
    assert behind[0] not in ids(hold)


def due_row(database: Database) -> None:
    """Make a row that is due, of an event that the log does not have."""
    query(
        database,
        "insert into outbox.delivery (sink, id, shard, state, ordered, due_at, uid, type, payload, content_type, "
        "created_at) values ('s', nextval('outbox.event_id_seq'), 0, 'waiting', false, now(), gen_random_uuid(), "
        "'later', '', 'x/y', now()) returning 1",
    )


def test_rows_are_claimed_while_others_are_being_delivered(database: Database) -> None:
    """A second call with rows begins beside the first, and no third one: as many as the sink takes."""
    sink = Answering()
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        for calls in (1, 2):
            due_row(database)
            until(lambda calls=calls: len(sink.sizes) == calls, seconds=20, what=f"{calls} calls")
        due_row(database)
        claims = harness.store.calls["claim_rows"]
        assert query(database, "select count(*) from outbox.delivery where lease is null") == [(1,)]
        sink.told.set()
        has(database, "select 1 from outbox.delivery having count(*) = 0")
        assert harness.store.calls["claim_rows"] > claims
    assert sink.sizes == [1, 1, 1]


@pytest.mark.fence("new events wait while many rows are delivered, or a key never catches up with its rows")
def test_rows_come_in_small_batches_while_the_log_flows(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when an event of the log waits for as many rows as one call can hold."""
    monkeypatch.setattr("outbox_relay.relay.dispatch.FLOW_SECONDS", 600.0)
    sink = Answering()
    sink.told.set()
    with running(database.dsn, (spec("s"), sink)) as harness:
        delivered(sink, emit(database, ["k"]))
        for _ in range(250):
            due_row(database)
        until(lambda: len(sink.delivered) == 251, seconds=20, what="all are delivered")
        harness.settled()
    assert sum(sink.sizes) == 251
    assert max(sink.sizes) <= BATCH_ROWS


def test_a_slow_request_is_parked_and_does_not_hold_the_position_back(database: Database) -> None:
    gate = Gate()

    async def script(event: StoredEvent, _attempt: int) -> Verdict:
        if event.key == "slow":
            await gate.wait()
        return DELIVERED

    sink = MemorySink(script, keeps_order=False)
    with running(database.dsn, (spec("s", park_after_seconds=0.1), sink)) as harness:
        wanted = emit(database, ["slow", *(f"k{n}" for n in range(20)), "slow"])
        [(leased, lasts)] = has(
            database, "select lease is not null, lease_until > now() from outbox.delivery where state = 'waiting'"
        )
        assert (leased, lasts) == (True, True)
        delivered(sink, wanted[1:-1])
        has(database, "select 1 from outbox.delivery where state = 'held'")
        until(
            lambda: all(group.idle for group in harness.groups[0]),
            seconds=10,
            what="nothing is in hand",
        )
        gate.set()
        delivered(sink, wanted)
        harness.settled()
    assert len(ids(sink)) == len(wanted)
    assert in_order(sink.delivered)


def test_nothing_is_read_and_nothing_is_written_while_nothing_is_new(database: Database) -> None:
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        delivered(sink, emit(database, ["a"]))
        harness.settled()
        before = harness.store.calls.copy()
        until(lambda: harness.store.calls["tick"] >= before["tick"] + 8, seconds=20, what="8 ticks")
        after = harness.store.calls
    for quiet in ("read_small", "read_rest", "read_late"):
        assert after[quiet] == before[quiet], quiet
    assert after["settle"] <= before["settle"] + 1


def test_the_events_of_a_large_transaction_that_commits_late_are_found_once(database: Database) -> None:
    """Each read finds a bounded number of them by xid: goes red when most reads bring nothing."""
    sink = MemorySink()
    connection = database.connect()
    outbox.emit_many(connection, [outbox.Event("test.event", n, key=f"k{n % 7}") for n in range(20_000)])
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        delivered(sink, emit(database, ["while it is open"]))
        before = harness.store.calls["read_late"]
        with connection:
            connection.commit()
        until(lambda: len(sink.delivered) > 20_000, seconds=60, what="all of them are delivered")
        assert len(sink.delivered) == 20_001
        assert in_order(sink.delivered)
        # One for each chunk, one to see that nothing is left, one for a window meanwhile.
        assert before <= 2
        assert harness.store.calls["read_late"] - before <= 20_000 // CHUNK_EVENTS + 2


def test_only_routed_types_are_read(database: Database) -> None:
    sink = MemorySink()
    with running(database.dsn, (spec("s", patterns=("order.*",)), sink)) as harness:
        with database.connect() as connection:
            connection.execute("select outbox.emit('payment.done', '1'), outbox.emit('order.made', '2')")
        until(lambda: len(sink.delivered) == 1, seconds=10, what="one event")
        harness.settled()
    assert [(event.type, json.loads(event.payload)) for event in sink.delivered] == [("order.made", 2)]


@pytest.mark.fence("an event kills the process that delivers it")
def test_a_message_that_kills_its_relay_again_and_again_ends_dead(database: Database) -> None:
    """Every owner dies while it delivers one event: crashes are counted, then claims, and the others are delivered."""
    got: list[int] = []
    wanted = emit(database, [f"k{n % 3}" for n in range(30)])
    poison = wanted[7]

    for _ in range(12):
        deadly = Gate()

        async def script(event: StoredEvent, _attempt: int, deadly: Gate = deadly) -> Verdict:
            if event.id == poison:
                deadly.set()
                await Gate().wait()
            return DELIVERED

        sink = MemorySink(script, keeps_order=False)
        harness = RelayHarness(database.dsn, [(spec("s", park_after_seconds=60.0), sink)], lease_seconds=3.0)
        harness.start()
        dead = "select 1 from outbox.delivery where state = 'dead'"

        def over(deadly: Gate = deadly, dead: str = dead) -> bool:
            return deadly.is_set() or bool(query(database, dead))

        until(over, seconds=30, what="the message is delivered or dead")
        if not deadly.is_set():
            harness.settled()
        harness.crash()
        got += ids(sink)
        # No lease of the crashed relay is waited for here, and no share is left to it.
        query(database, "delete from outbox.relay returning 1")
        query(database, "update outbox.delivery set lease_until = now() where lease is not null returning 1")
        query(database, "update outbox.session set lease_until = now() returning 1")
        if query(database, dead):
            break
    rows = query(database, "select id, state, last_error from outbox.delivery")
    assert [row[:2] for row in rows] == [(poison, "dead")]
    assert "without an outcome" in rows[0][2]
    assert set(got) == set(wanted) - {poison}
