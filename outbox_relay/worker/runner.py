"""Calls of the handler: many at once in the event loop, or in threads, each with a time limit."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from json import loads
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from outbox_relay.delivery import Delivery
from outbox_relay.worker.answers import DONE, NO_THREAD, HandlerAnswer, TooLate, answer_to, check_result, described
from outbox_relay.worker.channel import Channel
from outbox_relay.worker.clock import clock
from outbox_relay.worker.frames import BadFrame, Frame, item
from outbox_relay.worker.handler import Handler
from outbox_relay.worker.threads import Threads

if TYPE_CHECKING:
    from outbox_relay.worker.transactions import Transactions

LATE_SECONDS = 0.1
"""Delay of a timer after which the whole process is assumed to have been paused."""
GRACE_SECONDS = 1.0
"""Time after its cancellation within which an asynchronous handler must end."""
EXTENSION_SECONDS = 0.05
"""Least time between two frames with extended calls."""


@dataclass(slots=True, eq=False)
class HandlerCall:
    """A call under way. ``until``, before which the handler is called, and ``ends_at`` are values of ``clock()``.

    ``begun`` is set when its task runs, and ``entered`` when the handler is called. ``reported``: it did not end.
    """

    number: int
    delivery: Delivery
    until: float
    ends_at: float
    task: asyncio.Task[None] | None = None
    begun: bool = False
    entered: bool = False
    expired: bool = False
    reported: bool = False
    waits_until: float = 0.0
    """The end of its wait for another call to end."""


class Bounds(NamedTuple):
    """The number of ``threads`` of plain calls, or of asynchronous calls at once, and the seconds that others wait."""

    threads: int
    share: int
    patience: float


class Runner:
    """Calls the handler for the frames that ``receive`` gets, and answers each.

    One timer serves the limits of all calls. It is set to the first end, and most calls have been answered by then.
    """

    def __init__(
        self, handler: Handler, transactions: Transactions | None, bounds: Bounds, replay: int | None = None
    ) -> None:
        self._handler = handler
        self._bounds = bounds
        self._running = 0
        self._waiting: deque[HandlerCall] = deque()
        self._waiting_timer: asyncio.TimerHandle | None = None
        self._replay = replay
        self._transactions = transactions
        self._loop = asyncio.get_running_loop()
        self._threads = None if handler.is_async else Threads(bounds.threads)
        self._calls: dict[int, HandlerCall] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._lock = threading.Lock()
        self._answered: deque[tuple[HandlerCall, HandlerAnswer]] = deque()
        self._extended: dict[int, HandlerCall] = {}
        self._channel: Channel | None = None

    def answer_to(self, channel: Channel) -> None:
        """Send answers to ``channel``."""
        self._channel = channel

    def receive(self, frame: Frame) -> None:
        """Begin or cancel calls. Raises ``BadFrame``."""
        match frame.kind:
            case "deliver":
                self._deliver(frame)
            case "cancel":
                for number in frame.items:
                    if (call := self._calls.get(number)) is not None:
                        self._cancel(call)
            case "check":
                self._loop.create_task(self._check())
            case _:
                raise BadFrame("a frame of an unknown kind")

    # -- calls ------------------------------------------------------------------------------------------------

    def _deliver(self, frame: Frame) -> None:
        """Begin the calls of a frame."""
        at, now, utc = 0, clock(), datetime.now(UTC)
        for number, until, ends_at, size, *values in frame.items:
            body, at = frame.body[at : at + size], at + size
            deadline = utc + timedelta(seconds=ends_at - now)
            call = HandlerCall(number, _delivery(values, body, deadline, self._replay), until, ends_at)
            call.delivery._extend = partial(self._extend, call)  # pyright: ignore[reportPrivateUsage]
            self._calls[number] = call
            if ends_at < self._timer_at:
                self._set_timer(ends_at)
            self._begin(call)

    def _begin(self, call: HandlerCall) -> None:
        if self._threads is None:
            if self._running >= self._bounds.share:
                self._wait(call)
            else:
                self._running += 1
                call.task = self._loop.create_task(self._run(call))
            return
        try:
            self._threads.run(partial(self._run_plain, call))
        except RuntimeError:
            self._answer(call, HandlerAnswer("unsent", NO_THREAD))

    def _wait(self, call: HandlerCall) -> None:
        """Let a call wait for another one to end."""
        call.waits_until = clock() + self._bounds.patience
        self._waiting.append(call)
        if self._waiting_timer is None:
            self._waiting_timer = self._loop.call_later(self._bounds.patience, self._end_waits)

    def _end_waits(self) -> None:
        """Answer the calls that have waited for too long, and look again when the next one has."""
        now, self._waiting_timer = clock(), None
        while self._waiting and self._waiting[0].waits_until <= now:
            self._answer_unsent(self._waiting[0])
        if self._waiting:
            self._waiting_timer = self._loop.call_later(self._waiting[0].waits_until - now, self._end_waits)

    def _answer_unsent(self, call: HandlerCall) -> None:
        """Answer a call that waits. Its handler is not called."""
        self._waiting.remove(call)
        self._answer(call, HandlerAnswer("unsent"))

    def _follow(self) -> None:
        """Begin the call that has waited longest in place of one that has ended."""
        self._running -= 1
        if self._waiting:
            self._begin(self._waiting.popleft())

    async def _run(self, call: HandlerCall) -> None:
        """Call an asynchronous handler and answer. No exception of the handler leaves this."""
        call.begun, answer = True, DONE
        try:
            if call.expired:
                raise asyncio.CancelledError  # noqa: TRY301 - as if it had begun before
            if self._transactions is not None:
                await self._transactions.arun(call.delivery, partial(self._enter, call), call.ends_at)
            else:
                check_result(await self._enter(call, call.delivery))
        except BaseException as error:  # SystemExit too: it would end the loop, and with it every other call
            entered = call.entered or self._transactions is None
            answer = answer_to(error, expired=call.expired, entered=entered)
        self._answer(call, answer)
        self._follow()

    def _run_plain(self, call: HandlerCall) -> None:
        """Call a plain handler in a thread, and have the loop answer, once for all that ended meanwhile."""
        answer = DONE
        try:
            if self._transactions is not None:
                self._transactions.run(call.delivery, partial(self._enter, call), call.ends_at)
            else:
                check_result(self._enter(call, call.delivery))
        except BaseException as error:
            answer = answer_to(error, expired=False, entered=True)
        with self._lock:
            self._answered.append((call, answer))
            is_first = len(self._answered) == 1
        if is_first:
            self._loop.call_soon_threadsafe(self._answer_ended)

    def _enter(self, call: HandlerCall, delivery: Delivery) -> Any:
        """Call the handler, unless it is too late: a handler before it may have blocked the loop."""
        if clock() >= call.until:
            raise TooLate
        call.entered = True
        return self._handler.call(delivery)

    def _answer_ended(self) -> None:
        with self._lock:
            ended, self._answered = self._answered, deque()
        for call, answer in ended:
            self._answer(call, answer)

    def _answer(self, call: HandlerCall, answer: HandlerAnswer) -> None:
        del self._calls[call.number]
        if answer is DONE:
            self._send("done", b"%d" % call.number)
        else:
            self._send("answer", item(call.number, *answer))

    # -- time limits ------------------------------------------------------------------------------------------

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(max(0.0, at - clock()), self._look) if at != float("inf") else None

    def _look(self) -> None:
        """End the calls whose time is over. After a pause of the process, handlers may end by themselves first."""
        if clock() - self._timer_at > LATE_SECONDS:
            self._loop.call_soon(self._end_expired)
        else:
            self._end_expired()

    def _end_expired(self) -> None:
        """End the calls whose time is over, and look again when that of the next one is."""
        now = clock()
        for call in list(self._calls.values()):
            if call.ends_at <= now:
                self._expire(call, now)
        self._set_timer(min((call.ends_at for call in self._calls.values() if not call.reported), default=float("inf")))

    def _expire(self, call: HandlerCall, now: float) -> None:
        """Cancel a call whose time is over. Report one that cannot be cancelled, or was and has not ended."""
        if self._threads is None and not call.expired:
            self._cancel(call)
            call.ends_at = now + GRACE_SECONDS
        elif not call.reported:
            with self._lock:
                call.expired = call.reported = True
            self._send("stuck", item(call.number, call.entered))
            for waiting in list(self._waiting):  # this process is killed soon
                self._answer_unsent(waiting)

    def _cancel(self, call: HandlerCall) -> None:
        """Cancel an asynchronous call. A plain one cannot be: it ends by itself, or with its process."""
        with self._lock:
            call.expired = True
        if call in self._waiting:
            self._answer_unsent(call)
        elif call.task is not None:
            call.ends_at = min(call.ends_at, clock() + GRACE_SECONDS)
            if call.ends_at < self._timer_at:
                self._set_timer(call.ends_at)
            if call.begun:  # a task that is cancelled before would never answer
                call.task.cancel()

    def _extend(self, call: HandlerCall, seconds: float) -> datetime | None:
        """Move the end of a call, and return the new one; None if it is later already, or over. For any thread."""
        with self._lock:
            ends_at = clock() + seconds
            if call.expired or ends_at <= call.ends_at:
                return None
            call.ends_at = ends_at
            is_first = not self._extended
            self._extended[call.number] = call
        if is_first:
            self._loop.call_soon_threadsafe(self._loop.call_later, EXTENSION_SECONDS, self._send_extended)
        return datetime.now(UTC) + timedelta(seconds=seconds)

    def _send_extended(self) -> None:
        if self._channel is not None and not self._channel.writable:  # the relay does not read
            self._loop.call_later(EXTENSION_SECONDS, self._send_extended)
            return
        with self._lock:
            extended, self._extended = self._extended, {}
        for call in extended.values():
            if call.number in self._calls:
                self._send("extend", item(call.number, call.ends_at))

    # -- the rest ---------------------------------------------------------------------------------------------

    async def _check(self) -> None:
        found = None
        if self._transactions is not None:
            try:
                found = await asyncio.to_thread(self._transactions.check)
            except Exception as error:
                found = described(error)
        self._send("checked", item(found))

    def _send(self, kind: str, sent: bytes) -> None:
        if self._channel is not None:
            self._channel.send(kind, sent)


def _delivery(values: list[Any], body: bytes, deadline: datetime, replay: int | None) -> Delivery:
    uid, kind, key, content_type, headers, created_at, deliver_at, attempt, tenant = values
    own: dict[str, str] = loads(headers) if headers else {}
    if replay is not None:
        own["outbox-replay"] = str(replay)
    due = None if deliver_at is None else datetime.fromisoformat(deliver_at)
    created = datetime.fromisoformat(created_at)
    return Delivery(UUID(uid), kind, key, body, content_type, own, attempt, created, due, deadline, tenant)
