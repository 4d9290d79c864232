"""Arrivals at one destination: written to a journal by its process, read, timed and checked by the demo.

The events of a key are numbered 1, 2, 3, … in the order in which their transactions committed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

READ_BYTES = 4 << 20
"""Number of bytes read from a journal at once."""
Identity = tuple[str, int, str]
"""Key, number within the key, uid. The uid is empty in checks that ignore it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """An event received by a destination; times are in seconds since 1970 by this machine's clock."""

    key: str
    number: int
    """Sequence number of the event within its key."""
    uid: str
    emitted_at: float
    arrived_at: float


UNREADABLE = Arrival("", 0, "", 0.0, 0.0)
"""Entry for a delivery that is not an event of the shop."""
REFUSED = None
"""Entry for a request with an invalid signature."""


class JournalWriter:
    """Appends to a journal without buffering."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, arrival: Arrival | None) -> None:
        """Append an arrival or :data:`REFUSED`."""
        line = None if arrival is None else astuple(arrival)
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


@dataclass(frozen=True)
class CheckResult:
    """Numbers of events that were committed, arrived and violated the guarantees."""

    committed: int
    arrived: int
    """All arrivals, duplicates included."""
    lost: int
    phantom: int
    """Arrived without having been committed, for example after a rollback, or with another uid or key."""
    reordered: int
    """First arrivals after the first arrival of a later event of the same key."""
    duplicates: int

    @property
    def sound(self) -> bool:
        """Return True if nothing is lost or phantom and the first arrivals of every key are in order."""
        return not (self.lost or self.phantom or self.reordered)


class DeliveryChecker:
    """Checks the arrivals at one destination, given one by one."""

    def __init__(self) -> None:
        self._seen: Counter[Identity] = Counter()
        self._newest: dict[str, int] = {}
        self._reordered = 0

    @property
    def distinct(self) -> int:
        """Return the number of different events that arrived."""
        return len(self._seen)

    def add(self, key: str, number: int, uid: str = "") -> bool:
        """Add the next arrival. Return True if it is the first of its event."""
        event = (key, number, uid)
        self._seen[event] += 1
        if self._seen[event] > 1:
            return False
        self._reordered += number < self._newest.get(key, 0)
        self._newest[key] = max(number, self._newest.get(key, 0))
        return True

    def missing(self, committed: AbstractSet[Identity]) -> int:
        """Return the number of committed events that have not arrived yet."""
        return len(committed - self._seen.keys())

    def result(self, committed: AbstractSet[Identity]) -> CheckResult:
        """Compare the arrivals so far with the committed events."""
        return CheckResult(
            committed=len(committed),
            arrived=self._seen.total(),
            lost=self.missing(committed),
            phantom=len(self._seen.keys() - committed),
            reordered=self._reordered,
            duplicates=self._seen.total() - len(self._seen),
        )


@dataclass(frozen=True)
class Latency:
    """Percentiles in seconds, from emit to the first arrival; None without any values."""

    p50_seconds: float | None
    p99_seconds: float | None
    longest_seconds: float | None


class Destination(DeliveryChecker):
    """The destination of the sink `name`; `kind` is `kafka` or `webhook`. It follows the file `journal`."""

    def __init__(self, name: str, kind: str, journal: Path) -> None:
        super().__init__()
        self.name = name
        self.kind = kind
        self.journal = journal
        self.refused = 0
        """Number of requests with an invalid signature."""
        self._offset = 0
        self._first: list[Arrival] = []

    def read(self) -> None:
        """Process the new entries of the journal, which may not exist yet."""
        while lines := self._lines():
            for line in lines:
                entry = json.loads(line)
                if entry is REFUSED:
                    self.refused += 1
                    continue
                arrival = Arrival(*entry)
                if self.add(arrival.key, arrival.number, arrival.uid):
                    self._first.append(arrival)

    def latency(self, *, emitted_before: float = math.inf) -> Latency:
        """Return the latency of first arrivals, of events emitted before a time in seconds since 1970."""
        taken = sorted(each.arrived_at - each.emitted_at for each in self._first if each.emitted_at < emitted_before)
        if not taken:
            return Latency(None, None, None)
        return Latency(*(taken[math.ceil(share * len(taken)) - 1] for share in (0.5, 0.99, 1.0)))

    def resumed_at(self, since: float, shards: Mapping[str, int]) -> float:
        """Return when the last of all shards received an event that was emitted after `since`; infinity if one did not.

        `shards` has the shard of each key.
        """
        first: dict[int, float] = {}
        for each in self._first:
            if each.emitted_at >= since and each.key in shards:
                first.setdefault(shards[each.key], each.arrived_at)
        return max(first.values()) if first.keys() == set(shards.values()) else math.inf

    def _lines(self) -> Sequence[bytes]:
        """Return the next complete lines, from at most ``READ_BYTES``."""
        try:
            with self.journal.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read(READ_BYTES)
        except FileNotFoundError:
            return []
        complete = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.splitlines()
