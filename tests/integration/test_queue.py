"""The queue of a sink with ``claim = "rows"``: what is parked, in which order it is claimed, and what fences it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from outbox_relay.domain.errors import IncarnationChanged, LeaseLost
from outbox_relay.postgres.rows import RowUpdate
from tests.support.database import Database
from tests.support.queued import Queue, job, names, queue
from tests.support.triggers import finish_when_rows_are_added

FAR = datetime(2100, 1, 1, tzinfo=UTC)


@pytest.fixture
async def jobs(database: Database) -> AsyncGenerator[Queue]:
    """Yield a queue whose sink takes every event."""
    async with queue(database) as found:
        yield found


# -- parking --------------------------------------------------------------------------------------------------


async def test_rows_and_position_move_together(jobs: Queue) -> None:
    jobs.emit(*(job(f"j{n}") for n in range(10)))
    first = await jobs.park(rows=4)
    assert (first.rows, first.upto is not None) == (4, True)
    ids = [event_id for (event_id,) in jobs.books.query("select id from outbox.event order by id")]
    stored = await jobs.books.store.positions(jobs.sink, first.shards)
    assert {position.last for position in stored.values()} == {ids[3]} == {first.upto}
    rest = await jobs.park()
    assert (rest.rows, rest.upto) == (6, None)
    stored = await jobs.books.store.positions(jobs.sink, rest.shards)
    assert set(stored.values()) == {jobs.position}
    assert jobs.books.query("select count(*), bool_and(ready), count(payload) from outbox.delivery") == [(10, True, 10)]


async def test_a_stale_epoch_parks_nothing(jobs: Queue) -> None:
    jobs.emit(job("a"), job("b"))
    before = await jobs.books.store.positions(jobs.sink, range(64))
    stale = {shard: epoch - 1 for shard, epoch in jobs.books.epochs[jobs.sink].items()}
    with pytest.raises(LeaseLost):
        await jobs.park(epochs=stale)
    with pytest.raises(LeaseLost):
        await jobs.park(owner=uuid4())
    assert jobs.books.query("select count(*) from outbox.delivery") == [(0,)]
    assert await jobs.books.store.positions(jobs.sink, range(64)) == before


async def test_a_window_that_is_parked_again_makes_no_second_row(jobs: Queue) -> None:
    jobs.emit(job("a"))
    beginning = jobs.position
    await jobs.park()
    jobs.position = beginning
    assert (await jobs.park()).rows == 0
    assert names(await jobs.claim()) == ["a"]


async def test_a_row_that_is_finished_while_its_event_is_parked_again_counts_as_parked(jobs: Queue) -> None:
    jobs.emit(job("a"))
    beginning = jobs.position
    await jobs.park()
    jobs.emit(job("b"))
    jobs.position = beginning
    with jobs.books.database.connect(autocommit=True) as connection:
        finish_when_rows_are_added(connection, jobs.sink)
        assert (await jobs.park()).rows == 1
    assert names(await jobs.claim()) == ["b"]


async def test_the_server_of_the_window_is_asked_before_anything_is_written(jobs: Queue) -> None:
    jobs.emit(job("a"))
    with pytest.raises(IncarnationChanged):
        await jobs.park(server="another")
    assert jobs.books.query("select count(*) from outbox.delivery") == [(0,)]


@pytest.mark.parametrize("less", [0, 1])
async def test_a_read_that_reaches_its_bytes_is_not_taken_for_a_whole_one(jobs: Queue, less: int) -> None:
    jobs.emit(*(job("t", key="k" * 8) for _ in range(3)))  # payload {}: ten bytes each
    parked = await jobs.park(most_bytes=30 - less)
    assert parked.rows == 3
    assert parked.upto == max(row[0] for row in jobs.books.query("select id from outbox.event"))
    assert (await jobs.park()).rows == 0


async def test_what_was_discarded_becomes_no_row(jobs: Queue) -> None:
    jobs.emit(job("a"), job("b"))
    jobs.books.do(
        "insert into outbox.discarded (sink, id, uid, reason) "
        "select 'jobs', id, uid, 'x' from outbox.event where type = 'b'"
    )
    assert (await jobs.park()).rows == 1
    assert names(await jobs.claim()) == ["a"]
    assert jobs.books.query("select reason from outbox.discarded order by id") == [("x",)]


async def test_an_event_that_cannot_be_delivered_is_a_dead_row(jobs: Queue) -> None:
    jobs.emit(job("t"))
    jobs.books.do("update outbox.event set deliver_at = 'infinity'")
    parked = await jobs.park()
    assert (parked.rows, parked.dead) == (1, 1)
    assert jobs.books.query("select state, last_error from outbox.delivery") == [
        ("dead", "deliver_at lies outside the years 1 to 9998")
    ]


async def test_a_row_that_can_be_made_in_no_other_way_is_dead_for_the_reason(jobs: Queue) -> None:
    jobs.emit(job("t"))
    parked = await jobs.park(reason="its row could not be made")
    assert (parked.rows, parked.dead) == (1, 1)
    assert jobs.books.query("select state, last_error, payload from outbox.delivery") == [
        ("dead", "its row could not be made", None)
    ]


# -- claims ---------------------------------------------------------------------------------------------------


async def test_priority_comes_first_then_the_time_then_the_id(jobs: Queue) -> None:
    jobs.emit(job("low", priority=-1), job("first"), job("second"), job("high", priority=9))
    await jobs.park()
    assert names(await jobs.claim(2)) == ["high", "first"]
    jobs.emit(job("urgent", priority=10))
    await jobs.park()
    assert names(await jobs.claim()) == ["urgent", "second", "low"]


async def test_a_row_is_claimed_once_until_its_lease_lapses(jobs: Queue) -> None:
    jobs.emit(job("a"))
    await jobs.park()
    assert names(await jobs.claim(lease_seconds=0.0)) == ["a"]
    [again] = await jobs.claim()
    assert again.claims == 2
    assert await jobs.claim() == []
    assert await jobs.done([again]) == 1
    assert jobs.books.query("select count(*) from outbox.delivery") == [(0,)]


async def test_a_row_that_is_retried_comes_when_it_is_due(jobs: Queue) -> None:
    jobs.emit(job("a", priority=5), job("b"))
    await jobs.park()
    [a] = await jobs.claim(1)
    back = RowUpdate(a.event.id, a.lease, 1, "waiting", 3600.0, "failed")
    assert await jobs.books.store.update_rows(jobs.sink, [back]) == {a.event.id}
    assert names(await jobs.claim()) == ["b"]
    jobs.books.do("update outbox.delivery set due_at = now() - interval '1 s' where type = 'a'")
    assert names(await jobs.claim()) == ["a"]


async def test_a_row_that_was_not_tried_is_in_the_queue_again(jobs: Queue) -> None:
    jobs.emit(job("a"))
    await jobs.park()
    [a] = await jobs.claim()
    assert await jobs.books.store.update_rows(jobs.sink, [RowUpdate(a.event.id, a.lease, 0)]) == {a.event.id}
    assert names(await jobs.claim()) == ["a"]


async def test_claims_at_the_same_time_take_different_rows(jobs: Queue) -> None:
    jobs.emit(*(job("t") for _ in range(200)))
    await jobs.park()
    claims = await asyncio.gather(*(jobs.claim(30, owner=uuid4()) for _ in range(4)))
    taken = [row.event.id for rows in claims for row in rows]
    assert len(taken) == len(set(taken)) == 120


async def test_claims_end_before_their_bytes_do(jobs: Queue) -> None:
    jobs.emit(*(job("t", key="k" * 98) for _ in range(5)))
    await jobs.park()
    assert [len(await jobs.claim(most_bytes=n)) for n in (1, 101)] == [1, 2]


async def test_leases_of_rows_and_of_claims_without_an_answer_are_given_back(jobs: Queue) -> None:
    jobs.emit(*(job("t") for _ in range(4)))
    await jobs.park()
    rows = await jobs.claim(2)
    assert await jobs.books.store.give_claimed_back(jobs.sink, [(row.event.id, row.lease) for row in rows]) == 2
    rows = await jobs.claim(3)
    other = await jobs.claim(1)
    assert await jobs.books.store.give_queued_back(jobs.sink, jobs.books.relay, [rows[0].lease]) == 3
    assert jobs.books.query("select sum(claims) from outbox.delivery") == [(1,)]
    assert await jobs.done(other) == 1


async def test_a_row_whose_time_another_relay_moved_is_passed_by_once(jobs: Queue) -> None:
    jobs.emit(job("a", priority=5), job("b"))
    await jobs.park()
    jobs.books.do("update outbox.delivery set due_at = now() + interval '1 h' where type = 'a'")
    assert names(await jobs.claim(1)) == ["b"]
    assert jobs.books.query("select ready from outbox.delivery where type = 'a'") == [(False,)]


async def test_tenants_take_turns_before_priorities_count(jobs: Queue) -> None:
    jobs.emit(*(job(f"a{n}", tenant="a", priority=9) for n in range(6)), job("b0", tenant="b"), job("none"))
    await jobs.park(fair=True)
    assert names(await jobs.claim(4, fair=True)) == ["none", "a0", "b0", "a1"]
    jobs.emit(job("b1", tenant="b"), job("b2", tenant="b", priority=1), job("c0", tenant="c"))
    await jobs.park(fair=True)
    assert names(await jobs.claim(2, fair=True)) == ["c0", "a2"]
    assert names(await jobs.claim(9, fair=True)) == ["b2", "a3", "b1", "a4", "a5"]


async def test_ten_thousand_rows_of_a_tenant_delay_another_by_one_claim(jobs: Queue) -> None:
    jobs.books.do("select outbox.emit('big', '1', tenant => 'a', priority => 9) from generate_series(1, 10000)")
    while (await jobs.park(rows=4000, fair=True)).upto is not None:
        pass
    assert names(await jobs.claim(20, fair=True)) == ["big"] * 20
    jobs.emit(job("small", tenant="b"))
    await jobs.park(fair=True)
    assert names(await jobs.claim(20, fair=True)).index("small") <= 1


async def test_every_tenant_has_its_turn_however_few_rows_a_claim_takes(jobs: Queue) -> None:
    jobs.emit(*(job(f"t{n}", tenant=f"t{n % 5}") for n in range(15)))
    await jobs.park(fair=True)
    claimed = [names(await jobs.claim(2, fair=True)) for _ in range(8)]
    order = [name for rows in claimed for name in rows]
    for turn in range(3):
        assert {f"t{int(name[1:]) % 5}" for name in order[5 * turn : 5 * turn + 5]} == {f"t{n}" for n in range(5)}


async def test_a_tenant_whose_row_did_not_fit_comes_first_in_the_next_claim(jobs: Queue) -> None:
    jobs.emit(*(job(tenant, tenant=tenant, key="k" * 98) for tenant in "abc"))
    await jobs.park(fair=True)
    assert names(await jobs.claim(10, fair=True, most_bytes=101)) == ["a", "b"]
    assert jobs.tenant == "b"
    assert names(await jobs.claim(10, fair=True)) == ["c"]


async def test_a_walk_that_finds_no_row_says_where_it_ended(jobs: Queue) -> None:
    jobs.books.do(
        "select outbox.emit('t', '1', tenant => 't' || lpad(g::text, 5, '0')) from generate_series(1, 3000) g"
    )
    while (await jobs.park(rows=4000, fair=True)).upto is not None:
        pass
    with jobs.books.database.connect() as connection:
        connection.execute("select from outbox.delivery where tenant < 't02500' for update")
        assert await jobs.claim(500, fair=True) == []
        assert (jobs.tenant, jobs.unfinished) == ("t02000", True)
        assert len(await jobs.claim(500, fair=True)) == 1
        assert len(await jobs.claim(500, fair=True)) == 500


# -- times ----------------------------------------------------------------------------------------------------


async def test_a_dead_row_is_retried_however_many_rows_are_due(jobs: Queue) -> None:
    jobs.books.do("select outbox.emit('t', '1') from generate_series(1, 1100)")
    await jobs.park()
    jobs.books.do("update outbox.delivery set state = 'dead' where id = (select min(id) from outbox.delivery)")
    found = jobs.books.query("""select done, is_full from outbox.retry_deliveries('{"sink": "jobs"}')""")
    assert found == [(1, False)]
    assert jobs.books.query("select count(*) from outbox.delivery where ready and state = 'waiting'") == [(1100,)]


# -- other settings and versions ------------------------------------------------------------------------------


async def register(jobs: Queue, **options: Any) -> int:
    """Register the sink as a relay that starts does; return its generation."""
    wanted = [(jobs.sink, ["*"], "beginning")]
    return (await jobs.books.store.register_sinks(wanted, await jobs.books.tick(), **options))[jobs.sink]


async def test_claim_changes_only_without_a_relay_and_without_rows(jobs: Queue) -> None:
    jobs.emit(job("a"))
    await jobs.park()
    jobs.books.do("update outbox.shard set lease_until = now()")
    assert await register(jobs) == 0  # a row is to be delivered
    claimed = await jobs.claim()
    await jobs.done(claimed)
    jobs.books.do("update outbox.shard set lease_until = now() + interval '1 h'")
    assert await register(jobs) == 0  # a relay owns its shards
    jobs.books.do("update outbox.shard set lease_until = now()")
    before = jobs.books.query("select max(epoch) from outbox.shard")
    assert await register(jobs) > 0
    assert jobs.books.query("select claim from outbox.sink") == [("log",)]
    assert jobs.books.query("select max(epoch) - 1 from outbox.shard") == before
    jobs.emit(job("b"))
    with pytest.raises(LeaseLost):  # the relay whose leases had lapsed
        await jobs.park()
    assert await register(jobs, queued=[jobs.sink]) > 0


async def test_a_row_that_belongs_to_no_queue_is_put_there(jobs: Queue) -> None:
    jobs.emit(job("a"))
    await jobs.park()
    jobs.books.do("update outbox.delivery set ready = null")
    assert await jobs.claim() == []
    assert await jobs.books.store.queue_due_rows(100) == 1
    assert names(await jobs.claim()) == ["a"]
