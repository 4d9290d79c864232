"""Which events go out with which call, and when enough waits for the sink, on a sink that answers when told to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import cast
from uuid import UUID

import pytest

from outbox_relay.domain.errors import LeaseLost
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.in_flight import Chunk, InFlight
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import DELIVERED, Failed, Refused, Unavailable, Verdict
from outbox_relay.domain.window import Position, Tick
from outbox_relay.postgres.store import Store
from outbox_relay.relay.breaker import CircuitBreaker
from outbox_relay.relay.context import CallResult, DeliveryContext
from outbox_relay.relay.dispatch_batches import BatchDispatcher
from outbox_relay.relay.dispatch_requests import RequestDispatcher
from outbox_relay.relay.dispatcher import Dispatcher
from outbox_relay.relay.due_timer import DueTimer
from outbox_relay.relay.limiter import ConcurrencyLimiter
from outbox_relay.relay.parked_limit import ParkedLimit
from outbox_relay.relay.settler import Settler
from outbox_relay.relay.sink_leases import Lease, SinkLeases
from outbox_relay.relay.sink_report import SinkReport
from outbox_relay.relay.slow_requests import SlowRequests
from outbox_relay.sinks.contract.handing import an_event
from tests.support.limits import no_limits
from tests.support.logs import RecordedLog
from tests.support.memory_sink import MemorySink
from tests.support.recording import a_recorder
from tests.support.relay_harness import spec
from tests.support.wait import auntil

NOWHERE = Position(Tick(0, "3:3:", 3), None, 0)
NO_STORE = cast("Store", None)
"""Nothing is written here."""


class Held(MemorySink):
    """Notes the calls, and answers none before it is told to."""

    def __init__(self, *, keeps_order: bool = True) -> None:
        super().__init__(keeps_order=keeps_order)
        self.calls: list[Sequence[StoredEvent]] = []
        self.answering = asyncio.Event()
        self.answer: Callable[[StoredEvent], Verdict] = lambda _event: DELIVERED

    async def deliver(self, batch: Sequence[StoredEvent], _until: float, _attempt: int = 0, /) -> Sequence[Verdict]:
        self.calls.append(list(batch))
        await self.answering.wait()
        return [self.answer(event) for event in batch]

    async def has_calls(self, number: int) -> None:
        async def fact() -> bool:
            return len(self.calls) >= number

        await auntil(fact, seconds=10, what=f"{number} calls")

    @property
    def sizes(self) -> list[int]:
        return [len(call) for call in self.calls]


def a_context(sink: Held) -> DeliveryContext:
    leases, in_flight, changed = SinkLeases("s", 1), InFlight(), asyncio.Event()
    leases.grant(dict.fromkeys(range(64), Lease(1, lease_clock() + 60, 0)))
    settler = Settler(NO_STORE, leases, UUID(int=1), in_flight, a_recorder())
    breaker, limiter = CircuitBreaker(spec("s").circuit, changed), ConcurrencyLimiter(sink.max_in_flight, changed)
    parked_limit = ParkedLimit(NO_STORE, spec("s"), settler, changed)
    return DeliveryContext(
        spec("s"), sink, leases, in_flight.blocked, settler, breaker, limiter, no_limits(leases),
        parked_limit,
        SinkReport(NO_STORE, spec("s"), leases, breaker, limiter, parked_limit, changed, RecordedLog()),
        DueTimer(), lambda: datetime.now(UTC), lambda: 0.0,
    )  # fmt: skip


def a_batch_dispatcher(sink: Held, want_more: asyncio.Event | None = None) -> BatchDispatcher:
    return BatchDispatcher(a_context(sink), want_more or asyncio.Event())


def a_request_dispatcher(
    sink: Held, want_more: asyncio.Event | None = None, context: DeliveryContext | None = None
) -> RequestDispatcher:
    slow_requests = SlowRequests("s", sink.max_in_flight)
    return RequestDispatcher(context or a_context(sink), want_more or asyncio.Event(), slow_requests)


class WantMore(asyncio.Event):
    """Notes whether the dispatcher is saturated whenever it asks for more."""

    def __init__(self) -> None:
        super().__init__()
        self.saturated: Callable[[], bool] = bool
        self.asked: list[bool] = []

    def set(self) -> None:
        self.asked.append(self.saturated())
        super().set()


@asynccontextmanager
async def at_work(dispatcher: Dispatcher) -> AsyncGenerator[None]:
    running = asyncio.create_task(dispatcher.run())
    yield
    running.cancel()
    await asyncio.wait({running})


def chunks(*sizes: int, payload: bytes = b"{}") -> list[Chunk]:
    return [Chunk([an_event(f"k{n}", payload) for n in range(size)], NOWHERE, NOWHERE) for size in sizes]


async def test_what_waits_for_room_goes_out_with_one_call_in_order() -> None:
    sink = Held()
    dispatcher, read = a_batch_dispatcher(sink), chunks(1, 2, 3, 4, 5)
    async with at_work(dispatcher):
        for chunk in read[:2]:
            dispatcher.put(chunk)
        await sink.has_calls(1)
        for chunk in read[2:]:
            dispatcher.put(chunk)
        sink.answering.set()
        await sink.has_calls(2)
        await auntil_finished(read)
    assert sink.sizes == [3, 12]
    assert [event.uid for call in sink.calls for event in call] == [e.uid for chunk in read for e in chunk.events]


async def auntil_finished(read: Sequence[Chunk]) -> None:
    async def fact() -> bool:
        return all(chunk.finished for chunk in read)

    await auntil(fact, seconds=10, what="all is delivered")


async def test_a_call_holds_no_more_events_than_the_sink_takes() -> None:
    sink = Held()
    sink.max_batch = 4
    sink.answering.set()
    dispatcher, read = a_batch_dispatcher(sink), chunks(3, 2, 1, 9)
    for chunk in read:
        dispatcher.put(chunk)
    async with at_work(dispatcher):
        await auntil_finished(read)
    assert sink.sizes == [3, 3, 4, 4, 1]


async def test_a_call_of_several_chunks_holds_no_more_than_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox_relay.relay.dispatch_batches.CALL_BYTES", 100)
    sink = Held()
    sink.answering.set()
    dispatcher, read = a_batch_dispatcher(sink), chunks(1, 1, 3, 1, payload=b"x" * 40)
    for chunk in read:
        dispatcher.put(chunk)
    async with at_work(dispatcher):
        await auntil_finished(read)
    assert sink.sizes == [2, 3, 1]


async def test_of_a_call_that_comes_back_in_part_each_chunk_knows_its_own() -> None:
    """An unavailable event, the first of its chunk, is sent again alone; the rest is delivered."""
    sink = Held()
    sink.answering.set()
    dispatcher, read = a_batch_dispatcher(sink), chunks(2, 3, 2)
    again = read[1].events[1].uid
    sink.answer = lambda event: Unavailable("later") if event.uid == again and len(sink.calls) == 1 else DELIVERED
    for chunk in read:
        dispatcher.put(chunk)
    async with at_work(dispatcher):
        await sink.has_calls(2)
        await auntil_finished(read)
    assert [[event.uid for event in call] for call in sink.calls[1:]] == [[again]]


async def test_the_sink_has_enough_while_a_call_waits_and_says_when_not() -> None:
    sink, want_more = Held(), WantMore()
    dispatcher = a_batch_dispatcher(sink, want_more)
    want_more.saturated = lambda: dispatcher.saturated
    assert not dispatcher.saturated
    async with at_work(dispatcher):
        for number, chunk in enumerate(chunks(1, 1)):
            dispatcher.put(chunk)
            await sink.has_calls(number + 1)
        assert not dispatcher.saturated
        dispatcher.put(chunks(1)[0])
        assert dispatcher.saturated
        want_more.asked.clear()
        sink.answering.set()
        await sink.has_calls(3)
        assert want_more.asked == [False]


async def test_a_sink_of_requests_has_enough_while_as_many_wait_as_may_be_under_way() -> None:
    sink, want_more = Held(keeps_order=False), WantMore()
    sink.max_in_flight = 3
    dispatcher = a_request_dispatcher(sink, want_more)
    want_more.saturated = lambda: dispatcher.saturated
    async with at_work(dispatcher):
        dispatcher.put(chunks(6)[0])
        await sink.has_calls(3)
        assert dispatcher.saturated
        assert not want_more.asked
        sink.answering.set()
        await sink.has_calls(6)
        assert want_more.asked == [False]


async def test_a_backlog_of_one_key_costs_each_event_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def counted(context: DeliveryContext, event: StoredEvent) -> bool:
        nonlocal looks
        looks += 1
        return keyed(context, event)

    keyed = DeliveryContext.keyed
    monkeypatch.setattr(DeliveryContext, "keyed", counted)
    sink = Held()
    sink.answering.set()
    chunk = Chunk([an_event("k") for _ in range(1000)], NOWHERE, NOWHERE)
    dispatcher = a_request_dispatcher(sink)
    dispatcher.put(chunk)
    async with at_work(dispatcher):
        await auntil_finished([chunk])
    assert [event.uid for [event] in sink.calls] == [event.uid for event in chunk.events]
    assert looks < 5 * len(chunk.events)


async def test_a_probe_that_fails_again_or_is_refused_counts_an_attempt_and_other_failures_do_not() -> None:
    context, event = a_context(Held()), an_event("k")
    early = await context.breaker.admit()
    context.breaker.unavailable(1, Unavailable("down"), early, at_once=True, retry_after=0.0)
    context.breaker.probe_now()
    probe = await context.breaker.admit()
    failed, uncounted = Failed("status 500", 500), Unavailable("status 500", 500)
    assert context.judged(event, failed, early, 0.1) == uncounted
    assert (probe.probe, context.judged(event, failed, probe, 0.1)) == (True, uncounted)
    context.breaker.probe_now()
    assert context.judged(event, failed, await context.breaker.admit(), 0.1) == failed
    context.breaker.probe_now()
    refused = Refused("status 400", 400)
    assert context.judged(event, refused, early, 0.1) == Unavailable("status 400", 400)
    assert context.judged(event, refused, await context.breaker.admit(), 0.1) == refused
    assert context.breaker.state == "open"


async def test_refusals_of_different_events_open_the_circuit_and_a_refusal_without_an_answer_does_not() -> None:
    """A sink that refuses an event by itself, such as one that is too large, has not asked the destination."""
    context = a_context(Held())
    permit = await context.breaker.admit()
    for _ in range(context.spec.circuit.open_after):
        assert context.judged(an_event("k"), Refused("too large"), permit, 0.1) == Refused("too large")
    assert context.breaker.state == "closed"
    for number in range(context.spec.circuit.open_after):
        refused = Refused("status 422", 422)
        assert context.judged(an_event("k")._replace(id=number), refused, permit, 0.1) == refused
    assert context.breaker.state == "open"


async def test_a_probe_that_was_not_answered_stays_where_it_is() -> None:
    context, event = a_context(Held()), an_event("k")
    context.breaker.unavailable(1, Unavailable("down"), await context.breaker.admit(), at_once=True, retry_after=0.0)
    probe = await context.breaker.admit()
    chunk = Chunk([event], NOWHERE, NOWHERE)
    assert not context.apply(chunk, 0, Unavailable("down"), probe, 0.1)
    assert chunk.undone() == [0]


async def test_requests_wait_before_they_are_begun_while_too_many_rows_stand() -> None:
    """Events in hand stay there, and are delivered once rows have gone."""
    sink = Held(keeps_order=False)
    context = a_context(sink)
    for _ in range(context.spec.parked_max):
        context.parked_limit.add()
    dispatcher, [chunk] = a_request_dispatcher(sink, context=context), chunks(3)
    dispatcher.put(chunk)
    async with at_work(dispatcher):
        for _ in range(10):  # It waits for nothing outside: by then it has come as far as it can.
            await asyncio.sleep(0)
        assert sink.calls == []
        assert chunk.undone() == [0, 1, 2]


async def test_a_lease_ends_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine cannot be suspended by a test: the clock that counts such time is replaced."""
    context, events = a_context(Held()), [an_event("k")]
    assert context.until(events) > lease_clock()
    awake = time.clock_gettime

    def suspended(clock: int) -> float:
        return awake(clock) + 61 * (clock == time.CLOCK_BOOTTIME)

    monkeypatch.setattr(time, "clock_gettime", suspended)
    with pytest.raises(LeaseLost):
        context.until(events)


async def test_calls_are_counted_and_timed_by_outcome_and_those_in_flight_too() -> None:
    sink = Held()
    context, read = a_context(sink), chunks(3)
    dispatcher = BatchDispatcher(context, asyncio.Event())
    async with at_work(dispatcher):
        dispatcher.put(read[0])
        await sink.has_calls(1)
        assert context.measures.in_flight == 1
        sink.answering.set()
        await auntil_finished(read)
    measures = context.measures
    assert (measures.in_flight, measures.delivered_count, measures.end_to_end.count) == (0, 3, 3)
    assert list(measures.attempts) == ["delivered"]


async def test_chunks_that_are_read_while_a_failed_session_ends_are_not_sent() -> None:
    """Goes red when the error of the session is hidden by one of a group that takes no more calls."""

    class Raising(Held):
        async def deliver(self, batch: Sequence[StoredEvent], _until: float, _attempt: int = 0, /) -> Sequence[Verdict]:
            self.calls.append(list(batch))
            raise LeaseLost("it was lost")

    sink, read = Raising(), chunks(*([1] * 20))
    dispatcher = a_batch_dispatcher(sink)
    task = asyncio.create_task(dispatcher.run())
    await asyncio.sleep(0)
    for chunk in read:
        if not dispatcher.under_way:
            dispatcher.put(chunk)
        await asyncio.sleep(0)
    with pytest.raises(ExceptionGroup) as failed:
        await task
    assert failed.group_contains(LeaseLost)
    assert sink.sizes == [1]


async def test_a_chunk_that_is_read_after_the_end_of_a_session_is_not_sent() -> None:
    dispatcher = a_batch_dispatcher(sink := Held())
    async with at_work(dispatcher):
        await asyncio.sleep(0)  # it has begun
    dispatcher.put(chunks(1)[0])
    assert sink.calls == []


async def test_a_call_that_is_cancelled_has_no_outcome() -> None:
    sink = Held()
    context = a_context(sink)
    dispatcher = BatchDispatcher(context, asyncio.Event())
    async with at_work(dispatcher):
        dispatcher.put(chunks(3)[0])
        await sink.has_calls(1)
    assert (context.measures.in_flight, context.measures.attempts) == (0, {})


async def test_a_failure_that_counts_as_the_destinations_is_an_attempt_that_was_unavailable() -> None:
    sink = Held()
    sink.answer = lambda _event: Failed("status 500", 500)
    context, read = a_context(sink), chunks(1)
    early = await context.breaker.admit()
    for number in range(context.spec.circuit.open_after):
        context.breaker.failed(number, "down", early)
    verdicts, seconds = CallResult([sink.answer(read[0].events[0])], 0.3)
    context.apply(read[0], 0, verdicts[0], early, seconds)
    assert {outcome: each.copy().sum for outcome, each in context.measures.attempts.items()} == {"unavailable": 0.3}
