"""The next rows of a queue are claimed while rows are delivered, and go back when they may not be sent any more."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest

from outbox_relay.domain.errors import DatabaseUnavailable
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.postgres.rows import ClaimedRow
from outbox_relay.relay.breaker import Permit
from outbox_relay.relay.claimed_calls import ClaimedCalls
from outbox_relay.relay.parked import START_SECONDS, TURN_CALLS
from outbox_relay.relay.parked_pace import CLAIM_SECONDS, FAIR_CLAIM_SECONDS
from outbox_relay.relay.parked_settler import MOST_UNSETTLED
from outbox_relay.relay.queue_claims import QueueClaims
from outbox_relay.relay.shared_limits import UNLIMITED, Admission
from tests.support.parked_deliveries import CLOSED, Ahead, Deliveries, claimed_rows, ending_tasks, spin
from tests.support.wait import auntil

START = "outbox_relay.relay.parked.START_SECONDS"


# -- slots ------------------------------------------------------------------------------------------------------------


async def test_a_slot_serves_the_next_rows_without_being_released() -> None:
    """Goes red when each row takes a slot and a task of its own, which costs as much as its call."""
    deliveries = Deliveries(queued=True)
    deliveries.answer.set()
    async with ending_tasks() as tasks:
        await asyncio.wait_for(await deliveries.start(tasks), 5)
    assert tasks.names.count("_call_in_turn") == 1
    assert deliveries.sent == deliveries.ids
    assert deliveries.limiter.free == 1


async def test_a_sink_without_a_queue_releases_its_slot_after_each_row() -> None:
    """Goes red when parked deliveries keep their slots from the events of the log."""
    deliveries = Deliveries()
    async with ending_tasks() as tasks:
        started = asyncio.ensure_future(await deliveries.start(tasks))
        await spin()
        log = asyncio.ensure_future(deliveries.limiter.acquire())
        await spin()
        deliveries.answer.set()
        await asyncio.wait_for(log, 5)
        assert len(deliveries.sent) < len(deliveries.rows)
        deliveries.limiter.release()
        await asyncio.wait_for(started, 5)


async def test_a_slot_above_a_limit_that_decreased_is_released() -> None:
    """Goes red when a destination that throttles gets as many requests at once as before."""
    deliveries = Ahead()
    deliveries.limiter._maximum = deliveries.limiter._current = 2.0  # pyright: ignore[reportPrivateUsage]
    deliveries.claims.clear()
    async with ending_tasks() as tasks:
        started = asyncio.ensure_future(await deliveries.start(tasks))
        await spin()
        assert len(deliveries.sent) == 2
        deliveries.limiter.decrease()
        deliveries.limiter._maximum = 1.0  # pyright: ignore[reportPrivateUsage] - else each delivery raises it
        deliveries.answers.release()
        await spin()
        assert len(deliveries.sent) == 2
        deliveries.answers.release()
        await spin()
        assert len(deliveries.sent) == 3
        deliveries.answers.release()
        await asyncio.wait_for(started, 5)


CHANGES: dict[str, Callable[[Deliveries], None]] = {
    "circuit": lambda deliveries: setattr(deliveries, "holds", False),
    "pause": lambda deliveries: deliveries.leases.stop(),
    "handover": lambda deliveries: setattr(deliveries.breaker, "handing_over", True),
    "limit": lambda deliveries: deliveries.limit(),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_kept_slot_sends_nothing_after_a_change(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when rows are sent to a destination that is down, or beyond a limit across relays."""
    monkeypatch.setattr(START, 0.2)
    deliveries = Deliveries(queued=True)
    async with ending_tasks() as tasks:
        started = asyncio.ensure_future(await deliveries.start(tasks))
        await spin()
        CHANGES[change](deliveries)
        deliveries.answer.set()
        await asyncio.wait_for(started, 5)
    first, *others = deliveries.ids
    assert deliveries.sent == [first]
    assert deliveries.given_back == [(other, 2) for other in others]
    assert deliveries.settler.awaited == 0
    assert deliveries.limiter.free == 1


async def test_rows_in_hand_are_admitted_one_by_one_once_there_is_a_limit() -> None:
    """Goes red when the slots that are kept send more at once than the limit says."""
    deliveries = Deliveries(queued=True)
    async with ending_tasks() as tasks:
        started = asyncio.ensure_future(await deliveries.start(tasks))
        await spin()
        deliveries.limit()
        deliveries.answer.set()
        for sent in (1, 2, 3):
            await spin()
            assert len(deliveries.sent) == sent
            deliveries.admissions.release()
        await asyncio.wait_for(started, 5)
    assert deliveries.sent == deliveries.ids


async def test_a_slot_with_an_admission_serves_one_call() -> None:
    """Goes red when calls follow in a slot of the limits across relays, which ends with its admission."""
    deliveries = Deliveries(queued=True)
    parked, slot = deliveries.parked, Admission(1)
    assert not parked._keeps_slot(CLOSED, slot)
    assert parked._keeps_slot(CLOSED, UNLIMITED)


async def test_an_admission_of_no_call_is_given_back() -> None:
    """Goes red when a slot of the limits across relays is lost because other slots have served the rows meanwhile."""
    deliveries = Deliveries(queued=True)
    limits: Any = Mock()
    await deliveries.parked._pace.take_slot()
    async with ending_tasks() as tasks:
        deliveries.parked._begin(tasks, ClaimedCalls(deque(), lease_clock() + 5.0, CLOSED), Admission(1, limits))
    limits.ended.assert_called_once_with()
    assert deliveries.limiter.free == 1


# -- claims ahead -----------------------------------------------------------------------------------------------------


async def test_the_next_rows_are_claimed_before_the_slots_are_free() -> None:
    """Goes red when every slot is idle during each claim."""
    deliveries = Ahead()
    async with ending_tasks() as tasks:
        await deliveries.begin_last_call(tasks)
        for _ in deliveries.ahead:
            deliveries.answers.release()
        await asyncio.wait_for(deliveries.parked._claim_and_deliver(tasks), 5)
    assert deliveries.sent == deliveries.ids + deliveries.ahead_ids
    assert deliveries.given_back == []
    assert deliveries.settler.awaited == 0


async def test_no_more_rows_wait_in_hand_than_one_claim_takes() -> None:
    """Goes red when a row of high priority waits for the rows of two claims."""
    deliveries = Ahead()
    async with ending_tasks() as tasks:
        started = await deliveries.begin(tasks)
        assert deliveries.asked == [2]  # beside the one that has not begun
        for _ in range(5):
            deliveries.answers.release()
        await asyncio.wait_for(started, 5)
        await asyncio.wait_for(deliveries.parked._claim_and_deliver(tasks), 5)


@pytest.mark.parametrize("fair", [False, True])
async def test_claims_of_a_sink_with_turns_are_smaller(fair: bool) -> None:
    """Goes red when a row of one tenant waits for many rows of another that were claimed before."""
    deliveries = Deliveries(queued=True, fair=fair)
    deliveries.parked._pace.observe(-9.0)  # no time at all
    assert deliveries.parked._claim_rows(CLOSED) == (FAIR_CLAIM_SECONDS if fair else CLAIM_SECONDS) / 0.0005


async def test_the_next_wait_for_due_rows_is_left_out_while_rows_are_claimed_ahead() -> None:
    """Goes red when rows that were claimed wait until others are due."""
    deliveries = Ahead()
    deliveries.parked._claims.wait_until_due = asyncio.Event().wait
    async with ending_tasks() as tasks:
        await deliveries.begin_last_call(tasks)
        running = tasks.create_task(deliveries.parked.run())
        await spin()
        assert deliveries.sent == deliveries.ids + deliveries.ahead_ids[:1]
        running.cancel()
        deliveries.answers.release()


async def test_a_claim_ahead_that_finds_nothing_costs_no_slot() -> None:
    deliveries = Ahead()
    deliveries.claims = [[]]
    deliveries.ahead = []
    async with ending_tasks() as tasks:
        await deliveries.begin_last_call(tasks)
        await asyncio.wait_for(deliveries.parked._claim_and_deliver(tasks), 5)
    assert deliveries.parked._ahead is None
    assert deliveries.limiter.free == 1
    assert deliveries.settler.awaited == 0


async def test_a_lost_database_in_a_claim_ahead_ends_the_session() -> None:
    """Goes red when the error of the task is lost, and the session waits for rows that never come."""
    deliveries = Ahead()

    async def lost(_most: int) -> list[ClaimedRow]:
        raise DatabaseUnavailable("lost")

    async def session() -> None:
        async with ending_tasks() as tasks:
            deliveries.answers.release()
            await (await deliveries.start(tasks))
            await deliveries.parked._claim_and_deliver(tasks)

    deliveries.parked._claims.claim = lost
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(session(), 5)
    assert raised.group_contains(DatabaseUnavailable)


@pytest.mark.parametrize("case", ["log", "limit", "probe", "few", "slots"])
async def test_nothing_is_claimed_ahead(case: str) -> None:
    """Limits and probes are for single rows, the log needs slots, and rows may be left to another relay."""
    deliveries = Deliveries(queued=case != "log", slots=4 if case == "slots" else 1)
    if case == "limit":
        deliveries.limit()
    for _ in range(200):
        deliveries.parked._pace.observe(0.008)
    async with ending_tasks() as tasks:
        permit = Permit(0, probe=case == "probe")
        started = asyncio.ensure_future(await deliveries.start(tasks, permit, is_full=case != "few"))
        deliveries.holds = case != "probe"
        deliveries.admissions = asyncio.Semaphore(3)
        deliveries.answer.set()
        await asyncio.wait_for(started, 5)
    assert deliveries.asked == []
    assert "_claim_ahead" not in tasks.names
    assert deliveries.sent == (deliveries.ids[:1] if case == "probe" else deliveries.ids)


@pytest.mark.parametrize("change", [*CHANGES, "capacity", "none"])
async def test_a_claim_ahead_is_not_begun_after_a_change(change: str) -> None:
    """Goes red when rows are claimed only to go back, or are kept from another relay that may send them."""
    deliveries = Ahead()
    before = ClaimedCalls(deque(), lease_clock() + 5.0, CLOSED)
    if change == "capacity":
        deliveries.settler._done += [(claimed_rows(1)[0], None)] * MOST_UNSETTLED
    elif change != "none":
        CHANGES[change](deliveries)
    calls: ClaimedCalls = await deliveries.parked._claim_ahead(before)
    assert bool(calls.rows) == bool(deliveries.asked) == (change == "none")


async def test_no_rows_are_claimed_ahead_of_rows_that_went_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when a relay whose slots are all taken by calls that hang takes more rows from the others."""
    monkeypatch.setattr(START, 0.0)
    deliveries = Ahead()
    async with ending_tasks() as tasks:
        await asyncio.wait_for(await deliveries.start(tasks), 5)
        assert deliveries.went_back == deliveries.ids[1:]
        await deliveries.parked._give_ahead_back()
        deliveries.answers.release()
    assert deliveries.asked == []


# -- rows that go back ------------------------------------------------------------------------------------------------


async def test_rows_claimed_ahead_go_back_when_no_slot_becomes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when rows are held past their leases by requests that hang."""
    deliveries = Ahead()
    async with ending_tasks() as tasks:
        await deliveries.begin_last_call(tasks)
        await deliveries.limiter.acquire()
        monkeypatch.setattr(START, 0.0)
        claiming = asyncio.ensure_future(deliveries.parked._claim_and_deliver(tasks))
        await spin()
        assert deliveries.given_back == [(row, 3) for row in deliveries.ahead_ids]
        deliveries.limiter.release()
        await asyncio.wait_for(claiming, 5)
    assert deliveries.settler.awaited == 0


async def test_rows_claimed_ahead_go_back_when_no_outcome_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when rows are held past their leases while the database writes nothing."""
    deliveries = Ahead()
    async with ending_tasks() as tasks:
        await deliveries.begin_last_call(tasks)
        deliveries.settler._done += [(claimed_rows(1)[0], None)] * MOST_UNSETTLED
        monkeypatch.setattr(START, 0.0)
        claiming = asyncio.ensure_future(deliveries.parked._claim_and_deliver(tasks))
        await spin()
        assert deliveries.went_back == deliveries.ahead_ids
        claiming.cancel()


async def test_rows_claimed_ahead_go_back_while_the_circuit_is_open() -> None:
    """Goes red when rows wait for the probe of a destination that is down for long."""
    deliveries = Ahead()
    async with ending_tasks() as tasks:
        await deliveries.begin_last_call(tasks)
        deliveries.holds = False
        claiming = asyncio.ensure_future(deliveries.parked._claim_and_deliver(tasks))
        await spin()
        assert deliveries.went_back == deliveries.ahead_ids
        claiming.cancel()


@pytest.mark.parametrize("slots", [1, 16])
async def test_calls_that_end_at_once_leave_turns_to_other_tasks(slots: int) -> None:
    """Goes red when slots that are kept keep the event loop too, so that no lease is renewed meanwhile."""
    deliveries = Deliveries(queued=True, slots=slots)
    deliveries.rows = claimed_rows(10 * TURN_CALLS)
    deliveries.answer.set()
    seen = list[int]()

    async def other() -> None:
        while len(deliveries.sent) < len(deliveries.rows):
            seen.append(len(deliveries.sent))
            await asyncio.sleep(0)
        seen.append(len(deliveries.sent))

    async with ending_tasks() as tasks:
        tasks.create_task(other())
        await asyncio.wait_for(await deliveries.start(tasks), 5)
    assert max(after - before for before, after in pairwise(seen)) <= TURN_CALLS


@pytest.mark.parametrize("change", ["time", "soon", "term", "limit", "pause"])
async def test_rows_claimed_ahead_are_not_sent_after_a_change(change: str) -> None:
    """Goes red when a lease may end during a call, or the circuit, a pause or a limit does not count."""
    deliveries = Ahead()
    async with ending_tasks() as tasks:
        await deliveries.begin_last_call(tasks)
        for _ in deliveries.ahead:
            deliveries.answers.release()  # they end if they are sent
        calls: ClaimedCalls = await deliveries.parked._ahead
        if change == "time":
            calls.until = lease_clock()
        elif change == "soon":
            calls.until = lease_clock() + START_SECONDS / 2
        elif change == "term":
            calls.permit = Permit(1, probe=False)
        else:
            CHANGES[change](deliveries)
        await asyncio.wait_for(deliveries.parked._claim_and_deliver(tasks), 5)
    assert deliveries.given_back == [(row, 3) for row in deliveries.ahead_ids]
    assert deliveries.sent == deliveries.ids
    assert deliveries.limiter.free == 1


async def test_rows_claimed_ahead_go_back_when_the_sink_is_paused() -> None:
    """Goes red when rows stay in hand while the sink is paused, until their leases lapse."""
    deliveries = Ahead()
    async with ending_tasks() as tasks:
        await deliveries.begin_last_call(tasks)
        deliveries.leases.stop()
        running = tasks.create_task(deliveries.parked.run())
        await auntil(lambda: is_settled(deliveries), seconds=5, what="no row is under way")
        running.cancel()
    assert deliveries.sent == deliveries.ids


async def is_settled(deliveries: Deliveries) -> bool:
    """Return True if no row is under way."""
    return deliveries.parked.under_way == 0


@pytest.mark.parametrize("change", CHANGES)
async def test_rows_of_a_claim_go_back_if_they_may_not_be_sent_any_more(change: str) -> None:
    """Goes red when the first row of a claim is sent beyond a limit, a pause, a hand-over or an open circuit."""
    deliveries = Deliveries(queued=True)
    deliveries.claims = [deliveries.rows]
    deliveries.answer.set()
    claim = deliveries.parked._claims.claim

    async def changed_meanwhile(most: int) -> list[ClaimedRow]:
        rows: list[ClaimedRow] = await claim(most)
        CHANGES[change](deliveries)
        return rows

    deliveries.parked._claims.claim = changed_meanwhile
    async with ending_tasks() as tasks:
        await asyncio.wait_for(deliveries.parked._claim_and_deliver(tasks), 5)
    assert deliveries.sent == []
    assert deliveries.given_back == [(deliveries.ids[0], 2)]
    assert deliveries.limiter.free == 1


def test_a_row_that_was_claimed_again_stays_in_hand_with_its_new_lease() -> None:
    """Goes red when the outcome of an earlier claim ends the memory of a later one of the same row."""
    claims: QueueClaims = Deliveries(queued=True).parked._claims
    [row] = claimed_rows(1)
    again = row._replace(lease=uuid4())
    in_hand = claims._in_hand  # pyright: ignore[reportPrivateUsage]
    in_hand.rows[row.event.id] = again.lease
    claims.written([row], 0)
    assert in_hand.rows == {row.event.id: again.lease}
    claims.written([again], 0)
    assert in_hand.rows == {}
