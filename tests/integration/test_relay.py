"""Claim, deliver, settle with a scripted sink on a real database: what becomes of events, and who may write what."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from outbox_relay import outbox
from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.event import SHARDS, StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Refused, Unavailable, Verdict
from outbox_relay.domain.retry import RetryPolicy
from outbox_relay.relay.dispatch import BATCH_ROWS
from outbox_relay.relay.log_reader import CHUNK_EVENTS
from tests.support.database import Database, query
from tests.support.deliveries import delivered, emit, has, ids, in_order
from tests.support.ledger import ledger
from tests.support.memory_sink import BOTH, Gate, Late, MemorySink, fails
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.wait import until


@BOTH
def test_everything_is_delivered_once_and_in_order_per_key(database: Database, keeps_order: bool) -> None:
    sink = MemorySink(keeps_order=keeps_order)
    with running(database.dsn, (spec("s"), sink)) as harness:
        wanted = emit(database, [f"k{n % 7}" for n in range(3000)] + [None] * 50)
        delivered(sink, wanted)
        harness.settled()
    assert sorted(ids(sink)) == wanted
    assert in_order(sink.delivered)
    assert query(database, "select count(*) from outbox.delivery") == [(0,)]


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


def test_what_comes_while_a_call_waits_for_others_is_read_together(database: Database) -> None:
    """Two calls are under way and one waits: until it is sent no window is begun, and then one takes all there is."""
    sink = Answering()
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        wanted: list[int] = []
        for number in range(1, 4):
            wanted += emit(database, ["k"])

            def read(number: int = number) -> bool:
                return harness.loops[0].in_hand == number

            until(read, seconds=20, what=f"{number} events are in hand")
        for _ in range(10):
            wanted += emit(database, ["k"])
        sink.told.set()
        delivered(sink, wanted)
    assert sink.sizes == [1, 1, 1, 10]


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


def test_followers_in_later_batches_are_held_too(database: Database) -> None:
    """A key becomes blocked while batches with its later events wait to be sent."""
    late = Late()
    sink = MemorySink(late)
    sink.max_batch = 5
    wanted = emit(database, [f"k{n % 4}" for n in range(100)])
    late.script = fails(2, [wanted[2], wanted[41]])
    with running(database.dsn, (spec("s"), sink)) as harness:
        delivered(sink, wanted)
        harness.settled()
    assert ids(sink).count(wanted[2]) == 1
    assert in_order(sink.delivered)


def test_held_rows_of_one_key_are_delivered_many_at_a_time(database: Database) -> None:
    """Else a key with more events a second than claims can be made never gets out of its rows."""
    late = Late()
    sink = MemorySink(late)
    wanted = emit(database, ["hot"] * 2000)
    late.script = fails(1, wanted[::400])
    with running(database.dsn, (spec("s"), sink)) as harness:
        delivered(sink, wanted)
        harness.settled()
    assert ids(sink) == wanted
    assert harness.store.calls["delete_rows"] + harness.store.calls["update_rows"] <= 50


def test_what_is_claimed_with_a_row_that_is_refused_stays_behind_it_untouched(database: Database) -> None:
    late = Late()
    sink = MemorySink(late, holds=True)
    wanted = emit(database, ["a"] * 6)
    first = fails(1, wanted[:1])

    def script(event: StoredEvent, attempt: int) -> Verdict:
        return Refused("never") if event.id == wanted[3] else first(event, attempt)

    late.script = script
    with running(database.dsn, (spec("s", hold=True), sink)):
        has(database, "select 1 from outbox.delivery where state = 'dead'")
        has(database, "select 1 from outbox.delivery where lease is null having count(*) = 3")
    assert ids(sink) == wanted[:3]
    rows = query(database, "select id, state, attempts, claims, last_error from outbox.delivery order by id")
    assert rows == [(wanted[3], "dead", 1, 0, "never"), *((i, "held", 0, 0, None) for i in wanted[4:])]


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
def test_other_keys_flow_while_one_fails(database: Database, keeps_order: bool) -> None:
    def script(event: StoredEvent, _attempt: int) -> Verdict:
        return Failed("never", 500) if event.key == "bad" else DELIVERED

    sink = MemorySink(script, keeps_order=keeps_order)
    slow_retry = RetryPolicy(attempts=50, base_seconds=3600)
    with running(database.dsn, (spec("s", retry=slow_retry), sink)):
        emit(database, ["bad", *(f"k{n}" for n in range(50)), "bad", "bad"])
        rows = has(database, "select 1 from outbox.delivery having count(*) = 3")
        good = emit(database, [f"k{n}" for n in range(50)])
        delivered(sink, good)
    assert rows
    assert query(database, "select state, attempts from outbox.delivery order by id") == [
        ("waiting", 1),
        ("held", 0),
        ("held", 0),
    ]


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
def test_an_event_is_dead_after_its_attempts(database: Database, keeps_order: bool) -> None:
    sink = MemorySink(fails(99), keeps_order=keeps_order)
    circuit = CircuitPolicy(open_after=1000, probe_seconds=0.05)
    with running(database.dsn, (spec("s", circuit=circuit), sink)):
        [wanted] = emit(database, ["a"])
        rows = has(database, "select id, attempts, last_error from outbox.delivery where state = 'dead'")
    assert rows == [(wanted, 5, "not now")]


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


@BOTH
def test_a_destination_that_is_down_costs_no_attempt_and_no_row(database: Database, keeps_order: bool) -> None:
    down = True

    def script(_event: StoredEvent, _attempt: int) -> Verdict:
        return Unavailable("down for tests") if down else DELIVERED

    sink = MemorySink(script, keeps_order=keeps_order)
    circuit = CircuitPolicy(open_after=1, probe_seconds=0.05, probe_max_seconds=0.1)
    with running(database.dsn, (spec("s", circuit=circuit), sink)) as harness:
        wanted = emit(database, [f"k{n % 5}" for n in range(200)])
        has(database, "select 1 from outbox.sink where circuit <> 'closed' and last_error = 'down for tests'")
        written = harness.store.calls["settle"]
        asked = len(sink.attempts)
        until(lambda: len(sink.attempts) > asked + 3, seconds=10, what="probes are sent")
        assert harness.store.calls["settle"] == written
        assert query(database, "select count(*) from outbox.delivery") == [(0,)]
        down = False
        delivered(sink, wanted)
        harness.settled()
        has(database, "select 1 from outbox.sink where circuit = 'closed'")
    assert in_order(sink.delivered)
    assert len(ids(sink)) == len(wanted)


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


def test_shards_at_the_same_position_are_read_with_one_call(database: Database) -> None:
    sink = MemorySink()
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.owns_all()
        delivered(sink, emit(database, [f"k{n}" for n in range(500)]))
        harness.settled()
        assert len(harness.groups[0]) == 1
        before = harness.store.calls["read_small"]
        wanted = emit(database, [f"k{n}" for n in range(500)])
        delivered(sink, wanted)
        calls = harness.store.calls["read_small"] - before
    assert len({event.shard for event in sink.delivered}) == SHARDS
    assert calls <= 5


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
    with running(database.dsn, (spec("s", patterns=("order.*",), types=("order.%",)), sink)) as harness:
        with database.connect() as connection:
            connection.execute("select outbox.emit('payment.done', '1'), outbox.emit('order.made', '2')")
        until(lambda: len(sink.delivered) == 1, seconds=10, what="one event")
        harness.settled()
    assert [(event.type, json.loads(event.payload)) for event in sink.delivered] == [("order.made", 2)]


def test_what_may_have_killed_its_owners_is_claimed_in_turn_with_the_others(database: Database) -> None:
    """Alone, but without waiting until nothing else is left: behind it wait the later events of its key."""
    sink = MemorySink()
    sink.max_batch, sink.max_in_flight = 10, 1
    with ledger(database) as hand:
        events = hand.emit(*(f"k{n}" for n in range(40)))
        hand.register(("s", ["*"], "now"))
        hand.own("s")
        hand.park("s", *(hand.row(event, claims=3 if n >= 37 else 0) for n, event in enumerate(events)))
        hand.store.release_shards("s", hand.relay, hand.epochs["s"])
    with running(database.dsn, (spec("s"), sink)) as harness:
        harness.settled()
    suspects = [n for n, event in enumerate(sink.delivered) if event.id in events[37:]]
    assert suspects == [0, 11, 22]
    assert len(sink.delivered) == 40


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
