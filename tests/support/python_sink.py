"""Python sinks without a relay: worker processes with handlers of the tests, and what they leave behind."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import Unavailable, Verdict
from outbox_relay.sinks.contract.handing import an_event
from outbox_relay.sinks.python import PythonSink, WorkerTask
from tests.support.wait import auntil

SECONDS = 30.0
KINDS = ("asynchronous", "plain")
"""The handlers of ``odd_handlers`` that do as the payload says."""


@dataclass
class RunningSink:
    """An open sink, what its handlers printed and wrote to files, and why its workers ended."""

    sink: PythonSink
    directory: Path
    printed: list[str] = field(default_factory=list[str])
    left_out: list[int] = field(default_factory=list[int])
    ends: list[str] = field(default_factory=list[str])

    async def deliver(self, payload: str, *, seconds: float = 60.0, again: bool = False) -> Verdict:
        """Deliver a new event; ``again``: repeatedly, while no attempt is counted."""
        event = an_event(None, payload.encode())
        if again:
            return await self.redeliver(event)
        [verdict] = await self.sink.deliver([event], lease_clock() + seconds)
        return verdict

    async def redeliver(self, event: StoredEvent) -> Verdict:
        """Deliver an event repeatedly, while no attempt is counted."""

        async def verdict() -> Verdict | None:
            [found] = await self.sink.deliver([event], lease_clock() + 60)
            return None if isinstance(found, Unavailable) else found

        found = await auntil(verdict, seconds=SECONDS, what="the event has a verdict")
        assert found is not None
        return found

    def notes(self, name: str) -> list[str]:
        """Return the lines of a file that handlers wrote."""
        file = self.directory / name
        return file.read_text().splitlines() if file.exists() else []

    async def noted(self, name: str, count: int = 1) -> list[str]:
        """Wait until a file has ``count`` lines, and return them."""

        async def found() -> list[str]:
            lines = self.notes(name)
            return lines if len(lines) >= count else []

        return await auntil(found, seconds=SECONDS, what=f"handlers write {name}")

    @property
    def pids(self) -> list[int]:
        """The ids of the worker processes."""
        return [process.pid for process in self.sink.processes if process.pid is not None]


@asynccontextmanager
async def python_sink(
    handler: str,
    directory: Path,
    *,
    threads: int = 8,
    memory_mb: int | None = None,
    dsn: str = "",
    environment: dict[str, str] | None = None,
    **options: Any,
) -> AsyncGenerator[RunningSink]:
    """Open a sink for a handler of ``tests.support.odd_handlers``, and close it after the block."""
    variables = {**os.environ, "HANDLERS_DIRECTORY": str(directory), **(environment or {})}
    task = WorkerTask(f"tests.support.odd_handlers:{handler}", "test", threads, dsn, memory_mb, variables)

    def report(line: str, left_out: int) -> None:
        running.printed.append(line)
        running.left_out.append(left_out)

    def on_end(reason: str, _delay: float) -> None:
        running.ends.append(reason)

    options = {"max_in_flight": 8, "timeout_seconds": 10.0, **options}
    running = RunningSink(PythonSink("test", task, report=report, on_end=on_end, **options), directory)
    await running.sink.open()
    try:
        yield running
    finally:
        await running.sink.close()


def is_alive(pid: int) -> bool:
    """Return True if a process runs; False if it is gone, or has ended and was not waited for."""
    with suppress(OSError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


def children_that_ended() -> list[int]:
    """Return the zombies of this process."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            stat = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            if stat[0] == "Z" and int(stat[1]) == os.getpid():
                found.append(int(entry.name))
    return found


def is_stopped(pid: int) -> bool:
    """Return True if a process was stopped by a signal."""
    return ") T " in Path(f"/proc/{pid}/stat").read_text()


def descriptors_open() -> int:
    """Return the number of descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def oom_score(pid: int) -> int:
    """Return the points by which the kernel prefers a process when memory runs out."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def ignore(_first: object, _second: object, /) -> None:
    """Do nothing."""


async def becomes_false(fact: Callable[[], object], what: str) -> None:
    """Wait until ``fact`` returns a false value."""

    async def is_false() -> bool:
        return not fact()

    await auntil(is_false, seconds=SECONDS, what=what)
