"""Clients with coroutines as completion queues, all of them in one thread."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Sequence

import pytest

from outbox_relay.domain.errors import SessionReset
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Delivered, Verdict
from outbox_relay.sinks import posting
from outbox_relay.sinks.calls import Call
from outbox_relay.sinks.contract.handing import an_event, soon
from outbox_relay.sinks.posting import EventLoopThread, PostingSink

SECONDS = 5.0
Behave = Callable[[StoredEvent], Awaitable[Verdict]]


async def deliver(_event: StoredEvent) -> Verdict:
    return DELIVERED


async def hang(_event: StoredEvent) -> Verdict:
    await asyncio.Event().wait()
    return DELIVERED


class OneClient:
    """Does with each event what it is told, and keeps those that it was given."""

    max_batch, max_in_flight, keeps_order, timeout_seconds = 1, 8, False, 15.0

    def __init__(self, behave: Behave = deliver) -> None:
        self.behave = behave
        self.given: list[StoredEvent] = []
        self.resets = 0

    async def open(self) -> None:
        pass

    async def deliver(self, batch: Sequence[StoredEvent], _until: float, _attempt: int = 0, /) -> Sequence[Verdict]:
        self.given.extend(batch)
        return [await self.behave(event) for event in batch]

    async def reset(self) -> None:
        self.resets += 1

    async def check(self) -> str | None:
        return None

    async def close(self) -> None:
        pass


@pytest.fixture
def thread() -> Generator[EventLoopThread]:
    found = EventLoopThread()
    yield found
    found.stop()


def submit(sink: PostingSink, count: int = 1) -> list[Call]:
    calls = [Call([an_event(None)], soon()) for _ in range(count)]
    for call in calls:
        sink.submit(call)
    return calls


def completed(sink: PostingSink, count: int) -> list[Call]:
    """Return that many calls as they end."""
    ended: list[Call] = []
    end = time.monotonic() + SECONDS
    while len(ended) < count:
        ended.extend(sink.completed(end - time.monotonic()))
        assert time.monotonic() < end
    return ended


def test_calls_that_end_together_come_back_together(thread: EventLoopThread) -> None:
    sink = PostingSink(OneClient(), thread)
    calls = submit(sink, 8)
    assert list(sink.completed(SECONDS)) == calls
    assert all(call.verdicts is None for call in calls)


def test_verdicts_with_details_are_kept(thread: EventLoopThread) -> None:
    async def details(_event: StoredEvent) -> Verdict:
        return Delivered(202, 0.5)

    sink = PostingSink(OneClient(details), thread)
    submit(sink)
    [call] = completed(sink, 1)
    assert call.verdicts is not None
    [verdict] = call.verdicts
    assert isinstance(verdict, Delivered)
    assert verdict.status == 202


def test_a_wake_ends_the_wait(thread: EventLoopThread) -> None:
    sink = PostingSink(OneClient(hang), thread)
    submit(sink)
    threading.Timer(0.05, sink.wake).start()
    began = time.monotonic()
    assert sink.completed(SECONDS) == []
    assert time.monotonic() - began < SECONDS
    sink.withdraw()


@pytest.mark.parametrize(
    ("raised", "seen"), [(ValueError, ValueError), (SystemExit, SystemExit), (asyncio.CancelledError, SessionReset)]
)
def test_what_a_call_raises_is_raised_in_the_thread_of_the_sink_alone(
    thread: EventLoopThread, raised: type[BaseException], seen: type[BaseException]
) -> None:
    async def fail(_event: StoredEvent) -> Verdict:
        raise raised

    sink, other = PostingSink(OneClient(fail), thread), PostingSink(OneClient(), thread)
    submit(sink)
    with pytest.raises(seen):
        sink.completed(SECONDS)
    submit(other)
    assert len(completed(other, 1)) == 1


def test_after_a_withdrawal_nothing_of_earlier_calls_is_left(thread: EventLoopThread) -> None:
    """Neither of those that had not begun, nor of those that wait, have ended, or fail as they are cancelled."""

    async def fail_late(event: StoredEvent) -> Verdict:
        if event.payload:
            return DELIVERED
        try:
            return await hang(event)
        finally:
            raise ValueError

    client = OneClient(fail_late)
    sink = PostingSink(client, thread)
    for payload in (b"", b"x"):
        sink.submit(Call([an_event(None, payload)], soon()))
    sink.completed(0.1)
    submit(sink)
    sink.withdraw()
    assert client.resets == 1
    assert sink.completed(0.1) == []
    assert len(client.given) == 2
    calls = submit(sink)
    client.behave = deliver
    assert completed(sink, 1) == calls


def test_a_withdrawal_ends_although_the_event_loop_is_blocked(
    thread: EventLoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posting, "WITHDRAW_SECONDS", 0.1)
    client = OneClient(hang)
    sink = PostingSink(client, thread)
    submit(sink)
    sink.completed(0.05)
    blocked = threading.Event()
    thread.call_soon(lambda: blocked.wait(SECONDS))
    with pytest.raises(SessionReset):
        sink.withdraw()
    blocked.set()
    sink.withdraw()
    client.behave = deliver
    calls = submit(sink)
    assert completed(sink, 1) == calls


def test_the_thread_goes_on_when_something_ends_its_loop(thread: EventLoopThread) -> None:
    thread.call_soon(sys.exit)
    sink = PostingSink(OneClient(), thread)
    submit(sink)
    assert len(completed(sink, 1)) == 1


def test_a_stopped_thread_has_cancelled_what_ran() -> None:
    thread = EventLoopThread()
    ended = threading.Event()

    async def run() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    thread.submit(run())
    thread.run(asyncio.sleep(0), SECONDS)
    thread.stop()
    assert ended.is_set()
