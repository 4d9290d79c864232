"""Events that writers committed and destinations took, and the contradictions between the two."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Refused, Unavailable, Verdict


@dataclass(frozen=True)
class Written:
    """An event that was emitted: its number, key, and whether it is always refused."""

    n: int
    key: str | None
    poison: bool


@dataclass
class Expected:
    """Both sides, and ``broken``: what went wrong between them. With ``hold`` a dead letter stops its key."""

    hold: bool
    committed: dict[int, Written] = field(default_factory=dict[int, Written])
    """In the order of the commits, which is the order of ids of a key: its writers exclude each other."""
    asked: set[int] = field(default_factory=set[int])
    taken: Counter[int] = field(default_factory=Counter[int])
    retried: set[int] = field(default_factory=set[int])
    """Dead events that were made due again."""
    discarded: set[int] = field(default_factory=set[int])
    """Dead events that were discarded, after the position of their shard had passed them."""
    broken: list[str] = field(default_factory=list[str])
    early: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(event, earlier event of its key that had not been delivered): right only if that one is dead by then."""

    def answer(self, event: StoredEvent, wish: str) -> Verdict:
        """Return the destination's verdict of ``event``: ``wish``, except that it never takes a poisoned one."""
        n: int = json.loads(event.payload)["n"]
        written = self.committed.get(n)
        if written is None:
            self.broken.append(f"phantom: event {n} was delivered and is not committed")
            return DELIVERED
        if n in self.discarded:
            self.broken.append(f"event {n} was delivered after it was discarded")
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
        if written.key is None:
            return
        for earlier in self.committed.values():
            if earlier.n == written.n:
                return
            if earlier.key != written.key or self.taken[earlier.n] or earlier.n in self.discarded:
                continue
            if self.hold or not (earlier.poison and earlier.n in self.asked):
                self.early.append((written.n, earlier.n))

    def missing(self, rows: Iterable[tuple[str, str]]) -> list[str]:
        """Return the events that are not at rest, given the ``rows`` (number, state) of delivery.

        Everything is delivered or dead, with ``hold`` also held behind a dead one of its key, and no other row is left.
        """
        states = {int(n): state for n, state in rows}
        found: list[str] = []
        stopped: set[str | None] = set()
        for written in self.committed.values():
            state = states.pop(written.n, None)
            if written.n in self.discarded:
                found += [f"there is a row of event {written.n}, which was discarded"] if state else []
            elif state == "dead":
                stopped |= {written.key} if self.hold and written.key else set()
            elif written.key in stopped:
                found += [] if state else [f"event {written.n} does not stand behind the dead one of its key"]
            elif state or not self.taken[written.n]:
                found.append(f"event {written.n} is {state or 'lost'}")
        return [*found, *(f"there is a row of event {n}, which was not committed" for n in states)]

    def disorder(self, rows: Iterable[tuple[str, str]]) -> list[str]:
        """First deliveries that came before an earlier event of their key that is not dead, and was not."""
        dead = {int(n) for n, state in rows if state == "dead"} | self.retried | self.discarded
        return [f"event {n} came before {m} of its key" for n, m in self.early if self.hold or m not in dead]

    @property
    def twice(self) -> list[int]:
        """Events that the destination took more than once."""
        return [n for n, count in self.taken.items() if count > 1]
