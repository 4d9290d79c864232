"""Sinks whose calls are coroutines: they run in a thread with an event loop, one for all webhooks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from outbox_relay.domain.errors import SessionReset
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Verdict
from outbox_relay.sinks.calls import Call, Completions, Sink

T = TypeVar("T")

WITHDRAW_SECONDS = 10.0
"""Longest wait for cancelled calls, and for a client that opens or closes."""
CHECK_SECONDS = 60.0
"""Longest wait for ``check`` of a client."""


class EventLoopThread:
    """A thread with an event loop. It starts with the first use, and only ``stop`` ends it."""

    def __init__(self, name: str = "posting") -> None:
        self._name = name
        self._starting = threading.Lock()
        self._started: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False

    def run(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        """Return the result of ``coroutine``. After ``seconds`` it is cancelled, and ``TimeoutError`` raised."""
        future = self.submit(coroutine)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin ``coroutine``."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call_soon(self, call: Callable[[], object]) -> None:
        """Call ``call`` in the loop, after all that was begun before."""
        self._loop.call_soon_threadsafe(call)

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        if self._started is None:
            with self._starting:
                if self._started is None:
                    loop = asyncio.new_event_loop()
                    self._thread = threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True)
                    self._thread.start()
                    self._started = loop
        return self._started

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stopping:
            with contextlib.suppress(BaseException):  # such as SystemExit, raised by a task that a client has begun
                loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(BaseException):
            loop.run_until_complete(asyncio.wait(tasks, timeout=1.0) if tasks else asyncio.sleep(0))
        loop.close()

    def stop(self) -> None:
        """Cancel what still runs and end the thread, once nothing uses it."""
        self._stopping = True
        if self._started is not None and self._thread is not None:
            self._started.call_soon_threadsafe(self._started.stop)
            self._thread.join(WITHDRAW_SECONDS)


THREAD = EventLoopThread()
"""The thread of the webhooks of this process."""


class Client(Protocol):
    """The client that delivers: see ``Sink`` for the attributes."""

    max_batch: int
    max_in_flight: int
    keeps_order: bool
    timeout_seconds: float

    async def open(self) -> None:
        """Prepare for deliveries, also after ``close``. The destination may be down."""
        ...

    async def deliver(self, batch: Sequence[StoredEvent], until: float, attempt: int = 0, /) -> Sequence[Verdict]:
        """Deliver the events of a ``Call``, and return one verdict per event. Errors of the destination do not raise.

        The client compares ``until`` with ``lease_clock()`` at last right before it sends an event.
        """
        ...

    async def reset(self) -> None:
        """Return when no event of a cancelled call can be sent any more. Called once these calls have ended."""
        ...

    async def check(self) -> str | None:
        """Return why the destination would not accept events now, in one line, or None if it would."""
        ...

    async def close(self) -> None:
        """Release every resource."""
        ...


class PostingSink(Sink):
    """A client as a completion queue.

    ``purge`` does nothing here: the client sends nothing from ``Call.until`` on. An exception of ``deliver`` is raised
    by ``completed``.
    """

    def __init__(self, client: Client, thread: EventLoopThread = THREAD) -> None:
        self.client = client
        self.max_batch, self.max_in_flight = client.max_batch, client.max_in_flight
        self.keeps_order, self.timeout_seconds = client.keeps_order, client.timeout_seconds
        self._thread = thread
        self._completions = Completions[Call]()
        self._handed_over: list[Call] = []
        self._failure: BaseException | None = None
        # Only the event loop uses what follows.
        self._tasks: dict[Call, asyncio.Task[None]] = {}
        self._ended: list[Call] = []
        self._telling = False

    def open(self) -> None:
        """See ``Sink``."""
        self._run(self.client.open())

    def submit(self, call: Call) -> None:
        """Begin a call with the next ``completed``: those that are handed over together wake the event loop once."""
        self._handed_over.append(call)

    def completed(self, seconds: float) -> Sequence[Call]:
        """Return the calls that have ended, after at most ``seconds`` if there is none. Raises what a call raised."""
        if self._handed_over:
            calls, self._handed_over = self._handed_over, []
            self._thread.call_soon(lambda: self._begin(calls))
        ended = self._completions.take(seconds)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return ended

    def wake(self) -> None:
        """See ``Sink``."""
        self._completions.wake()

    def withdraw(self) -> None:
        """Cancel all calls, and return when none of them can send any more. Raises ``SessionReset`` if they go on."""
        self._handed_over.clear()
        self._run(self._withdraw())
        self._failure = None
        self._completions.take(0.0)

    def check(self) -> str | None:
        """See ``Sink``."""
        try:
            return self._thread.run(self.client.check(), CHECK_SECONDS)
        except TimeoutError:
            return f"no answer within {CHECK_SECONDS:g} s"

    def close(self) -> None:
        """Cancel all calls, and release the resources of the client, unless the event loop is blocked."""
        with contextlib.suppress(SessionReset):
            self.withdraw()
        with contextlib.suppress(SessionReset):
            self._run(self.client.close())

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            self._thread.run(coroutine, WITHDRAW_SECONDS)
        except TimeoutError:
            raise SessionReset(f"the client of the sink did not answer within {WITHDRAW_SECONDS:g} s") from None

    # -- in the event loop --------------------------------------------------------------------------------------

    def _begin(self, calls: Sequence[Call]) -> None:
        create_task = asyncio.get_running_loop().create_task
        for call in calls:
            self._tasks[call] = create_task(self._deliver(call))

    async def _deliver(self, call: Call) -> None:
        try:
            verdicts = await self.client.deliver(call.events, call.until, call.attempt)
        except asyncio.CancelledError:
            self._failure = SessionReset("a call was cancelled")
        except BaseException as error:
            self._failure = error
        else:
            delivered = len(verdicts) == len(call.events) and all(verdict is DELIVERED for verdict in verdicts)
            call.end(None if delivered else verdicts)
            self._ended.append(call)
        self._tasks.pop(call)
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        """Wake the thread of the sink once for all calls that have ended since it was woken last."""
        self._telling = False
        self._completions.put(*self._ended)
        self._ended.clear()

    async def _withdraw(self) -> None:
        if self._tasks:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.wait(self._tasks.values())
        self._ended.clear()
        await self.client.reset()
