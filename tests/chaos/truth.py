"""The writers' own word of what they committed, in files on disk, and how it is held against the database's log."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from uuid import UUID

from tests.chaos.timeline import Logged

End = Literal["ok", "rolled back", "unknown"]
Intended = tuple[int, int, str]
"""Key, number within the key, uid."""


class TruthFile:
    """Appends to one writer's file. What is intended is on disk before COMMIT is sent."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def intend(self, transaction: int, events: Sequence[Intended]) -> None:
        """The transaction is about to commit these, or to roll them back; on disk when this returns."""
        self._write({"tx": transaction, "events": events})
        os.fdatasync(self._file.fileno())

    def end(self, transaction: int, how: End) -> None:
        """What became of it; the next `intend` brings it to disk."""
        self._write({"tx": transaction, "end": how})

    def close(self) -> None:
        """The last line is on disk."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _write(self, line: Mapping[str, object]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


def read(path: Path) -> Iterator[tuple[list[Intended], End]]:
    """The transactions of a file: what they intended, and how they ended; unknown where the file does not say."""
    pending: dict[int, list[Intended]] = {}
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            said = json.loads(line)
            if "events" in said:
                pending[said["tx"]] = [(key, number, uid) for key, number, uid in said["events"]]
            else:
                yield pending.pop(said["tx"]), said["end"]
    for events in pending.values():
        yield events, "unknown"


@dataclass
class Reconciled:
    """The database's log against the writers' word, in events."""

    committed: int = 0
    """In the log now."""
    by_end: Counter[str] = field(default_factory=Counter[str])
    """What the writers say: end → events."""
    unknown_committed: int = 0
    """Of those whose end the writer does not know: how many are in the log."""
    vanished: list[Intended] = field(default_factory=list[Intended])
    """Committed by a writer's word and not in the log: the database lost them."""
    risen: list[Intended] = field(default_factory=list[Intended])
    """Rolled back by a writer's word and in the log."""
    strangers: list[Intended] = field(default_factory=list[Intended])
    """In the log and intended by nobody, or there twice, or taken back by a restore and still there."""
    taken_back: int = 0
    """Committed, and taken back by a restore: not in the log."""

    @property
    def sound(self) -> bool:
        """The log holds what the writers committed and nothing else."""
        return not (self.vanished or self.risen or self.strangers)


def reconcile(
    truths: Iterable[tuple[Sequence[Intended], End]],
    log: Iterable[Logged],
    add: Callable[[Logged], None],
    taken_back: Iterable[Logged] = (),
) -> Reconciled:
    """Hold the log against the writers' word, and `add` each of its events to what is due.

    `taken_back` are the events that were in the log of a server that a restore replaced, and not in the dump. They are
    held against the writers' word as well: what a writer committed is in the log or among these, in one of them once.
    """
    found = Reconciled()
    said: dict[bytes, tuple[End, int, int]] = {}
    for events, end in truths:
        found.by_end[end] += len(events)
        for key, number, uid in events:
            said[UUID(uid).bytes] = (end, key, number)
    for event in taken_back:
        found.taken_back += 1
        _held(found, event, said.pop(event.uid, None))
    for event in log:
        found.committed += 1
        add(event)
        if _held(found, event, said.pop(event.uid, None)) == "unknown":
            found.unknown_committed += 1
    found.vanished += [(key, number, uid.hex()) for uid, (end, key, number) in said.items() if end == "ok"]
    return found


def _held(found: Reconciled, event: Logged, said: tuple[End, int, int] | None) -> End | None:
    """Note what is wrong with an event of a log; return what its writer said became of it."""
    end, *place = said or (None, 0, 0)
    if end is None or place != [event.key, event.number]:
        found.strangers.append((event.key, event.number, event.uid.hex()))
    elif end == "rolled back":
        found.risen.append((event.key, event.number, event.uid.hex()))
    return end
