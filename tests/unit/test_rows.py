"""Rows of requests that outlast their event, when the session that made them is ending."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from outbox_relay.domain.errors import SessionReset, StatementFailed
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.in_flight import Chunk
from outbox_relay.domain.outcomes import DELIVERED
from outbox_relay.domain.window import BEGINNING, Position
from outbox_relay.postgres.rows import ClaimedRow
from outbox_relay.relay.dispatch import RequestDelivering
from outbox_relay.relay.gate import Pass
from outbox_relay.relay.parked import MOST_BYTES, MOST_ROWS, MOST_UNSETTLED, Portion, Rows
from tests.contract.harness import an_event


def park(*_: object, **__: object) -> int:
    """The number of the first settlement."""
    return 1


async def test_a_request_that_is_parked_while_the_session_ends_is_cancelled_and_ends_nothing_else() -> None:
    """Goes red when the refusal of a group that is shutting down comes through: it would end the whole relay."""
    log: Any = None
    desk: Any = SimpleNamespace(
        spec=SimpleNamespace(name="s"), sink=SimpleNamespace(timeout_seconds=15.0), park=park, keyed=bool
    )
    rows = Rows(desk, desk, uuid4(), log)
    desk.overdue = rows.overdue
    async with asyncio.TaskGroup() as rows._tasks:  # pyright: ignore[reportPrivateUsage] - a session that has ended
        pass
    position = Position(BEGINNING)
    request: Any = asyncio.ensure_future(asyncio.sleep(60, DELIVERED))
    with pytest.raises(SessionReset, match="sink s: the session is ending"):
        RequestDelivering(desk)._park_under_way(  # pyright: ignore[reportPrivateUsage]
            Chunk([an_event()], position, position), 0, request, Pass(0, probe=False), 0.0
        )
    await asyncio.wait({request})
    assert request.cancelled()
    assert rows.under_way == 0


class Claiming(Exception):
    """Rows are about to be claimed."""


async def _claiming() -> None:
    raise Claiming


async def _done(_sink: str, rows: list[tuple[int, UUID]]) -> set[int]:
    return {event for event, _ in rows}


def _rows() -> Rows:
    """The rows of a sink that delivers all that it is given; each row was ours when it is settled."""
    parts: Any = SimpleNamespace(
        spec=SimpleNamespace(name="s", hold=False),
        gate=SimpleNamespace(delivered=bool),
        slots=SimpleNamespace(more=int, acquire=_claiming),
        delete_rows=_done,
    )
    return Rows(parts, parts, uuid4(), parts)


def _row(*, key: str | None, ordered: bool) -> ClaimedRow:
    return ClaimedRow(an_event()._replace(key=key), ordered, 0, 1, uuid4())


async def test_only_rows_behind_those_that_have_an_order_are_asked_for() -> None:
    """Scheduled events have a key and no place in its order: nothing waits behind them, and nothing is looked up."""
    rows = _rows()
    settled = [_row(key="scheduled", ordered=False), _row(key=None, ordered=False), _row(key="first", ordered=True)]
    rows._sort_out(settled, [DELIVERED] * 3, Pass(0, probe=False))  # pyright: ignore[reportPrivateUsage]
    assert rows.under_way == 3
    await rows._settle_now()  # pyright: ignore[reportPrivateUsage]
    assert rows.under_way == 0
    assert rows._heads == {"first"}  # pyright: ignore[reportPrivateUsage]


async def test_no_row_is_claimed_while_too_many_outcomes_wait_to_be_written() -> None:
    rows = _rows()
    unsettled = [_row(key=None, ordered=False)] * MOST_UNSETTLED
    rows._sort_out(unsettled, [DELIVERED] * MOST_UNSETTLED, Pass(0, probe=False))  # pyright: ignore[reportPrivateUsage]
    async with asyncio.TaskGroup() as tasks:
        claim = asyncio.ensure_future(rows._claim_and_deliver(tasks))  # pyright: ignore[reportPrivateUsage]
        for _ in range(10):  # It waits for nothing outside: by then it has come as far as it can.
            await asyncio.sleep(0)
        assert not claim.done()
        await rows._settle_now()  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(Claiming):
            await asyncio.wait_for(claim, 5)


def test_claims_get_smaller_after_failures_down_to_one_row_without_its_payload_and_grow_again() -> None:
    portion, seen = Portion(), list[tuple[int, int, bool]]()
    for _ in range(6):
        portion.failure(StatementFailed("canceling statement due to statement timeout", "57014"))
        seen.append((portion.rows, portion.payload_bytes, portion.bare))
    assert seen[0] == (MOST_ROWS // 8, MOST_BYTES // 8, False)
    assert [(rows, bare) for rows, _, bare in seen[2:4]] == [(1, False), (1, True)]
    portion.success()
    assert (portion.rows, portion.bare) == (1, False)
    for _ in range(20):
        portion.success()
    assert (portion.rows, portion.payload_bytes) == (MOST_ROWS, MOST_BYTES)


@pytest.mark.parametrize("sqlstate", ["40P01", "40001", "55P03"])
def test_failures_that_a_smaller_claim_would_meet_too_change_nothing_but_the_pause(sqlstate: str) -> None:
    portion = Portion()
    pauses = list[float]()
    for _ in range(10):
        portion.failure(StatementFailed("the database ended the statement", sqlstate))
        pauses.append(portion.pause_seconds())
    assert (portion.rows, portion.payload_bytes, portion.bare) == (MOST_ROWS, MOST_BYTES, False)
    assert pauses == sorted(pauses)
    assert pauses[-1] == 1.0


async def test_outcomes_that_cannot_be_written_stay_and_the_session_ends_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outbox_relay.relay.portions.FIRST_PAUSE_SECONDS", 0.0)
    asked: list[int] = []

    async def fails(_sink: str, rows: list[tuple[int, UUID]]) -> set[int]:
        asked.append(len(rows))
        raise StatementFailed("canceling statement due to statement timeout", "57014")

    rows = _rows()
    rows._store.delete_rows = fails  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]
    rows._sort_out([_row(key=None, ordered=False)] * 100, [DELIVERED] * 100, Pass(0, probe=False))  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(StatementFailed):
        await rows._settle_now()  # pyright: ignore[reportPrivateUsage]
    assert (asked[0], asked[-1], len(asked)) == (100, 1, 6)
    assert rows.under_way == 100


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
    """The event of a row with ``fault`` once its payload was read; every answer is asked for."""
    rows, reads = _rows(), Payload(*answers)
    rows._store.row_payload = reads  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]
    row = ClaimedRow(an_event(payload=b"")._replace(fault=fault), True, 0, 1, uuid4())
    event = (await rows._whole(row)).event  # pyright: ignore[reportPrivateUsage]
    assert reads.answers == []
    return event
