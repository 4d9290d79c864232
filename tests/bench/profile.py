"""Processor time per event, by thread of the relaying process and by server. Linux only."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from tests.bench.figures import MICROSECONDS, Figure

SERVERS = {"postgres": "PostgreSQL", "java": "broker"}
"""Labels of server processes by their names."""
MAIN, OTHER, CLIENT = "main thread", "other threads of Python", "threads of Kafka's client"
CLIENTS = "rdk:"
"""Prefix of the names of the client's threads."""

CpuSeconds: TypeAlias = Mapping[str, float]
"""Processor time in seconds by label."""


class Profile:
    """Processor time per event, from the first arrival to the last; `name` identifies the sender."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._samples: list[tuple[int, CpuSeconds]] = []

    def sampled(self, count: Callable[[], int], pid: int, events: int) -> Callable[[], int]:
        """Wrap `count` so that it takes a sample of process `pid` at the first event and at the last."""

        def sampled_count() -> int:
            found = count()
            if found and (not self._samples or found >= events):
                self._samples.append((found, cpu_seconds_by_label(pid)))
            return found

        return sampled_count

    @property
    def figures(self) -> Sequence[Figure]:
        """Return the microseconds per event by label."""
        if len(self._samples) < 2:
            return []
        (count, before), (last, after) = self._samples
        return [
            Figure(f"{self._name}: {part}", (seconds - before.get(part, 0.0)) / (last - count) * 1e6, MICROSECONDS)
            for part, seconds in after.items()
        ]


def cpu_seconds_by_label(pid: int) -> CpuSeconds:
    """Return the processor time of the threads of a process and of the servers; 0 for a process that does not exist."""
    found: defaultdict[str, float] = defaultdict(float)
    for thread, name, seconds in _stats(Path(f"/proc/{pid}/task")):
        found[MAIN if thread == pid else CLIENT if name.startswith(CLIENTS) else OTHER] += seconds
    for _, name, seconds in _stats(Path("/proc")):
        if name in SERVERS:
            found[SERVERS[name]] += seconds
    return found


def _stats(directory: Path) -> Iterator[tuple[int, str, float]]:
    """Yield id, name and processor seconds of each process or thread in a directory of `/proc`."""
    ticks = os.sysconf("SC_CLK_TCK")
    numbers: list[str] = []
    with suppress(OSError):
        numbers = os.listdir(directory)  # noqa: PTH208 - hundreds of names, no paths needed
    for number in filter(str.isdigit, numbers):
        with suppress(OSError):
            head, _, tail = (directory / number / "stat").read_text().rpartition(")")
            fields = tail.split()
            yield int(number), head.partition("(")[2], (int(fields[11]) + int(fields[12])) / ticks
