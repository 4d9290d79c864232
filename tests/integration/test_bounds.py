"""Bounds while a destination is down or a key fails: of rows, log lines and the size of statements."""

from __future__ import annotations

import time
from typing import Any

import pytest

from outbox_relay.admin import status
from outbox_relay.domain.circuit import CircuitPolicy
from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.event import SHARDS, StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Refused, RetryPolicy, Unavailable, Verdict
from outbox_relay.postgres.rows import ClaimedRow
from tests.support.database import Database, query
from tests.support.deliveries import add_waiting, delivered, emit, has, ids, in_order
from tests.support.memory_sink import BOTH, Late, MemorySink, fails
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.replays import Clients, ended, start
from tests.support.wait import until

NEVER_DEAD = RetryPolicy(attempts=10_000, base_seconds=0.02, max_seconds=0.1, jitter=0.2)
LIVE = "select count(*) from outbox.delivery where state <> 'dead'"
FULL = "select last_error from outbox.sink where last_error like '%%no more than%%'"
MOST = 50


def bad_fails(event: StoredEvent, _attempt: int) -> Verdict:
    """Fail the events of one key."""
    return Failed("status 500", 500) if event.key == "bad" else DELIVERED


# -- rows ---------------------------------------------------------------------------------------------------------


def counted_again(harness: RelayHarness) -> None:
    """Wait until the rows have been counted twice more, and so at least once more since they were full."""
    asked = harness.store.calls["count_parked"]
    until(lambda: harness.store.calls["count_parked"] > asked + 2, seconds=20, what="rows are counted again")


@pytest.mark.fence("the rows of a key that fails fill the disk")
@BOTH
def test_a_key_that_fails_fills_no_more_rows_than_it_may_and_then_everything_comes_in_order(
    database: Database, keeps_order: bool
) -> None:
    late = Late()
    late.script = bad_fails
    sink = MemorySink(late, keeps_order=keeps_order)
    sink.max_batch = 20 if keeps_order else 1
    with running(database.dsn, (spec("s", pending_max=MOST, retry=NEVER_DEAD), sink)) as harness:
        harness.owns_all()
        others = emit(database, ["bad", *(f"good-{n}" for n in range(30))])[1:]
        delivered(sink, others)
        wanted = emit(database, ["bad"] * 400 + [f"good-{n}" for n in range(30)])
        [(error,)] = has(database, FULL)
        assert error.startswith(f"{MOST} events wait as rows, and no more than that may (pending_max)")
        counted_again(harness)
        [(rows,)] = query(database, LIVE)
        assert MOST <= rows <= MOST + sink.max_in_flight * sink.max_batch
        found = status(harness.store)["sinks"]["s"]
        assert (found["last_error"], found["circuit"]) == (error, "closed")
        late.script = None
        delivered(sink, wanted)
        harness.settled()
        assert harness.ended == []
    assert in_order(sink.delivered)
    assert len(ids(sink)) == len(set(ids(sink)))
    assert query(database, "select count(*) from outbox.delivery") == [(0,)]


@pytest.mark.fence("the rows of a key that fails fill the disk")
@pytest.mark.slow
def test_a_replay_fills_no_more_rows_than_its_sink_may_and_then_delivers_all(database: Database) -> None:
    """Goes red when ``pending_max`` of its sink is not the bound of a replay."""
    late = Late()
    late.script = bad_fails
    sink, clients = MemorySink(keeps_order=False), Clients(lambda: late, keeps_order=False)
    served = (spec("s", pending_max=MOST, retry=NEVER_DEAD), sink)
    with running(database.dsn, served, replay_client=clients) as harness:
        wanted = emit(database, ["bad"] * 400)
        delivered(sink, wanted)
        has(database, "select from outbox_internal.backlog('s', null, 1000, 5.0) where events = 0")
        number = start(database, since="PT1H")
        has(database, f"{LIVE} and sink = '~{number}' having count(*) >= {MOST}")
        counted_again(harness)
        [(rows,)] = query(database, LIVE)
        assert MOST <= rows <= MOST + clients.made[0][1]
        late.script = None
        ended(database, number)
    assert sorted(clients.ids(number)) == wanted


@BOTH
def test_rows_behind_a_dead_letter_that_holds_its_key_count_and_status_says_so(
    database: Database, keeps_order: bool
) -> None:
    late = Late()
    late.script = fails(1, None, Refused("never"))
    sink = MemorySink(late, keeps_order=keeps_order, holds=True)
    sink.max_batch = 20 if keeps_order else 1
    with running(database.dsn, (spec("s", pending_max=MOST, hold=True), sink)) as harness:
        emit(database, ["dead"])
        has(database, "select 1 from outbox.delivery where state = 'dead'")
        late.script = None
        wanted = emit(database, ["dead"] * 400)
        [(error,)] = has(database, FULL)
        assert "behind a dead letter" in error
        counted_again(harness)
        [(rows,)] = query(database, LIVE)
        assert MOST <= rows <= MOST + sink.max_in_flight * sink.max_batch
        query(database, "delete from outbox.delivery where state = 'dead' returning 1")
        delivered(sink, wanted)
        harness.settled()
    assert in_order(sink.delivered)


def test_relays_that_share_a_sink_fill_no_more_rows_together_than_it_may_have(database: Database) -> None:
    """Each counts the rows of all at most once a second, and between two counts its own."""
    late = Late()
    late.script = fails(10_000)
    sinks = [MemorySink(late, keeps_order=False, max_in_flight=4) for _ in range(2)]
    patient = RetryPolicy(attempts=10_000, base_seconds=3600.0, max_seconds=3600.0, jitter=0.0)
    full = spec("s", pending_max=MOST, retry=patient, circuit=CircuitPolicy(open_after=10_000))
    one, two = (running(database.dsn, (full, sink), lease_seconds=3) for sink in sinks)
    with one as first, two as second:
        until(lambda: _halved(first, second), seconds=30, what="both own half of the shards")
        emit(database, [f"k{n}" for n in range(MOST - 10)])
        has(database, f"{LIVE} having count(*) = {MOST - 10}")
        later = time.monotonic() + 1.1
        until(lambda: time.monotonic() > later, seconds=5, what="the next counts are due")
        emit(database, [f"k{n}" for n in range(1000, 1400)])
        for harness in (first, second):
            until(lambda r=harness: _full(r), seconds=20, what="both are full and deliver nothing")
        # A row that is written while it is counted counts twice until the next count.
        has(database, f"{LIVE} having count(*) >= {MOST}")
        [(rows,)] = query(database, LIVE)
        assert MOST <= rows <= MOST + 10 + sum(sink.max_in_flight for sink in sinks)
        assert [*first.ended, *second.ended] == []


def _halved(*harnesses: RelayHarness) -> bool:
    return {held for harness in harnesses for held in harness.keeper.held.values()} == {SHARDS // 2}


def _full(harness: RelayHarness) -> bool:
    session = harness.loops[0].session
    return session is not None and session.outcomes.bound.full and not session.outcomes.flows


# -- poison at the head -------------------------------------------------------------------------------------------


@pytest.mark.fence("every probe is an event that always fails")
@BOTH
def test_a_key_whose_first_event_fails_for_ever_does_not_keep_the_circuit_open(
    database: Database, keeps_order: bool
) -> None:
    late = Late()
    late.script = fails(9, None, Unavailable("connection refused"))
    sink = MemorySink(late, keeps_order=keeps_order)
    circuit = CircuitPolicy(open_after=1, probe_seconds=0.02, probe_max_seconds=0.05)
    retry = RetryPolicy(attempts=4, base_seconds=0.05, max_seconds=0.1, jitter=0.0)
    with running(database.dsn, (spec("s", circuit=circuit, retry=retry), sink)) as harness:
        harness.owns_all()
        wanted = emit(database, ["one"] * 20)
        until(lambda: harness.loops[0].circuit != "closed", seconds=10, what="the circuit opens")
        late.script = fails(999, wanted[:1])
        delivered(sink, wanted[1:])
        assert query(database, "select id, state, attempts from outbox.delivery") == [(wanted[0], "dead", 4)]
        until(lambda: harness.loops[0].circuit == "closed", seconds=10, what="the circuit closes")
        assert harness.ended == []
    assert ids(sink) == wanted[1:]


# -- rows that cannot be delivered, and statements that are too large ----------------------------------------------


@BOTH
@pytest.mark.parametrize("hold", [False, True])
def test_rows_that_no_relay_can_deliver_are_dead_with_their_reason_and_their_neighbours_flow(
    database: Database, keeps_order: bool, hold: bool
) -> None:
    sink = MemorySink(keeps_order=keeps_order)
    add_waiting(database, 1, "k")
    add_waiting(database, 2, "k", b"x" * (1 << 20) + b"x")
    add_waiting(database, 3, "k")
    add_waiting(database, 4, None, deliver_at="20000-01-01")
    add_waiting(database, 5, None, deliver_at="0044-03-15 BC")
    add_waiting(database, 6, None, deliver_at="infinity")
    add_waiting(database, 7, None)
    add_waiting(database, 8, None, None)
    with running(database.dsn, (spec("s", hold=hold), sink)) as harness:
        delivered(sink, [1, 7] if hold else [1, 3, 7])
        has(database, "select 1 from outbox.delivery where state = 'dead' having count(*) = 5")
        assert harness.ended == []
    assert sorted(ids(sink)) == ([1, 7] if hold else [1, 3, 7])
    assert query(database, "select id, last_error, attempts from outbox.delivery where state = 'dead' order by id") == [
        (2, "payload has 1048577 bytes, more than the ceiling of 1048576", 0),
        *((event, "deliver_at lies outside the years 1 to 9998", 0) for event in (4, 5, 6)),
        (8, "payload is null", 0),
    ]


class Slow:
    """Makes claims of more than ``most_rows`` run out of time, and whatever reads the payload of ``unreadable``."""

    def __init__(self, harness: RelayHarness, database: Database, most_rows: int, unreadable: int = 0) -> None:
        self.asked: list[int] = []
        self._claim, self._payload = harness.store.claim_rows, harness.store.row_payload
        self._database, self._most_rows, self._unreadable = database, most_rows, unreadable
        store: Any = harness.store
        store.claim_rows, store.row_payload = self.claim_rows, self.row_payload

    def claim_rows(self, *given: Any, **more: Any) -> list[ClaimedRow]:
        self.asked.append(given[4])
        live = "select 1 from outbox.delivery where id = %s and state <> 'dead'"
        if given[4] > self._most_rows or (more["most_payload"] and query(self._database, live, self._unreadable)):
            raise StatementFailed("canceling statement due to statement timeout", "57014")
        return self._claim(*given, **more)

    def row_payload(self, sink: str, event: int, lease: Any) -> tuple[bytes | None, str | None] | None:
        if event == self._unreadable:
            raise StatementFailed("canceling statement due to statement timeout", "57014")
        return self._payload(sink, event, lease)


def test_a_row_whose_payload_cannot_be_read_is_dead_with_the_reason_and_its_neighbours_flow(
    database: Database,
) -> None:
    sink = MemorySink()
    for event in range(1, 8):
        add_waiting(database, event, "k")
    with running(database.dsn, (spec("s"), sink)) as harness:
        Slow(harness, database, 1, unreadable=4)
        delivered(sink, [1, 2, 3, 5, 6, 7], seconds=60)
        harness.settled()
        assert harness.ended == []
    assert ids(sink) == [1, 2, 3, 5, 6, 7]
    assert query(database, "select id, state, last_error from outbox.delivery") == [
        (4, "dead", "its payload could not be read: canceling statement due to statement timeout")
    ]


@pytest.mark.fence("a claim of rows has no answer")
@BOTH
def test_rows_of_claims_whose_answer_is_lost_come_back_and_no_claim_is_counted(
    database: Database, keeps_order: bool
) -> None:
    """The claim took effect, as when its COMMIT waits for a standby; the relay had given it up."""
    late = Late()
    late.script = fails(1)
    sink = MemorySink(late, keeps_order=keeps_order)
    lost: set[int] = set()
    with running(database.dsn, (spec("s", retry=NEVER_DEAD), sink)) as harness:
        harness.owns_all()
        claim, times = harness.store.claim_rows, 0

        def claim_rows(*arguments: Any, **options: Any) -> list[ClaimedRow]:
            nonlocal times
            claimed = claim(*arguments, **options)
            if claimed and times < 7:
                times += 1
                lost.update(row.claims for row in claimed)
                raise StatementFailed("the database did not answer within 10 s", "57014")
            return claimed

        harness.store.claim_rows = claim_rows  # type: ignore[method-assign]
        wanted = emit(database, ["a", "b", None])
        delivered(sink, wanted)
        harness.settled()
        assert lost == {1}
        assert harness.ended == []
    assert query(database, "select count(*) from outbox.delivery") == [(0,)]


@pytest.mark.fence("a claim or a settlement is too large for its time limit")
@BOTH
def test_claims_that_run_out_of_time_get_smaller_and_grow_again(database: Database, keeps_order: bool) -> None:
    sink = MemorySink(keeps_order=keeps_order)
    with running(database.dsn, (spec("s"), sink)) as harness:
        slow = Slow(harness, database, 3)
        for event in range(1, 41):
            add_waiting(database, event, f"k{event % 5}")
        delivered(sink, range(1, 41), seconds=30)
        harness.settled()
        assert harness.ended == []
        assert max(slow.asked) > 3
        assert min(slow.asked) <= 3
    assert sorted(ids(sink)) == list(range(1, 41))
    assert in_order(sink.delivered)


@pytest.mark.fence("a claim or a settlement is too large for its time limit")
def test_settlements_that_run_out_of_time_are_written_in_smaller_ones_rows_before_positions(database: Database) -> None:
    late, written = Late(), list[tuple[int, int]]()
    late.script = fails(1)
    sink = MemorySink(late)
    with running(database.dsn, (spec("s", circuit=CircuitPolicy(open_after=1000)), sink)) as harness:
        harness.owns_all()
        store: Any = harness.store
        settle = store.settle

        def slow(sink: str, owner: Any, positions: Any, rows: Any, epochs: Any, **more: Any) -> None:
            if len(rows) > 10:
                raise StatementFailed("canceling statement due to statement timeout", "57014")
            written.append((len(rows), len(positions)))
            settle(sink, owner, positions, rows, epochs, **more)

        store.settle = slow
        wanted = emit(database, [f"k{n}" for n in range(60)])
        delivered(sink, wanted)
        harness.settled()
        assert harness.ended == []
    first = next(place for place, (rows, _) in enumerate(written) if rows)
    assert sum(rows for rows, _ in written) == 60
    assert written[first][1] == 0, "a position before its rows"
    assert sorted(ids(sink)) == wanted
