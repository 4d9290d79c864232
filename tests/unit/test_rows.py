"""Rows of requests that outlast their event, when the session that made them is ending."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import pytest

from outbox_relay.domain.errors import LeaseLost, SessionReset, StatementFailed
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.in_flight import Chunk
from outbox_relay.domain.measures import SinkMeasures
from outbox_relay.domain.outcomes import DELIVERED
from outbox_relay.domain.window import BEGINNING, Position
from outbox_relay.postgres.rows import ClaimedRow, DeliveredRow, RowPlace
from outbox_relay.relay import parked_claims
from outbox_relay.relay.breaker import Permit
from outbox_relay.relay.context import CallResult
from outbox_relay.relay.dispatch_requests import RequestDispatcher
from outbox_relay.relay.due_timer import DueTimer
from outbox_relay.relay.limiter import ConcurrencyLimiter
from outbox_relay.relay.parked import ParkedDeliveries
from outbox_relay.relay.parked_claims import MOST_BYTES, MOST_ROWS, ClaimSize, ParkedClaims
from outbox_relay.relay.parked_settler import MOST_UNSETTLED, ParkedSettler
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.slow_requests import SlowRequest, SlowRequests
from outbox_relay.sinks.contract.handing import an_event
from tests.support.limits import no_limits
from tests.support.recording import a_recorder

ANSWER = CallResult([DELIVERED], 0.1)


def park(*_: object, **__: object) -> int:
    """Return the number of the first settlement."""
    return 1


class Slow(NamedTuple):
    """The parts that a slow request goes through."""

    requests: SlowRequests
    dispatcher: RequestDispatcher
    deliveries: ParkedDeliveries

    def park(self) -> asyncio.Future[CallResult]:
        """Park an event whose request does not end."""
        position = Position(BEGINNING)
        request: Any = asyncio.ensure_future(asyncio.sleep(60, ANSWER))
        self.dispatcher._park_slow(  # pyright: ignore[reportPrivateUsage]
            Chunk([an_event()], position, position), 0, request, Permit(0, probe=False), 0.0
        )
        return request


def a_slow_sink(slots: int) -> Slow:
    """Make the parts of a sink with ``slots``, all of which are taken by requests."""
    parts: Any = SimpleNamespace(
        spec=SimpleNamespace(name="s", queued=False, fair=False, tenants=False),
        sink=SimpleNamespace(timeout_seconds=15.0, keeps_order=False),
        blocked=(),
        park=park, keyed=bool, now=lambda: datetime.now(UTC), limits=no_limits(),
    )  # fmt: skip
    parts.limiter = ConcurrencyLimiter(slots, asyncio.Event())
    requests = SlowRequests("s", slots)
    deliveries = ParkedDeliveries(parts, parts, uuid4(), parts, requests, a_recorder())
    return Slow(requests, RequestDispatcher(parts, asyncio.Event(), requests), deliveries)


async def test_a_request_that_is_parked_after_the_session_ended_is_cancelled_and_ends_nothing_else() -> None:
    """Goes red when the refusal comes through as another error than a reset: it would end the whole relay."""
    slow = a_slow_sink(1)
    slow.requests.close()
    before = asyncio.all_tasks()
    with pytest.raises(SessionReset, match="sink s: the session is ending"):
        slow.park()
    await auntil_cancelled(*(asyncio.all_tasks() - before))
    assert slow.deliveries.under_way == 0


async def auntil_cancelled(*requests: asyncio.Future[Any]) -> None:
    await asyncio.wait(requests, timeout=5)
    assert [request.cancelled() for request in requests] == [True] * len(requests)


async def test_requests_that_wait_to_be_adopted_when_the_session_ends_are_cancelled() -> None:
    slow = a_slow_sink(2)
    requests = [slow.park(), slow.park()]
    assert slow.deliveries.under_way == 2
    slow.requests.close()
    await auntil_cancelled(*requests)
    assert slow.deliveries.under_way == 0


async def _fails_when_it_is_cancelled() -> CallResult:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise LeaseLost("gone") from None
    return ANSWER


async def _ended_with_a_request_that_fails() -> None:
    slow, request = a_slow_sink(1), asyncio.ensure_future(_fails_when_it_is_cancelled())
    slow.requests.adopt_slow_request(SlowRequest(_row(key=None, ordered=False), Permit(0, probe=False), 1, request))
    await asyncio.sleep(0)  # The request begins.
    slow.requests.close()
    await asyncio.wait({request})


async def test_the_error_of_a_request_that_nothing_awaits_any_more_is_not_logged() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    await _ended_with_a_request_that_fails()
    gc.collect()
    assert not reported


async def test_more_slow_requests_than_slots_end_the_session_alone() -> None:
    slow = a_slow_sink(1)
    slow.park()
    with pytest.raises(SessionReset, match="more slow requests than slots"):
        slow.park()
    slow.requests.close()


async def test_adopted_requests_are_cancelled_with_the_session_even_before_their_task_has_begun() -> None:
    slow = a_slow_sink(2)
    requests = [slow.park(), slow.park()]
    adopting = asyncio.create_task(_adopt(slow.deliveries))
    await asyncio.sleep(0)  # By then it has taken them, and the tasks that it made have not begun.
    adopting.cancel()
    await asyncio.wait({adopting})
    await auntil_cancelled(*requests)


async def test_requests_are_adopted_and_counted_until_they_are_settled_while_every_slot_is_taken() -> None:
    """Goes red when they are adopted by the task that claims rows: it waits for a slot, and they keep theirs."""
    slow, written, decided = a_slow_sink(1), asyncio.Event(), asyncio.Event()
    context: Any = slow.deliveries._context  # pyright: ignore[reportPrivateUsage]
    context.settler = SimpleNamespace(committed=written_at(written))
    settler: Any = slow.deliveries._settler  # pyright: ignore[reportPrivateUsage]
    settler.decide = lambda *_: decided.set()  # pyright: ignore[reportUnknownLambdaType]
    await context.limiter.acquire()
    request: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
    slow.requests.adopt_slow_request(SlowRequest(_row(key=None, ordered=False), Permit(0, probe=False), 1, request))
    adopting = asyncio.create_task(_adopt(slow.deliveries))
    request.set_result(ANSWER)
    await asyncio.wait_for(context.limiter.acquire(), 5)
    assert (slow.deliveries.under_way, decided.is_set()) == (1, False)
    written.set()
    await asyncio.wait_for(decided.wait(), 5)
    assert slow.deliveries.under_way == 0
    adopting.cancel()
    await asyncio.wait({adopting})


def written_at(event: asyncio.Event) -> Callable[[int], Coroutine[Any, Any, bool]]:
    """Return a wait for a settlement that is written once ``event`` is set."""

    async def committed(_number: int) -> bool:
        return await event.wait()

    return committed


async def _adopt(deliveries: ParkedDeliveries) -> None:
    async with asyncio.TaskGroup() as tasks:
        await deliveries._slow_deliveries.run(tasks)  # pyright: ignore[reportPrivateUsage]


class Claiming(Exception):
    """Rows are about to be claimed."""


async def _claiming() -> None:
    raise Claiming


async def _done(_sink: str, rows: list[DeliveredRow], *, relay: str | None, only_tried: bool) -> dict[int, bool]:
    """Settle rows of keys with further rows."""
    assert (relay, only_tried) == ("here", True)
    return {row.id: True for row in rows}


class Parked(NamedTuple):
    """The deliveries of a sink, and the parts that claim and settle them."""

    deliveries: ParkedDeliveries
    claims: ParkedClaims
    settler: ParkedSettler
    store: Any


def _parked() -> Parked:
    """Make the deliveries of a sink that delivers every event; each row was ours when it is settled."""
    parts: Any = SimpleNamespace(
        spec=SimpleNamespace(name="s", hold=False, record_attempts="failures", queued=False, fair=False, tenants=False),
        sink=SimpleNamespace(timeout_seconds=15.0, keeps_order=False),
        leases=SinkLeases("s", 1),
        blocked=(),
        delivered=bool,
        limiter=SimpleNamespace(increase=int, acquire=_claiming, parked_share=lambda: 1, limit=1),
        due_timer=DueTimer(),
        delete_rows=_done,
        measures=SinkMeasures(),
        now=lambda: datetime.now(UTC),
    )
    deliveries = ParkedDeliveries(parts, parts, uuid4(), parts, SlowRequests("s", 1), a_recorder())
    claims, settler = deliveries._claims, deliveries._settler  # pyright: ignore[reportPrivateUsage]
    return Parked(deliveries, claims, settler, parts)


def _row(*, key: str | None, ordered: bool) -> ClaimedRow:
    return ClaimedRow(an_event()._replace(key=key), ordered, 0, 1, uuid4())


async def test_only_rows_behind_those_that_have_an_order_are_asked_for() -> None:
    """Scheduled events have a key and no place in its order: nothing waits behind them, and nothing is looked up."""
    parked = _parked()
    settled = [_row(key="scheduled", ordered=False), _row(key=None, ordered=False), _row(key="first", ordered=True)]
    parked.settler.settle_call(settled, [DELIVERED] * 3, 0.1, Permit(0, probe=False))
    assert parked.deliveries.under_way == 3
    await parked.settler.settle()
    assert parked.deliveries.under_way == 0
    assert list(parked.claims._heads) == ["first"]  # pyright: ignore[reportPrivateUsage]


async def test_no_key_is_asked_for_of_which_no_row_is_left() -> None:
    """Goes red when each row that is delivered costs looks for rows behind it, again and again while more are due."""
    parked = _parked()

    async def alone(_sink: str, rows: list[DeliveredRow], **_: Any) -> dict[int, bool]:
        return {row.id: False for row in rows}

    parked.store.delete_rows = alone
    parked.settler.settle_call([_row(key="k", ordered=True)], [DELIVERED], 0.1, Permit(0, probe=False))
    await parked.settler.settle()
    assert list(parked.claims._heads) == []  # pyright: ignore[reportPrivateUsage]


async def test_a_claim_asks_about_few_keys_in_turn_however_many_are_free() -> None:
    """Each key is looked up in the database, and a sink with many due rows comes to none of those behind them."""
    parked, asked = _parked(), list[list[str]]()

    async def claim_rows(*_: Any, keys: list[str], **__: Any) -> list[ClaimedRow]:
        asked.append(keys)
        return [_row(key=None, ordered=False)] * 4  # as many as were asked for: more may be due

    parked.store.claim_rows, parked.store.give_leases_back = claim_rows, claim_rows
    parked.store.now = lambda: datetime.now(UTC)
    parked.claims._swept_at = parked.claims._suspected_at = float("inf")  # pyright: ignore[reportPrivateUsage]
    names = [f"k{number}" for number in range(250)]
    parked.claims.follow([_row(key=name, ordered=True) for name in names])
    for _ in range(3):
        await parked.claims.claim(4)
    assert asked == [names[:100], names[100:200], [*names[200:], *names[:50]]]


@pytest.mark.parametrize("field", ["payload", "headers"])
async def test_the_keys_of_a_claim_that_its_bytes_ended_are_asked_about_again(field: str) -> None:
    """Headers are in the bytes by which the database ends a claim, as payloads are."""
    parked, asked = _parked(), list[list[str]]()
    large: Any = {"payload": bytes(MOST_BYTES // 4), "headers": "x" * (MOST_BYTES // 4)}
    row = _row(key=None, ordered=False)
    row = row._replace(event=row.event._replace(**{field: large[field]}))

    async def claim_rows(*_: Any, keys: list[str], **__: Any) -> list[ClaimedRow]:
        asked.append(keys)
        return [row] * 4

    parked.store.claim_rows, parked.store.now = claim_rows, lambda: datetime.now(UTC)
    parked.claims._swept_at = parked.claims._suspected_at = float("inf")  # pyright: ignore[reportPrivateUsage]
    parked.claims.follow([_row(key="k", ordered=True)])
    for _ in range(2):
        await parked.claims.claim(100)
    assert asked == [["k"], ["k"]]


async def test_a_claim_begins_where_a_full_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when rows in flight are looked at again, or rows that came back are never looked at."""
    parked, places, now = _parked(), list[RowPlace | None](), [5.0]
    monkeypatch.setattr(parked_claims, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one = _row(key=None, ordered=False)._replace(due=8.0)
    rows = [one._replace(event=one.event._replace(id=number)) for number in range(1, 5)]
    ordered = [_row(key="k", ordered=True)._replace(due=9.0)] * 4
    found = [rows, rows[::-1], rows[:3], rows, ordered, rows, rows, rows]
    end = RowPlace(8.0, 4)

    async def claim_rows(*_: Any, **options: Any) -> list[ClaimedRow]:
        places.append(options["after"])
        return found[len(places) - 1]

    parked.store.claim_rows, parked.store.now = claim_rows, lambda: datetime.now(UTC)
    parked.claims._swept_at = parked.claims._suspected_at = float("inf")  # pyright: ignore[reportPrivateUsage]
    for _ in found[:6]:
        await parked.claims.claim(4)
    assert places == [None, end, end, None, end, None], "the first place follows rows that are not full, or ordered"
    now[0] += 1.0
    await parked.claims.claim(4)
    assert places[6] is None, "after a second"
    parked.claims.follow([_row(key="k", ordered=True)])
    await parked.claims.claim(4)
    assert places[7] is None, "after a row of a key"


async def test_the_first_rows_are_looked_for_at_once_behind_the_last_one() -> None:
    """Goes red when rows that came back before the place of a claim wait for the next poll."""
    parked, places = _parked(), list[RowPlace | None]()
    rows = [_row(key=None, ordered=False)._replace(due=8.0)] * 4

    async def claim_rows(*_: Any, **options: Any) -> list[ClaimedRow]:
        places.append(options["after"])
        return rows if len(places) == 1 else []

    parked.store.claim_rows, parked.store.now = claim_rows, lambda: datetime.now(UTC)
    parked.claims._swept_at = parked.claims._suspected_at = float("inf")  # pyright: ignore[reportPrivateUsage]
    for _ in range(3):
        due = asyncio.ensure_future(parked.claims.wait_until_due())
        for _ in range(10):
            await asyncio.sleep(0)
        assert due.done(), "the next claim waits for no time"
        await parked.claims.claim(4)
    assert places == [None, rows[0].place, None]
    waiting = asyncio.ensure_future(parked.claims.wait_until_due())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done(), "nothing is due"
    waiting.cancel()


@pytest.mark.parametrize(("found", "waits"), [(4, False), (3, True), (0, True)])
async def test_no_wait_follows_a_claim_behind_which_more_rows_may_be_due(found: int, waits: bool) -> None:
    """Goes red when the rest of a burst waits because a claim before it found no row."""
    parked = _parked()

    async def claim_rows(*_: Any, **__: Any) -> list[ClaimedRow]:
        return [_row(key=None, ordered=False)] * found

    parked.store.claim_rows, parked.store.now = claim_rows, lambda: datetime.now(UTC)
    parked.claims._swept_at = parked.claims._suspected_at = float("inf")  # pyright: ignore[reportPrivateUsage]
    parked.claims._asked_at = time.monotonic()  # pyright: ignore[reportPrivateUsage]
    await parked.claims.claim(4)
    waiting = asyncio.ensure_future(parked.claims.wait_until_due())
    for _ in range(10):
        await asyncio.sleep(0)
    assert waiting.done() is not waits
    waiting.cancel()


@pytest.mark.parametrize(
    ("count", "is_expected", "intervals"),
    [
        pytest.param(20, False, [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0], id="many"),
        pytest.param(20, True, [1.0] * 7, id="known here"),
        pytest.param(19, False, [1.0] * 7, id="few"),
    ],
)
async def test_rows_that_others_make_due_are_looked_for_often_until_none_comes(
    count: int, is_expected: bool, intervals: list[float]
) -> None:
    """Goes red when a step of a bulk retry waits a second, or each retry of one relay makes all others ask often."""
    parked, found = _parked(), [count, *[0] * 6]

    async def claim_rows(*_: Any, **__: Any) -> list[ClaimedRow]:
        return [_row(key=None, ordered=False)] * found.pop(0)

    parked.store.claim_rows, parked.store.now = claim_rows, lambda: datetime.now(UTC)
    parked.claims._swept_at = parked.claims._suspected_at = float("inf")  # pyright: ignore[reportPrivateUsage]
    if is_expected:
        parked.store.due_timer.schedule_wakeup(0.0)
    seen = list[float]()
    while found:
        await parked.claims.claim(40)
        seen.append(parked.claims._poll_seconds)  # pyright: ignore[reportPrivateUsage]
    assert seen == intervals


async def test_a_claim_behind_a_place_that_finds_no_row_is_no_end_of_a_bulk_retry() -> None:
    """Goes red when the next step of a bulk retry waits twice as long, since the rest of a step was looked for."""
    parked, found = _parked(), [20, 0, 0]
    rows = [_row(key=None, ordered=False)._replace(due=8.0)] * 20

    async def claim_rows(*_: Any, **__: Any) -> list[ClaimedRow]:
        return rows[: found.pop(0)]

    parked.store.claim_rows, parked.store.now = claim_rows, lambda: datetime.now(UTC)
    parked.claims._swept_at = parked.claims._suspected_at = float("inf")  # pyright: ignore[reportPrivateUsage]
    seen = list[float]()
    while found:
        await parked.claims.claim(20)
        seen.append(parked.claims._poll_seconds)  # pyright: ignore[reportPrivateUsage]
    assert seen == [0.05, 0.05, 0.1]


async def test_no_row_is_claimed_while_too_many_outcomes_wait_to_be_written() -> None:
    parked = _parked()
    unsettled = [_row(key=None, ordered=False)] * MOST_UNSETTLED
    parked.settler.settle_call(unsettled, [DELIVERED] * MOST_UNSETTLED, 0.1, Permit(0, probe=False))
    async with asyncio.TaskGroup() as tasks:
        claim = asyncio.ensure_future(parked.deliveries._claim_and_deliver(tasks))  # pyright: ignore[reportPrivateUsage]
        for _ in range(10):  # It waits for nothing outside: by then it has come as far as it can.
            await asyncio.sleep(0)
        assert not claim.done()
        await parked.settler.settle()
        with pytest.raises(Claiming):
            await asyncio.wait_for(claim, 5)


def test_claims_get_smaller_after_failures_down_to_one_row_without_its_payload_and_grow_again() -> None:
    size, seen = ClaimSize(), list[tuple[int, int, bool]]()
    for _ in range(6):
        size.failure(StatementFailed("canceling statement due to statement timeout", "57014"))
        seen.append((size.rows, size.payload_bytes, size.bare))
    assert seen[0] == (MOST_ROWS // 8, MOST_BYTES // 8, False)
    assert [(rows, bare) for rows, _, bare in seen[2:4]] == [(1, False), (1, True)]
    size.success()
    assert (size.rows, size.bare) == (1, False)
    for _ in range(20):
        size.success()
    assert (size.rows, size.payload_bytes) == (MOST_ROWS, MOST_BYTES)


@pytest.mark.parametrize("sqlstate", ["40P01", "40001", "55P03"])
def test_failures_that_a_smaller_claim_would_meet_too_change_nothing_but_the_pause(sqlstate: str) -> None:
    size = ClaimSize()
    pauses = list[float]()
    for _ in range(10):
        size.failure(StatementFailed("the database ended the statement", sqlstate))
        pauses.append(size.pause_seconds())
    assert (size.rows, size.payload_bytes, size.bare) == (MOST_ROWS, MOST_BYTES, False)
    assert pauses == sorted(pauses)
    assert pauses[-1] == 1.0


async def test_outcomes_that_cannot_be_written_stay_and_the_session_ends_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outbox_relay.relay.portions.FIRST_PAUSE_SECONDS", 0.0)
    asked, names = list[int](), list[str | None]()

    async def fails(_sink: str, rows: list[DeliveredRow], *, relay: str, only_tried: bool) -> set[int]:
        asked.append(len(rows))
        names.append(relay)
        assert only_tried
        raise StatementFailed("canceling statement due to statement timeout", "57014")

    parked = _parked()
    parked.store.delete_rows = fails
    parked.settler.settle_call([_row(key=None, ordered=False)] * 100, [DELIVERED] * 100, 0.1, Permit(0, probe=False))
    with pytest.raises(StatementFailed):
        await parked.settler.settle()
    assert (asked[0], asked[-1], len(asked)) == (100, 1, 8)
    assert names == [*["here"] * 5, None, "here", None], "in the end without the records of attempts"
    assert parked.deliveries.under_way == 100


async def test_rows_are_counted_by_one_settlement() -> None:
    parked, row = _parked(), _row(key=None, ordered=False)
    for counted in (1, 2):
        parked.settler.settle_call([row], [DELIVERED], 0.1, Permit(0, probe=False))
        await parked.settler.settle()
        assert parked.store.measures.delivered_count == counted
    parked.settler.settle_call([row] * 3, [DELIVERED] * 3, 0.1, Permit(0, probe=False))
    assert parked.store.measures.delivered_count == 5, "those of a batch count at once"


async def test_rows_that_are_delivered_and_not_settled_are_counted_when_the_session_ends() -> None:
    parked = _parked()
    running = asyncio.ensure_future(parked.settler.run())
    await asyncio.sleep(0)
    for row in [_row(key=None, ordered=False)] * 3:
        parked.settler.settle_call([row], [DELIVERED], 0.1, Permit(0, probe=False))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert parked.store.measures.delivered_count == 3


class Payload:
    """The reads of a row's payload, answered one after another; an error is raised."""

    def __init__(self, *answers: tuple[bytes | None, str | None] | StatementFailed | None) -> None:
        self.answers = [*answers]

    async def __call__(self, _sink: str, _event: int, _lease: UUID) -> tuple[bytes | None, str | None] | None:
        answer = self.answers.pop(0)
        if isinstance(answer, StatementFailed):
            raise answer
        return answer


NOT_CLAIMED = "payload has 9 bytes, more than the ceiling of 0"
TIMEOUT = StatementFailed("canceling statement due to statement timeout", "57014")
LOCKED = StatementFailed("canceling statement due to lock timeout", "55P03")


@pytest.mark.parametrize(
    ("answers", "payload", "fault"),
    [
        (((b"payload", None),), b"payload", None),
        ((TIMEOUT, LOCKED, (b"payload", None)), b"payload", None),
        (((None, "above the ceiling"),), b"", "above the ceiling"),
        ((None,), b"", NOT_CLAIMED),
        ((TIMEOUT,) * 5, b"", f"its payload could not be read: {TIMEOUT}"),
    ],
    ids=["found", "found in the end", "above the ceiling", "lease lost", "never"],
)
async def test_row_that_was_claimed_without_its_payload_gets_it_or_the_reason(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[Any, ...], payload: bytes, fault: str | None
) -> None:
    monkeypatch.setattr("outbox_relay.relay.portions.FIRST_PAUSE_SECONDS", 0.0)
    event = await _read(NOT_CLAIMED, *answers)
    assert (event.payload, event.fault) == (payload, fault)


@pytest.mark.parametrize("fault", [None, "deliver_at lies outside the years 1 to 9998"])
async def test_payload_of_a_row_that_has_it_or_cannot_be_delivered_anyway_is_not_read(fault: str | None) -> None:
    assert (await _read(fault)).fault == fault


async def test_row_is_not_blamed_for_a_lock_or_for_want_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox_relay.relay.portions.FIRST_PAUSE_SECONDS", 0.0)
    with pytest.raises(StatementFailed):
        await _read(NOT_CLAIMED, *[LOCKED] * 5)


async def _read(fault: str | None, *answers: Any) -> StoredEvent:
    """Return the event of a row with ``fault`` after its payload was read; every answer is asked for."""
    parked, reads = _parked(), Payload(*answers)
    parked.store.row_payload = reads
    row = ClaimedRow(an_event(payload=b"")._replace(fault=fault), True, 0, 1, uuid4())
    event = (await parked.claims.with_payload(row)).event  # pyright: ignore[reportPrivateUsage]
    assert reads.answers == []
    return event
