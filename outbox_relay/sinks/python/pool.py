"""The worker processes of a sink: each is started again when it has ended, after growing delays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from outbox_relay.sinks.python.output import Report
from outbox_relay.sinks.python.worker_process import WorkerProcess, WorkerTask

FIRST_DELAY_SECONDS, MOST_DELAY_SECONDS = 0.1, 30.0
"""Delay before a worker that ended is started again, doubled until one answers a call, and its limit."""
WAIT_SECONDS = 5.0
"""Maximum wait of a call for a worker."""

OnEnd = Callable[[str, float], None]
"""Receives why a worker ended, and the delay until it is started again."""


class WorkerPool:
    """``workers`` processes with at most ``share`` calls each, and with a plain handler no more than threads."""

    def __init__(self, task: WorkerTask, workers: int, share: int, report: Report, on_end: OnEnd) -> None:
        self._task = task
        self._workers = workers
        self._share = share
        self._report = report
        self._on_end = on_end
        self._processes: dict[int, WorkerProcess] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._problems: dict[int, str] = {}
        self._changed = asyncio.Event()
        self._reserved: dict[WorkerProcess, int] = {}

    @property
    def problem(self) -> str | None:
        """The reason why no worker can call the handler, or None."""
        return next(iter(self._problems.values())) if len(self._problems) == self._workers else None

    @property
    def processes(self) -> list[WorkerProcess]:
        """The processes that have been started and have not ended."""
        return list(self._processes.values())

    def open(self) -> None:
        """Start the workers, and wait for none of them."""
        if not self._keepers:
            self._keepers = [asyncio.create_task(self._keep(number)) for number in range(self._workers)]

    async def close(self) -> None:
        """Kill the workers, and return when they are gone."""
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        if keepers:
            await asyncio.wait(keepers)
        self._problems.clear()
        self.wake()

    async def reset(self, seconds: float) -> None:
        """End the calls under way within ``seconds``, if need be with their processes."""
        self.wake()
        await asyncio.gather(*(process.cancel_all(seconds) for process in self.processes if process.calls))

    async def started(self, seconds: float) -> WorkerProcess | str:
        """Return a worker that accepts calls, or why there is none within ``seconds``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while True:
                    if (problem := self.problem) is not None:
                        return problem
                    if found := [each for each in self.processes if each.accepts]:
                        return found[0]
                    await self._wait()
        return "no worker is ready"

    async def take(self, is_current: Callable[[], bool]) -> WorkerProcess | str:
        """Return a worker, for which the caller calls ``give_back``, or the reason why there is none."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS):
                while is_current():
                    if (problem := self.problem) is not None:
                        return problem
                    if (process := self._free()) is not None:
                        self._reserved[process] = self._reserved.get(process, 0) + 1
                        return process
                    await self._wait()
                return "the sink was reset"
        return "every worker is busy, or is being started"

    def give_back(self, process: WorkerProcess) -> None:
        """End the use of a worker that ``take`` returned."""
        self._reserved[process] -= 1
        if not self._reserved[process]:
            del self._reserved[process]
        self.wake()

    def wake(self) -> None:
        """Let those look again that wait for a worker."""
        self._changed.set()

    def _free(self) -> WorkerProcess | None:
        loads = [
            (load, number, each)
            for number, each in self._processes.items()
            if each.accepts and (load := max(self._reserved.get(each, 0), len(each.calls))) < self._most(each)
        ]
        return min(loads)[2] if loads else None

    def _most(self, process: WorkerProcess) -> int:
        """Return how many calls a process makes at once. One that waited for a thread would spend its time there."""
        return self._share if process.is_async else min(self._share, self._task.threads)

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _keep(self, number: int) -> None:
        """Run one worker after another until cancelled."""
        failures = 0
        while True:
            process = self._processes[number] = WorkerProcess(self._task, self._report)
            watching = asyncio.create_task(self._watch(number, process))
            try:
                await process.run()
            finally:
                watching.cancel()
                del self._processes[number]
                self.wake()
            failures = 0 if process.served else failures + 1
            delay = min(MOST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(failures, 20))
            if process.problem is not None:
                self._problems[number] = process.problem
            self._on_end(process.problem or process.end_reason, delay)
            await asyncio.sleep(delay)

    async def _watch(self, number: int, process: WorkerProcess) -> None:
        await process.ready.wait()
        self._problems.pop(number, None)
        self.wake()
