"""Threads in which requests wait for the database."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from outbox_relay.domain.errors import DatabaseUnavailable

T = TypeVar("T")

THREADS_MOST: Final = 16
"""Maximum number of requests that are worked on at once, whatever threads the application has that mounts the page."""
WAIT_SECONDS: Final = 5.0
"""Longest wait of a request for one of them to end."""


class RequestThreads:
    """Runs the functions of requests, each in a daemon thread, so that none of them keeps the process from ending."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(THREADS_MOST)

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Return the result of ``work``. If its request is abandoned, it continues, and keeps its place until it ends.

        Raises ``DatabaseUnavailable`` if no place becomes free within ``WAIT_SECONDS``.
        """
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._free.acquire()
        except TimeoutError:
            raise DatabaseUnavailable(f"{THREADS_MOST} requests are waiting for the database already") from None
        result = concurrent.futures.Future[T]()
        running = asyncio.wrap_future(result)
        running.add_done_callback(lambda _: self._free.release())
        try:
            threading.Thread(target=_run, args=(result, work, arguments), name="request", daemon=True).start()
        except RuntimeError:  # the machine has no thread left
            result.cancel()
            raise
        return await asyncio.shield(running)


def _run(result: concurrent.futures.Future[T], work: Callable[..., T], arguments: tuple[Any, ...]) -> None:
    result.set_running_or_notify_cancel()
    try:
        result.set_result(work(*arguments))
    except BaseException as error:
        result.set_exception(error)
