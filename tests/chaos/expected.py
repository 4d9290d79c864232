"""The events that the writers expect to be committed, in files on disk, and their comparison with the log."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import psycopg

from tests.chaos.timeline import Logged

End = Literal["ok", "rolled back", "unknown"]
Intended = tuple[int, int, str]
"""Key, number within the key, uid."""


class ExpectedFile:
    """The file of one writer, which has the events of a transaction before its COMMIT is sent."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def intend(self, transaction: int, events: Sequence[Intended]) -> None:
        """Write the events that the transaction is about to commit or roll back, and flush them to disk."""
        self._write({"tx": transaction, "events": events})
        os.fdatasync(self._file.fileno())

    def end(self, transaction: int, how: End) -> None:
        """Write the outcome of the transaction; the next :meth:`intend` flushes it to disk."""
        self._write({"tx": transaction, "end": how})

    def commit(self, transaction: int, connection: psycopg.Connection[Any]) -> None:
        """Commit on `connection` and write the outcome. Raise psycopg.Error if it is unknown."""
        try:
            connection.commit()
        except psycopg.Error:
            self.end(transaction, "unknown")
            raise
        self.end(transaction, "ok")

    def close(self) -> None:
        """Flush the last line to disk and close the file."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _write(self, line: Mapping[str, object]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


def read(path: Path) -> Iterator[tuple[list[Intended], End]]:
    """Yield the intended events and the outcome of each transaction; "unknown" if the file has no outcome."""
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
    """Result of comparing the log with the writers' files; numbers are events."""

    committed: int = 0
    """Events in the log now."""
    by_end: Counter[str] = field(default_factory=Counter[str])
    """Outcome reported by the writers → events."""
    unknown_committed: int = 0
    """Events in the log of transactions with an unknown outcome."""
    vanished: list[Intended] = field(default_factory=list[Intended])
    """Events that a writer committed and that are not in the log: the database lost them."""
    risen: list[Intended] = field(default_factory=list[Intended])
    """Events that a writer rolled back and that are in the log."""
    strangers: list[Intended] = field(default_factory=list[Intended])
    """Events in the log that no writer intended, that are there twice, or that a restore took back."""
    taken_back: int = 0
    """Committed events that a restore took back; they are not in the log."""

    @property
    def sound(self) -> bool:
        """Return True if the log has the events that the writers committed and no others."""
        return not (self.vanished or self.risen or self.strangers)


def reconcile(
    transactions: Iterable[tuple[Sequence[Intended], End]],
    log: Iterable[Logged],
    add: Callable[[Logged], None],
    taken_back: Iterable[Logged] = (),
) -> Reconciled:
    """Compare the log with the transactions in the writers' files, and call `add` with each event of the log.

    `taken_back` are the events that were in the log of a server that a restore replaced, but not in the dump. They are
    compared as well: a committed event must be either in the log or among these, exactly once.
    """
    found = Reconciled()
    said: dict[bytes, tuple[End, int, int]] = {}
    for events, end in transactions:
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
    """Record a wrong event of a log. Return the outcome of its transaction, None if no writer intended it."""
    end, *place = said or (None, 0, 0)
    if end is None or place != [event.key, event.number]:
        found.strangers.append((event.key, event.number, event.uid.hex()))
    elif end == "rolled back":
        found.risen.append((event.key, event.number, event.uid.hex()))
    return end
