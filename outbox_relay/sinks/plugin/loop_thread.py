"""An event loop in a thread of its own, for code that may block it, raise anything, or never end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

from outbox_relay.raised import raised

STOP_SECONDS = 2.0
"""Longest wait for the end of the thread."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception that ended a call, by class and place. Its text may hold anything, and is not kept."""

    text: str


@dataclass(frozen=True, slots=True)
class Returned:
    """The result of a call."""

    value: object


Ending = Raised | Returned


class PluginCall:
    """A call of a function in the loop of a ``LoopThread``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[[], Awaitable[object]]) -> None:
        self.ended = Future[Ending]()
        self.began = time.monotonic()
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._cancelled = False
        self._schedule(lambda: self._begin(function))

    def cancel(self) -> None:
        """Cancel the call, which may go on nevertheless. ``ended`` tells."""
        self._schedule(self._cancel)

    @property
    def runs_now(self) -> bool:
        """True if the thread executes the call at this moment."""
        return self._task is not None and asyncio.current_task(self._loop) is self._task

    async def wait(self, seconds: float) -> Ending | None:
        """Return the ending of the call, or None if it has none within ``seconds``."""
        waiting = asyncio.wrap_future(self._mirror())
        await asyncio.wait([waiting], timeout=max(0.0, seconds))
        if waiting.done():
            return waiting.result()
        waiting.cancel()
        return None

    def _mirror(self) -> Future[Ending]:
        """Return a future that ends with the call. It can be given up without an effect on the call."""
        mirror = Future[Ending]()

        def end(ended: Future[Ending]) -> None:
            if mirror.set_running_or_notify_cancel():
                mirror.set_result(ended.result())

        self.ended.add_done_callback(end)
        return mirror

    def _schedule(self, function: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed
            self._end(Raised("the plug-in is closed"))

    def _begin(self, function: Callable[[], Awaitable[object]]) -> None:
        if self._cancelled:
            self._end(Raised("cancelled"))
        else:
            self._task = self._loop.create_task(self._run(function))
            self._task.add_done_callback(lambda _: self._end(Raised("cancelled")))

    async def _run(self, function: Callable[[], Awaitable[object]]) -> None:
        try:
            ending: Ending = Returned(await function())
        except BaseException as error:
            ending = Raised(raised(error))
        self._end(ending)

    def _cancel(self) -> None:
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()

    def _end(self, ending: Ending) -> None:
        with contextlib.suppress(InvalidStateError):  # the ending that is recorded first counts
            self.ended.set_result(ending)


class LoopThread:
    """Runs calls in an event loop of its own. What blocks this loop delays no other."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # Its own words may hold a payload; those who want them log them in the plug-in.
        self._loop.set_exception_handler(lambda _loop, _context: None)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], Awaitable[object]]) -> PluginCall:
        """Begin a call of ``function``, in the thread, and return it."""
        return PluginCall(self._loop, function)

    async def stop(self) -> bool:
        """Cancel what still runs, and end the thread. Return False if it does not end in time."""
        self._stopping = True
        ended = self.call(self._cancel_all)
        await ended.wait(STOP_SECONDS)
        try:
            self._loop.call_soon_threadsafe(self._loop.stop)
        except RuntimeError:  # the loop is closed already
            return True
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        return not self._thread.is_alive()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=STOP_SECONDS / 2)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._stopping:
            try:
                self._loop.run_forever()
            except BaseException:  # noqa: S112 - a task of the plug-in called sys.exit
                continue
        with contextlib.suppress(BaseException):
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()
