"""The worker processes of a sink: each is started again when it has ended, after growing delays."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from operator import itemgetter

from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.sinks.python.output import Report
from outbox_relay.sinks.python.worker_process import WorkerProcess, WorkerTask

FIRST_DELAY_SECONDS, MOST_DELAY_SECONDS = 0.1, 30.0
"""Delay before a worker that ended is started again, doubled until one answers a call, and its limit."""
WAIT_SECONDS = 5.0
"""Maximum wait of a call for a worker."""
STARTING = "every worker is being started"
BUSY = "every worker is busy"

OnEnd = Callable[[str, float], None]
"""Receives why a worker ended, and the delay until it is started again."""


class WorkerPool:
    """``workers`` processes that make ``most`` calls at once, each its share, and with a plain handler one per thread.

    A process that ``prefetches`` gets as many calls more, which wait there. Without them, the place of a call that ends
    would be empty until the relay has heard of it and sent the next one. With fewer, the relay and the process would
    wait for each other if all calls end together.

    Calls that find no worker wait in a queue. One of them is woken for each call that ends.
    """

    def __init__(
        self, task: WorkerTask, workers: int, most: int, report: Report, on_end: OnEnd, *, prefetches: bool = False
    ) -> None:
        self._task = task
        self._workers = workers
        self._shares = [most // workers + (number < most % workers) for number in range(workers)]
        self._prefetches = prefetches
        self._report = report
        self._on_end = on_end
        self._processes: dict[int, WorkerProcess] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._problems: dict[int, str] = {}
        self._waiting: deque[asyncio.Future[str | None]] = deque()
        self._closing = asyncio.Lock()

    @property
    def problem(self) -> str | None:
        """The reason why no worker can call the handler, or None."""
        return next(iter(self._problems.values())) if len(self._problems) == self._workers else None

    @property
    def prefetch(self) -> int:
        """The number of calls that may wait in the workers: none while one of them cannot begin a call."""
        ahead = 0
        if not self._prefetches or len(self._processes) < self._workers:
            return ahead
        for process in self._processes.values():  # a plain loop, since this is asked for each call
            if not (process.is_async and process.accepts):
                return 0
            ahead += self._ahead(process)
        return ahead

    @property
    def processes(self) -> list[WorkerProcess]:
        """The processes that have been started and have not ended."""
        return list(self._processes.values())

    async def open(self) -> None:
        """Start the workers, and wait for none of them."""
        async with self._closing:
            if not self._keepers:
                self._keepers = [asyncio.create_task(self._keep(number)) for number in range(self._workers)]

    async def close(self) -> None:
        """Kill the workers, and return when they are gone."""
        async with self._closing:
            for keeper in self._keepers:
                keeper.cancel()
            if self._keepers:
                await asyncio.wait(self._keepers)
            self._keepers = []
            self._problems.clear()
            self._dismiss("the sink was closed")

    async def reset(self, seconds: float) -> None:
        """End the calls under way within ``seconds``, if need be with their processes."""
        self._dismiss("the sink was reset")
        await asyncio.gather(*(process.cancel_all(seconds) for process in self.processes if process.calls))

    async def started(self, seconds: float) -> WorkerProcess | str:
        """Return a worker that accepts calls, or why there is none within ``seconds``."""
        return await self.take(lease_clock() + seconds, seconds)

    def free(self) -> WorkerProcess | None:
        """Return the worker that can begin a call and has the fewest, or None. Calls that wait come first."""
        return None if self._waiting else self._free()

    async def take(self, until: float, seconds: float | None = None) -> WorkerProcess | str:
        """Wait for a worker that can begin a call now, until ``until``, or return the reason why there is none."""
        loop, is_first = asyncio.get_running_loop(), True
        ends_at = loop.time() + min(seconds or WAIT_SECONDS, until - lease_clock())
        while True:
            if (problem := self.problem) is not None:
                self.wake(1)
                return problem
            if not (is_first and self._waiting) and (process := self._free()) is not None:
                return process
            waiting = loop.create_future()
            (self._waiting.append if is_first else self._waiting.appendleft)(waiting)
            if (reason := await self._turn(waiting, ends_at)) is not None:
                return reason
            is_first = False

    async def _turn(self, waiting: asyncio.Future[str | None], ends_at: float) -> str | None:
        """Wait until ``waiting`` is woken. Return a reason if it was sent away, or if it is too late."""
        timer = asyncio.get_running_loop().call_at(ends_at, self._send_away, waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.result() is None:
                self.wake(1)
            raise
        finally:
            timer.cancel()
            with suppress(ValueError):
                if not waiting.done() or waiting.cancelled():
                    self._waiting.remove(waiting)

    def _send_away(self, waiting: asyncio.Future[str | None]) -> None:
        if not waiting.done():
            self._waiting.remove(waiting)
            waiting.set_result(BUSY if self.is_busy else STARTING)

    @property
    def is_busy(self) -> bool:
        """True if a worker is ready: calls wait for others, and not for a process."""
        return any(process.ready for process in self._processes.values())

    def wake(self, count: int) -> None:
        """Let as many look again that wait for a worker."""
        while count > 0 and self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)
                count -= 1

    def _dismiss(self, reason: str) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(reason)

    def _free(self) -> WorkerProcess | None:
        """Return the worker with the fewest calls that takes one, if need be ahead, or None."""
        found, least = None, 0
        for process in self._processes.values():
            load = len(process.calls)
            if (found is None or load < least) and process.accepts and load < self._most(process):
                found, least = process, load
        return found if found is not None or not self.prefetch else self._free_ahead()

    def _free_ahead(self) -> WorkerProcess | None:
        """Return the worker in which the fewest calls wait, or None. All of them are busy."""
        waiting = [(len(process.calls) - process.share, process) for process in self._processes.values()]
        fewest, found = min(waiting, key=itemgetter(0))
        return found if fewest < self._ahead(found) else None

    def _most(self, process: WorkerProcess) -> int:
        """Return how many calls a process makes at once. One that waited for a thread would spend its time there."""
        return process.share if process.is_async else min(process.share, self._task.threads)

    def _ahead(self, process: WorkerProcess) -> int:
        """Return how many calls may wait in a process."""
        return process.share if self._prefetches else 0

    async def _keep(self, number: int) -> None:
        """Run one worker after another until cancelled. No error ends this: the sink would have a worker less."""
        failures = 0
        while True:
            reason, served = "", False
            try:
                reason, served = await self._run_one(number)
            except Exception as error:
                reason = self._problems[number] = f"no worker process can be started: {type(error).__name__}"
            self.wake(len(self._waiting))
            failures = 0 if served else failures + 1
            delay = min(MOST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(failures, 20))
            with suppress(Exception):  # a log that cannot be written
                self._on_end(reason, delay)
            await asyncio.sleep(delay)

    async def _run_one(self, number: int) -> tuple[str, bool]:
        """Run a worker until it has ended. Return the reason, and True if it answered a call."""
        process = WorkerProcess(
            self._task, self._shares[number], self._report, lambda count: self._woken(number, count)
        )
        self._processes[number] = process
        try:
            await process.run()
        finally:
            del self._processes[number]
        if process.problem is not None:
            self._problems[number] = process.problem
        return process.problem or process.end_reason, process.served

    def _woken(self, number: int, count: int) -> None:
        """Let as many calls look again as a worker can begin, which therefore has no problem."""
        if self._problems:
            self._problems.pop(number, None)
        self.wake(count)
