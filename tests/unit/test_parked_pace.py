"""Parked deliveries leave time to the events of the log: one request after another, few statements for many rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from outbox_relay.domain.outcomes import DELIVERED, Unavailable
from outbox_relay.postgres.rows import RowUpdate
from outbox_relay.relay.breaker import Permit
from outbox_relay.relay.limiter import ConcurrencyLimiter
from outbox_relay.relay.parked_pace import BATCH_ROWS, CLAIM_SECONDS, FAIR_CLAIM_SECONDS, FIRST_SECONDS, ParkedPace
from tests.support.parked_deliveries import CLOSED, Deliveries, spin

SLOTS = 64
PACE = "outbox_relay.relay.parked_pace.PAUSE_SECONDS"
GATHER = "outbox_relay.relay.parked_settler.GATHER_SECONDS"
START = "outbox_relay.relay.parked.START_SECONDS"


async def a_pace(slots: int = SLOTS, *, taken: int = 1, flows: bool = True) -> ParkedPace:
    """Make a pace of which some slots are taken."""
    limiter = ConcurrencyLimiter(slots, asyncio.Event())
    if flows:
        limiter.log_flows()
    pace = ParkedPace(limiter)
    for _ in range(taken):
        await pace.take_slot()
    return pace


# -- the next request -------------------------------------------------------------------------------------------------


async def test_a_request_waits_for_the_one_before_while_the_log_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PACE, 60.0)
    pace = await a_pace()
    turn = asyncio.ensure_future(pace.wait_for_turn())
    await spin()
    assert not turn.done()
    pace.release_slot()
    await asyncio.wait_for(turn, 5)


async def test_requests_of_a_slow_destination_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PACE, 0.0)
    pace = await a_pace()
    await asyncio.wait_for(pace.wait_for_turn(), 5)


async def test_requests_do_not_wait_for_one_another_while_no_event_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PACE, 60.0)
    pace = await a_pace(flows=False)
    await asyncio.wait_for(pace.wait_for_turn(), 5)


async def test_no_more_slots_are_taken_than_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PACE, 0.0)
    pace = await a_pace(taken=SLOTS // 4)
    slot = asyncio.ensure_future(pace.take_slot())
    await spin()
    assert not slot.done()
    pace.release_slot()
    await asyncio.wait_for(slot, 5)


# -- the size of a claim ----------------------------------------------------------------------------------------------


async def test_the_first_claim_takes_a_row_for_each_slot() -> None:
    assert FIRST_SECONDS > CLAIM_SECONDS
    assert (await a_pace(taken=1)).rows(1000) == SLOTS // 4
    assert (await a_pace(taken=1, flows=False)).rows(1000) == SLOTS


@pytest.mark.parametrize(("seconds", "rows"), [(0.005, 320), (0.05, 64), (1.0, 64), (0.0, 1000)])
async def test_a_claim_takes_the_rows_that_begin_soon(seconds: float, rows: int) -> None:
    """A claim for each free slot costs as much as several requests; rows that wait long keep other relays from them."""
    pace = await a_pace(taken=1, flows=False)
    for _ in range(200):
        pace.observe(seconds)
    assert pace.rows(1000) == pytest.approx(rows, abs=1)
    assert pace.rows(10) == 10


async def test_requests_that_end_together_do_not_change_the_size_at_once() -> None:
    """Goes red when a claim asks for many times the rows for whose last half it was begun, so that all slots wait."""
    pace = await a_pace(taken=SLOTS, flows=False)
    for _ in range(20 * SLOTS):
        pace.observe(0.004)
    before = pace.rows(1000)
    for _ in range(SLOTS // 2):
        pace.observe(0.001)
    assert before < pace.rows(1000) < 1.5 * before


async def test_a_claim_of_tenants_takes_fewer_rows() -> None:
    """Goes red when a row of one tenant waits for many rows of another that were claimed before."""
    pace = ParkedPace(ConcurrencyLimiter(SLOTS, asyncio.Event()), FAIR_CLAIM_SECONDS)
    for _ in range(200):
        pace.observe(0.004)
    assert FAIR_CLAIM_SECONDS < CLAIM_SECONDS
    assert pace.rows(1000) == pytest.approx(SLOTS * FAIR_CLAIM_SECONDS / 0.004, abs=1)


# -- batches -----------------------------------------------------------------------------------------------------------


def a_pace_of_batches(max_batch: int = 4000, *, flows: bool = True, blocked: Sequence[str] = ()) -> ParkedPace:
    """Make the pace of a sink that takes batches."""
    limiter = ConcurrencyLimiter(2, asyncio.Event())
    if flows:
        limiter.log_flows()
    return ParkedPace(limiter, max_batch=max_batch, blocked=blocked)


def test_a_claim_for_batches_is_small_while_the_log_flows() -> None:
    """Goes red when events of the log wait for a batch of as many rows as a call can hold."""
    assert a_pace_of_batches().rows(1000) == BATCH_ROWS
    assert a_pace_of_batches(10).rows(1000) == 10
    assert a_pace_of_batches(flows=False).rows(1000) == 1000
    assert a_pace_of_batches(500, flows=False).rows(1000) == 500


async def test_batches_have_slots_of_their_own() -> None:
    """Goes red when a slow call with rows keeps the next one from beginning while the log flows."""
    pace = a_pace_of_batches()
    for _ in range(2):
        await asyncio.wait_for(pace.take_slot(), 5)
    assert pace.free == 0


def test_rows_that_events_of_the_log_wait_for_are_claimed_as_fast_as_possible() -> None:
    """Goes red when a key gets events faster than its rows are delivered, and never catches up."""
    assert a_pace_of_batches(blocked=["k"]).rows(1000) == 1000


@pytest.mark.parametrize(("flows", "blocked", "rests"), [(True, [], True), (False, [], False), (True, ["k"], False)])
async def test_claims_for_batches_rest_while_the_log_flows(flows: bool, blocked: list[str], rests: bool) -> None:
    pace = a_pace_of_batches(flows=flows, blocked=blocked)
    pace.claimed(60.0)
    rest = asyncio.ensure_future(pace.rest())
    await spin()
    assert rest.done() is not rests
    await asyncio.wait_for(rest, 5)


async def test_claims_of_a_sink_without_batches_do_not_rest() -> None:
    pace = await a_pace()
    pace.claimed(60.0)
    rest = asyncio.ensure_future(pace.rest())
    await spin()
    assert rest.done()


# -- requests that are sent ahead -------------------------------------------------------------------------------------


async def a_pace_ahead(slots: int = 4, ahead: int = 2) -> tuple[ParkedPace, ConcurrencyLimiter]:
    """Make the pace of a quick sink that takes requests ahead, and take all slots."""
    limiter = ConcurrencyLimiter(slots, asyncio.Event())
    pace = ParkedPace(limiter, prefetch=lambda: ahead)
    for _ in range(200):
        pace.observe(0.001)
    for _ in range(slots + ahead):
        await asyncio.wait_for(pace.take_slot(), 5)
    return pace, limiter


async def test_requests_that_are_sent_ahead_take_no_slots_of_the_limiter() -> None:
    pace, limiter = await a_pace_ahead()
    assert (pace.free, limiter.free, pace.over_share()) == (0, 0, False)
    following = asyncio.ensure_future(pace.take_slot())
    await spin()
    assert not following.done()
    pace.release_slot()
    await asyncio.wait_for(following, 5)
    for _ in range(2):
        pace.release_slot()
    assert limiter.free == 0
    for free in range(1, 5):
        pace.release_slot()
        assert limiter.free == free


async def test_no_request_is_sent_ahead_once_they_take_long() -> None:
    """Goes red when rows wait behind slow handlers, and other relays cannot get them."""
    pace, limiter = await a_pace_ahead()
    pace.observe(60.0)
    assert pace.over_share()
    for _ in range(2):
        pace.release_slot()
    assert not pace.over_share()
    following = asyncio.ensure_future(pace.take_slot())
    await spin()
    assert not following.done()
    pace.release_slot()
    await asyncio.wait_for(following, 5)
    assert limiter.free == 0


@pytest.mark.parametrize(("change", "ahead"), [("none", 2), ("limit", 0), ("throttle", 0), ("follow", 0)])
async def test_requests_are_sent_ahead_only_without_another_limit(change: str, ahead: int) -> None:
    """Goes red when more is in flight than a destination takes, or than two sessions or all relays may."""
    deliveries = Deliveries(queued=True, slots=4)
    deliveries.parked._context.sink.prefetch = 2
    pace = ParkedPace.for_sink(deliveries.parked._context)
    pace.observe(-9.0)  # no time at all
    if change == "limit":
        deliveries.limit()
    elif change == "throttle":
        deliveries.limiter.decrease()
    elif change == "follow":
        ConcurrencyLimiter(4, asyncio.Event(), deliveries.limiter)
    assert pace.free == deliveries.limiter.limit + ahead


def test_less_is_sent_ahead_where_tenants_take_turns() -> None:
    """Goes red when a tenant's row waits for as many of another tenant as all slots hold."""
    deliveries = Deliveries(queued=True, slots=4, fair=True)
    deliveries.parked._context.sink.prefetch = 4
    pace = ParkedPace.for_sink(deliveries.parked._context)
    pace.observe(-9.0)  # no time at all
    assert pace.free == 4 + 1


def test_nothing_is_sent_ahead_for_the_log() -> None:
    """Goes red when the events of a log find no slot."""
    deliveries = Deliveries(slots=4)
    deliveries.parked._context.sink.prefetch = 2
    pace = ParkedPace.for_sink(deliveries.parked._context)
    pace.observe(-9.0)  # no time at all
    assert pace.free == 4


# -- rows that were claimed and cannot begin ---------------------------------------------------------------------------


async def test_rows_of_a_claim_go_back_when_the_circuit_opens() -> None:
    """Goes red when they are sent to a destination that is down, besides its probes."""
    deliveries = Deliveries()
    async with asyncio.TaskGroup() as tasks:
        started = asyncio.ensure_future(await deliveries.start(tasks))
        await spin()
        deliveries.holds = False
        deliveries.answer.set()
        await asyncio.wait_for(started, 5)
    first, *others = (row.event.id for row in deliveries.rows)
    assert deliveries.sent == [first]
    assert deliveries.given_back == [(other, 2) for other in others]
    assert deliveries.settler.awaited == 0
    assert deliveries.parked.under_way == 3


async def test_rows_of_a_claim_go_back_when_no_slot_becomes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when rows wait behind requests that hang, while another relay could deliver them."""
    monkeypatch.setattr(START, 0.0)
    deliveries = Deliveries()
    async with asyncio.TaskGroup() as tasks:
        await asyncio.wait_for(await deliveries.start(tasks), 5)
        assert [given for given, _ in deliveries.given_back] == [row.event.id for row in deliveries.rows[1:]]
        deliveries.answer.set()


async def test_a_row_that_no_handler_got_goes_back_as_it_was() -> None:
    """Goes red when it waits for a retry, although another relay can deliver it at once."""
    deliveries = Deliveries(queued=True)
    row, unused = deliveries.rows[0], list[Permit]()
    deliveries.breaker.unused = unused.append
    verdict = Unavailable("every worker is busy", behind=True, untouched=True)
    deliveries.parked._settler.settle_call([row], [verdict], 0.25, CLOSED)
    assert deliveries.given_back == [(row.event.id, 2)]
    assert unused == [CLOSED]


# -- settlements ------------------------------------------------------------------------------------------------------


async def test_outcomes_are_written_together_while_rows_are_being_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when each row is written in a statement of its own, which costs more than its delivery."""
    monkeypatch.setattr(GATHER, 60.0)
    deliveries = Deliveries()
    deliveries.answer.set()
    async with asyncio.TaskGroup() as tasks:
        writes = tasks.create_task(deliveries.settler.run())
        await asyncio.wait_for(await deliveries.start(tasks), 5)
        await spin()
        writes.cancel()
    assert deliveries.deleted == [[row.event.id for row in deliveries.rows]]


@pytest.mark.parametrize("outcome", ["delivered", "sent back"])
async def test_a_row_that_was_claimed_before_is_settled_at_once(monkeypatch: pytest.MonkeyPatch, outcome: str) -> None:
    """Goes red when a row that crashes its relays takes those with it that are delivered beside it."""
    monkeypatch.setattr(GATHER, 60.0)
    deliveries = Deliveries()
    deliveries.settler.expect(2)
    row = deliveries.rows[0]._replace(claims=2)
    if outcome == "delivered":
        deliveries.settler.delivered(row, DELIVERED)
    else:
        deliveries.settler.send_back(row, RowUpdate(row.event.id, row.lease, row.attempts))
    async with asyncio.TaskGroup() as tasks:
        writes = tasks.create_task(deliveries.settler.run())
        await asyncio.wait_for(deliveries.wrote.wait(), 5)
        writes.cancel()
    assert deliveries.settler.awaited == 2


async def test_an_outcome_waits_a_moment_at_most_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GATHER, 0.0)
    deliveries = Deliveries()
    deliveries.settler.expect(2)
    deliveries.settler.delivered(deliveries.rows[0], DELIVERED)
    async with asyncio.TaskGroup() as tasks:
        writes = tasks.create_task(deliveries.settler.run())
        await asyncio.wait_for(deliveries.wrote.wait(), 5)
        writes.cancel()
    assert deliveries.settler.awaited == 2
