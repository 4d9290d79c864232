"""The file in which a destination's process writes what arrived, and the story's process reads it while it grows."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

READ_BYTES = 4 << 20
"""How much of a journal is read at once."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One event as a destination got it; times are seconds since 1970 by this machine's clock."""

    key: str
    number: int
    """The event's number within its key."""
    uid: str
    emitted_at: float
    arrived_at: float

    @property
    def latency_seconds(self) -> float:
        """How long it took from emit to arrival."""
        return self.arrived_at - self.emitted_at


UNREADABLE = Arrival("", 0, "", 0.0, 0.0)
"""What arrived and cannot be an event of the shop."""
REFUSED = None
"""In place of an arrival: a request whose signature was wrong."""


class JournalWriter:
    """Appends to a journal; what was written can be read at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, arrival: Arrival | None) -> None:
        """Append one arrival, or :data:`REFUSED`."""
        line = None if arrival is None else astuple(arrival)
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


class JournalReader:
    """Reads a journal from its start, as far as whole lines go."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Arrival | None]:
        """What was written since the last call, up to ``READ_BYTES``; nothing while there is no journal."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read(READ_BYTES)
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [None if line == b"null" else Arrival(*json.loads(line)) for line in whole.splitlines()]
