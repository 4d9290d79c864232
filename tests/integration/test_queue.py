"""The queue of a sink with ``claim = "rows"``: what is parked, in which order it is claimed, and what fences it."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from outbox_relay.domain.errors import IncarnationChanged, LeaseLost
from tests.support.database import Database
from tests.support.queued import Queue, job, names, queue


@pytest.fixture
def jobs(database: Database) -> Generator[Queue]:
    """Yield a queue whose sink takes every event."""
    with queue(database) as found:
        yield found


# -- parking --------------------------------------------------------------------------------------------------


def test_rows_and_position_move_together(jobs: Queue) -> None:
    jobs.emit(*(job(f"j{n}") for n in range(10)))
    first = jobs.park(rows=4)
    assert (first.rows, first.upto is not None) == (4, True)
    ids = [event_id for (event_id,) in jobs.books.query("select id from outbox.event order by id")]
    stored = jobs.books.store.positions(jobs.sink, first.shards)
    assert {position.last for position in stored.values()} == {ids[3]} == {first.upto}
    rest = jobs.park()
    assert (rest.rows, rest.upto) == (6, None)
    stored = jobs.books.store.positions(jobs.sink, rest.shards)
    assert set(stored.values()) == {jobs.position}
    assert jobs.books.query("select count(*), bool_and(ready), count(payload) from outbox.delivery") == [(10, True, 10)]


@pytest.mark.fence("a relay that lost a shard makes rows of its events, or moves its position with them")
def test_a_stale_epoch_parks_nothing(jobs: Queue) -> None:
    jobs.emit(job("a"), job("b"))
    before = jobs.books.store.positions(jobs.sink, range(64))
    stale = {shard: epoch - 1 for shard, epoch in jobs.books.epochs[jobs.sink].items()}
    with pytest.raises(LeaseLost):
        jobs.park(epochs=stale)
    with pytest.raises(LeaseLost):
        jobs.park(owner=uuid4())
    assert jobs.books.query("select count(*) from outbox.delivery") == [(0,)]
    assert jobs.books.store.positions(jobs.sink, range(64)) == before


@pytest.mark.fence("the server is another one than that of the window which becomes rows")
def test_the_server_of_the_window_is_asked_before_anything_is_written(jobs: Queue) -> None:
    jobs.emit(job("a"))
    with pytest.raises(IncarnationChanged):
        jobs.park(server="another")
    assert jobs.books.query("select count(*) from outbox.delivery") == [(0,)]


def test_what_was_discarded_becomes_no_row(jobs: Queue) -> None:
    jobs.emit(job("a"), job("b"))
    jobs.books.do(
        "insert into outbox.discarded (sink, id, uid, reason) "
        "select 'jobs', id, uid, 'x' from outbox.event where type = 'b'"
    )
    assert jobs.park().rows == 1
    assert names(jobs.claim()) == ["a"]
    assert jobs.books.query("select reason from outbox.discarded order by id") == [("x",)]


def test_a_row_that_can_be_made_in_no_other_way_is_dead_for_the_reason(jobs: Queue) -> None:
    jobs.emit(job("t"))
    parked = jobs.park(reason="its row could not be made")
    assert (parked.rows, parked.dead) == (1, 1)
    assert jobs.books.query("select state, last_error, payload from outbox.delivery") == [
        ("dead", "its row could not be made", None)
    ]


# -- claims ---------------------------------------------------------------------------------------------------


def test_priority_comes_first_then_the_time_then_the_id(jobs: Queue) -> None:
    jobs.emit(job("low", priority=-1), job("first"), job("second"), job("high", priority=9))
    jobs.park()
    assert names(jobs.claim(2)) == ["high", "first"]
    jobs.emit(job("urgent", priority=10))
    jobs.park()
    assert names(jobs.claim()) == ["urgent", "second", "low"]


def test_a_row_is_claimed_once_until_its_lease_lapses(jobs: Queue) -> None:
    jobs.emit(job("a"))
    jobs.park()
    assert names(jobs.claim(lease_seconds=0.0)) == ["a"]
    [again] = jobs.claim()
    assert again.claims == 2
    assert jobs.claim() == []
    assert jobs.done([again]) == 1
    assert jobs.books.query("select count(*) from outbox.delivery") == [(0,)]


def test_claims_at_the_same_time_take_different_rows(jobs: Queue) -> None:
    jobs.emit(*(job("t") for _ in range(200)))
    jobs.park()
    with ThreadPoolExecutor(4) as threads:
        claims = [threads.submit(jobs.claim, 30, owner=uuid4()) for _ in range(4)]
    taken = [row.event.id for claim in claims for row in claim.result()]
    assert len(taken) == len(set(taken)) == 120


def test_leases_of_rows_and_of_claims_without_an_answer_are_given_back(jobs: Queue) -> None:
    jobs.emit(*(job("t") for _ in range(4)))
    jobs.park()
    rows = jobs.claim(2)
    assert jobs.books.store.give_claimed_back(jobs.sink, [(row.event.id, row.lease) for row in rows]) == 2
    rows = jobs.claim(3)
    other = jobs.claim(1)
    assert jobs.books.store.give_queued_back(jobs.sink, jobs.books.relay, [rows[0].lease]) == 3
    assert jobs.books.query("select sum(claims) from outbox.delivery") == [(1,)]
    assert jobs.done(other) == 1


def test_tenants_take_turns_before_priorities_count(jobs: Queue) -> None:
    jobs.emit(*(job(f"a{n}", tenant="a", priority=9) for n in range(6)), job("b0", tenant="b"), job("none"))
    jobs.park(fair=True)
    assert names(jobs.claim(4, fair=True)) == ["none", "a0", "b0", "a1"]
    jobs.emit(job("b1", tenant="b"), job("b2", tenant="b", priority=1), job("c0", tenant="c"))
    jobs.park(fair=True)
    assert names(jobs.claim(2, fair=True)) == ["c0", "a2"]
    assert names(jobs.claim(9, fair=True)) == ["b2", "a3", "b1", "a4", "a5"]


def test_ten_thousand_rows_of_a_tenant_delay_another_by_one_claim(jobs: Queue) -> None:
    jobs.books.do("select outbox.emit('big', '1', tenant => 'a', priority => 9) from generate_series(1, 10000)")
    while jobs.park(rows=4000, fair=True).upto is not None:
        pass
    assert names(jobs.claim(20, fair=True)) == ["big"] * 20
    jobs.emit(job("small", tenant="b"))
    jobs.park(fair=True)
    assert names(jobs.claim(20, fair=True)).index("small") <= 1


# -- other settings and versions ------------------------------------------------------------------------------


def register(jobs: Queue, **options: Any) -> int:
    """Register the sink as a relay that starts does; return its generation."""
    wanted = [(jobs.sink, ["*"], "beginning")]
    return jobs.books.store.register_sinks(wanted, jobs.books.tick(), **options)[jobs.sink]


@pytest.mark.fence("a sink gets another claim while rows are left, or a session makes rows of the other kind")
def test_claim_changes_only_without_a_relay_and_without_rows(jobs: Queue) -> None:
    jobs.emit(job("a"))
    jobs.park()
    jobs.books.do("update outbox.session set lease_until = now()")
    assert register(jobs) == 0  # a row is to be delivered
    claimed = jobs.claim()
    jobs.done(claimed)
    jobs.books.do("update outbox.session set lease_until = now() + interval '1 h'")
    assert register(jobs) == 0  # a relay owns its shards
    jobs.books.do("update outbox.session set lease_until = now()")
    before = jobs.books.query("select max(epoch) from outbox.shard")
    assert register(jobs) > 0
    assert jobs.books.query("select claim from outbox.sink") == [("log",)]
    assert jobs.books.query("select max(epoch) - 1 from outbox.shard") == before
    jobs.emit(job("b"))
    with pytest.raises(LeaseLost):  # the relay whose leases had lapsed
        jobs.park()
    assert register(jobs, queued=[jobs.sink]) > 0
