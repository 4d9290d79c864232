"""Parked deliveries leave time to the events of the log: one request after another, few statements for many rows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.measures import SinkMeasures
from outbox_relay.domain.outcomes import DELIVERED
from outbox_relay.postgres.rows import ClaimedRow, DeliveredRow, RowUpdate
from outbox_relay.relay.breaker import Permit
from outbox_relay.relay.context import CallResult
from outbox_relay.relay.due_timer import DueTimer
from outbox_relay.relay.limiter import ConcurrencyLimiter
from outbox_relay.relay.parked import ParkedDeliveries
from outbox_relay.relay.parked_pace import CLAIM_SECONDS, FIRST_SECONDS, ParkedPace
from outbox_relay.relay.shared_limits import UNLIMITED, Admission
from outbox_relay.relay.slow_requests import SlowRequests
from outbox_relay.sinks.contract.handing import an_event
from tests.support.limits import no_limits
from tests.support.recording import a_recorder

SLOTS = 64
PACE = "outbox_relay.relay.parked_pace.PAUSE_SECONDS"
GATHER = "outbox_relay.relay.parked_settler.GATHER_SECONDS"
START = "outbox_relay.relay.parked.START_SECONDS"
CLOSED = Permit(0, probe=False)


async def spin() -> None:
    """Let every task come as far as it can: none of them waits for anything outside."""
    for _ in range(10):
        await asyncio.sleep(0)


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


# -- rows that were claimed and cannot begin ---------------------------------------------------------------------------


class Deliveries:
    """Parked deliveries of a sink with one slot, whose requests end when ``answer`` is set."""

    def __init__(self) -> None:
        self.answer = asyncio.Event()
        self.holds = True
        self.sent = list[int]()
        self.deleted = list[list[int]]()
        self.wrote = asyncio.Event()
        self.rows = [ClaimedRow(an_event(), ordered=True, attempts=2, claims=1, lease=uuid4()) for _ in range(3)]
        parts: Any = SimpleNamespace(
            spec=SimpleNamespace(name="s", hold=False, record_attempts="failures", queued=False, tenants=False),
            sink=SimpleNamespace(max_batch=1, keeps_order=False),
            limiter=ConcurrencyLimiter(1, asyncio.Event()),
            breaker=SimpleNamespace(holds=self._circuit_holds, handing_over=False),
            leases=SimpleNamespace(serving=True),
            due_timer=DueTimer(),
            measures=SinkMeasures(),
            now=lambda: self.rows[0].event.created_at,
            delivered=self._circuit_holds,
            call=self._call,
            limits=no_limits(),
            delete_rows=self._delete_rows,
            update_rows=self._update_rows,
        )
        self.parked: Any = ParkedDeliveries(parts, parts, uuid4(), parts, SlowRequests("s", 1), a_recorder())
        self.settler: Any = self.parked._settler

    def _circuit_holds(self, _permit: Permit) -> bool:
        return self.holds

    async def _call(self, events: Sequence[Any], _until: float, _admission: Admission, _attempt: int) -> CallResult:
        self.sent += [event.id for event in events]
        await self.answer.wait()
        return CallResult([DELIVERED] * len(events), 0.001)

    async def _delete_rows(self, _sink: str, rows: Sequence[DeliveredRow], **_: Any) -> dict[int, bool]:
        self.deleted.append([row.id for row in rows])
        self.wrote.set()
        return {row.id: False for row in rows}

    async def _update_rows(self, _sink: str, rows: Sequence[RowUpdate], **_: Any) -> set[int]:
        self.wrote.set()
        return {row.id for row in rows}

    async def start(self, tasks: asyncio.TaskGroup) -> Coroutine[Any, Any, None]:
        """Return the start of one claim with three calls, of which the first has the slot."""
        await self.parked._pace.take_slot()
        self.settler.expect(len(self.rows))
        return self.parked._start(tasks, deque([row] for row in self.rows), lease_clock(), CLOSED, UNLIMITED)

    @property
    def given_back(self) -> list[tuple[int, int]]:
        """The ids of the rows that go back as they were, with their attempts."""
        return [(back.id, back.attempts) for _, back, _ in self.settler._back if back.state is back.due_in is None]


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
