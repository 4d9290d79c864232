"""Calls of the handler: many at once in the event loop, or in threads, each with a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from json import loads
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox_relay.delivery import Dead, Delivery, Retry
from outbox_relay.worker.channel import Channel
from outbox_relay.worker.frames import BadFrame, Frame, encode
from outbox_relay.worker.handler import MOST_CHARS, Handler, described

if TYPE_CHECKING:
    from outbox_relay.worker.transactions import Transactions

GRACE_SECONDS = 1.0
"""Time after its cancellation within which an asynchronous handler must end."""


@dataclass(slots=True, eq=False)
class HandlerCall:
    """A call under way. ``ends_at`` is a value of the loop's clock."""

    number: int
    delivery: Delivery
    ends_at: float
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    expired: bool = False


class Runner:
    """Calls the handler for the frames that ``receive`` gets, and answers each. ``threads`` bounds plain calls."""

    def __init__(self, handler: Handler, transactions: Transactions | None, threads: int) -> None:
        self._handler = handler
        self._transactions = transactions
        self._loop = asyncio.get_running_loop()
        self._threads = None if handler.is_async else ThreadPoolExecutor(threads, thread_name_prefix="handler")
        self._calls: dict[int, HandlerCall] = {}
        self._call: Callable[[Delivery], Any] = self._call_async if handler.is_async else self._call_in_thread
        self._channel: Channel | None = None

    def answer_to(self, channel: Channel) -> None:
        """Send answers to ``channel``."""
        self._channel = channel

    def receive(self, frame: Frame) -> None:
        """Begin or cancel a call. Raises ``BadFrame``."""
        match frame:
            case ("deliver", [int(number), *values], body):
                self._begin(number, values, body)
            case ("cancel", [int(number)], _):
                if (call := self._calls.get(number)) is not None:
                    self._expire(call)
            case ("check", [], _):
                self._loop.create_task(self._check())
            case _:
                raise BadFrame("a frame of an unknown kind")

    def _begin(self, number: int, values: list[Any], body: bytes) -> None:
        delivery, seconds = self._delivery(number, values, body)
        call = self._calls[number] = HandlerCall(number, delivery, self._loop.time() + seconds)
        call.timer = self._loop.call_later(seconds, self._expire, call)
        call.task = self._loop.create_task(self._run(call))

    def _delivery(self, number: int, values: list[Any], body: bytes) -> tuple[Delivery, float]:
        uid, kind, key, content_type, headers, created_at, deliver_at, attempt, seconds, replay = values
        own: dict[str, str] = loads(headers) if headers else {}
        if replay is not None:
            own["outbox-replay"] = str(replay)
        due = None if deliver_at is None else datetime.fromisoformat(deliver_at)
        deadline = datetime.now(UTC) + timedelta(seconds=seconds)
        created = datetime.fromisoformat(created_at)
        delivery = Delivery(UUID(uid), kind, key, body, content_type, own, attempt, created, due, deadline)
        delivery._extend = lambda more: self._extend(number, more)  # pyright: ignore[reportPrivateUsage]
        return delivery, seconds

    # -- calls ------------------------------------------------------------------------------------------------

    async def _run(self, call: HandlerCall) -> None:
        """Call the handler and answer. No exception of the handler leaves this."""
        answer: tuple[str, str, float | None] = ("done", "", None)
        try:
            await self._call(call.delivery)
        except BaseException as error:  # SystemExit too: it would end the loop, and with it every other call
            answer = _answer(error, expired=call.expired)
        if call.timer is not None:
            call.timer.cancel()
        del self._calls[call.number]
        self._send(encode("answer", call.number, *answer))

    async def _call_async(self, delivery: Delivery) -> None:
        if self._transactions is None:
            await self._handler.call(delivery)
        else:
            await self._transactions.arun(delivery, self._handler.call)

    async def _call_in_thread(self, delivery: Delivery) -> None:
        # The future is shielded: a thread cannot be cancelled, and its call ends only when it returns.
        await asyncio.shield(self._loop.run_in_executor(self._threads, self._call_plain, delivery))

    def _call_plain(self, delivery: Delivery) -> None:
        if self._transactions is not None:
            self._transactions.run(delivery, self._handler.call)
        elif hasattr(self._handler.call(delivery), "__await__"):
            raise TypeError("the handler returned an awaitable: make it an async function")

    # -- time limits ------------------------------------------------------------------------------------------

    def _expire(self, call: HandlerCall) -> None:
        """End a call whose time is over: cancel it, or report that its thread is still running."""
        left = call.ends_at - self._loop.time()
        call.expired = True
        if call.timer is not None:
            call.timer.cancel()
        if not self._handler.is_async:
            if left <= 0:
                self._send(encode("stuck", call.number))
        elif call.task is not None:
            call.task.cancel()
            call.timer = self._loop.call_later(GRACE_SECONDS, self._report_stuck, call.number)

    def _report_stuck(self, number: int) -> None:
        if number in self._calls:
            self._send(encode("stuck", number))

    def _extend(self, number: int, seconds: float) -> datetime:
        """Move the end of a call, and return the new one. Called from any thread."""
        self._loop.call_soon_threadsafe(self._extend_now, number, seconds)
        return datetime.now(UTC) + timedelta(seconds=seconds)

    def _extend_now(self, number: int, seconds: float) -> None:
        call = self._calls.get(number)
        if call is None or call.expired or call.timer is None or self._loop.time() + seconds <= call.ends_at:
            return
        call.timer.cancel()
        call.ends_at = self._loop.time() + seconds
        call.timer = self._loop.call_later(seconds, self._expire, call)
        self._send(encode("extend", number, seconds))

    async def _check(self) -> None:
        check = self._transactions.check if self._transactions else lambda: None
        self._send(encode("checked", await asyncio.to_thread(check)))

    def _send(self, frame: bytes) -> None:
        if self._channel is not None:
            self._channel.send(frame)


def _answer(error: BaseException, *, expired: bool) -> tuple[str, str, float | None]:
    """Return the outcome of a call that raised ``error``, its reason, and the delay that was asked for."""
    match error:
        case Retry():
            return "retry", _cut(error.reason), error.after
        case Dead():
            return "dead", _cut(error.reason), None
        case asyncio.CancelledError() if expired:
            return "timeout", "", None
        case _ if type(error).__name__ == "DatabaseDown":
            return "unavailable", _cut(str(error)), None
        case _:
            return "failed", described(error), None


def _cut(text: str) -> str:
    text = text.encode(errors="replace").decode()
    return text if len(text) <= MOST_CHARS else text[: MOST_CHARS - 1] + "…"
