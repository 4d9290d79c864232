"""Where processor time goes while events flow: in a process by threads, in servers by their names. Linux only."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from outbox_relay.workbench.bench.figures import MICROSECONDS, Figure

SERVERS = {"postgres": "PostgreSQL", "java": "broker"}
"""What the processes of the servers are called."""
MAIN, OTHER, CLIENT = "main thread", "other threads of Python", "threads of Kafka's client"
CLIENTS = "rdk:"
"""How the names of the client's threads begin."""

Spent: TypeAlias = Mapping[str, float]
"""Seconds of processor time by process."""


class Profile:
    """What each event costs the processor, from the first one that arrives to the last. `name` says who sends them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._at: list[tuple[int, Spent]] = []

    def watching(self, count: Callable[[], int], pid: int, events: int) -> Callable[[], int]:
        """A `count` that notes what has been spent at the first event and at the last; process `pid` sends them."""

        def look() -> int:
            found = count()
            if found and (not self._at or found >= events):
                self._at.append((found, spent(pid)))
            return found

        return look

    @property
    def figures(self) -> Sequence[Figure]:
        """Microseconds of an event by process."""
        if len(self._at) < 2:
            return []
        (count, before), (last, after) = self._at
        return [
            Figure(f"{self._name}: {part}", (seconds - before.get(part, 0.0)) / (last - count) * 1e6, MICROSECONDS)
            for part, seconds in after.items()
        ]


def spent(pid: int) -> Spent:
    """What the threads of a process and the servers have spent so far. A process that is gone has spent nothing."""
    found: defaultdict[str, float] = defaultdict(float)
    for thread, name, seconds in _stats(Path(f"/proc/{pid}/task")):
        found[MAIN if thread == pid else CLIENT if name.startswith(CLIENTS) else OTHER] += seconds
    for _, name, seconds in _stats(Path("/proc")):
        if name in SERVERS:
            found[SERVERS[name]] += seconds
    return found


def _stats(directory: Path) -> Iterator[tuple[int, str, float]]:
    """Number, name and seconds of each process or thread in a directory of the kernel's."""
    ticks = os.sysconf("SC_CLK_TCK")
    numbers: list[str] = []
    with suppress(OSError):
        numbers = os.listdir(directory)  # noqa: PTH208 - names, not paths, of hundreds
    for number in filter(str.isdigit, numbers):
        with suppress(OSError):
            head, _, tail = (directory / number / "stat").read_text().rpartition(")")
            fields = tail.split()
            yield int(number), head.partition("(")[2], (int(fields[11]) + int(fields[12])) / ticks
