"""What writers committed and what destinations took, and what may not be true of the two."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Refused, Unavailable, Verdict


@dataclass(frozen=True)
class Written:
    """An event that was emitted: its number, key, whether it leaves its key's order, whether it is always refused."""

    n: int
    key: str | None
    scheduled: bool
    poison: bool


@dataclass
class Expected:
    """Both sides, and ``broken``: what went wrong between them. With ``hold`` a dead letter stops its key."""

    hold: bool
    committed: dict[int, Written] = field(default_factory=dict[int, Written])
    """In the order of the commits, which is the order of ids of a key: its writers exclude each other."""
    asked: set[int] = field(default_factory=set[int])
    taken: Counter[int] = field(default_factory=Counter[int])
    broken: list[str] = field(default_factory=list[str])
    early: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(event, earlier event of its key that had not been delivered): right only if that one is dead by then."""

    def answer(self, event: StoredEvent, wish: str) -> Verdict:
        """The destination's verdict of ``event``: ``wish``, except that it never takes a poisoned one."""
        n: int = json.loads(event.payload)["n"]
        written = self.committed.get(n)
        if written is None:
            self.broken.append(f"phantom: event {n} was delivered and is not committed")
            return DELIVERED
        match wish:
            case "failed":
                return Failed("as the test wishes")
            case "later":
                return Failed("as the test wishes", retry_after_seconds=3600.0)
            case "down":
                return Unavailable("as the test wishes", throttled=True)
            case _:
                return self._refused(written) if written.poison else self._taken(written)

    def _refused(self, written: Written) -> Verdict:
        self.asked.add(written.n)
        return Refused("poison")

    def _taken(self, written: Written) -> Verdict:
        if not self.taken[written.n]:
            self._in_order(written)
        self.asked.add(written.n)
        self.taken[written.n] += 1
        return DELIVERED

    def _in_order(self, written: Written) -> None:
        if written.key is None or written.scheduled:
            return
        for earlier in self.committed.values():
            if earlier.n == written.n:
                return
            if earlier.key != written.key or earlier.scheduled or self.taken[earlier.n]:
                continue
            if self.hold or not (earlier.poison and earlier.n in self.asked):
                self.early.append((written.n, earlier.n))

    def missing(self, rows: Iterable[tuple[str, str]]) -> list[str]:
        """What is not at rest, given the ``rows`` (number, state) of delivery.

        Everything is delivered or dead, with ``hold`` also held behind a dead one of its key, and no other row is left.
        """
        states = {int(n): state for n, state in rows}
        found: list[str] = []
        stopped: set[str | None] = set()
        for written in self.committed.values():
            state = states.pop(written.n, None)
            if state == "dead":
                stopped |= {written.key} if self.hold and written.key and not written.scheduled else set()
            elif written.key in stopped and not written.scheduled:
                found += [] if state else [f"event {written.n} does not stand behind the dead one of its key"]
            elif state or not self.taken[written.n]:
                found.append(f"event {written.n} is {state or 'lost'}")
        return [*found, *(f"there is a row of event {n}, which was not committed" for n in states)]

    def disorder(self, rows: Iterable[tuple[str, str]]) -> list[str]:
        """First deliveries that came before an earlier event of their key that is not dead."""
        dead = {int(n) for n, state in rows if state == "dead"}
        return [f"event {n} came before {m} of its key" for n, m in self.early if self.hold or m not in dead]

    @property
    def twice(self) -> list[int]:
        """Events that the destination took more than once."""
        return [n for n, count in self.taken.items() if count > 1]
