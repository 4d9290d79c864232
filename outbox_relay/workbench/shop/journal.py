"""Journal of arrivals: a file that a destination's process appends to while the demo reads it."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

READ_BYTES = 4 << 20
"""Number of bytes read from a journal at once."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """An event received by a destination; times are in seconds since 1970 by this machine's clock."""

    key: str
    number: int
    """Sequence number of the event within its key."""
    uid: str
    emitted_at: float
    arrived_at: float

    @property
    def latency_seconds(self) -> float:
        """Return the time from emit to arrival."""
        return self.arrived_at - self.emitted_at


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


class JournalReader:
    """Reads the complete lines of a journal from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Arrival | None]:
        """Return the next entries, from at most ``READ_BYTES``; an empty list while the file does not exist."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                chunk = file.read(READ_BYTES)
        except FileNotFoundError:
            return []
        lines = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(lines)
        return [None if line == b"null" else Arrival(*json.loads(line)) for line in lines.splitlines()]
