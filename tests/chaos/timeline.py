"""The committed events of one sink, including those that a restore took back. Pure.

A restore resets the log to a dump, and with it the numbers of the keys: numbers that were assigned after the dump are
assigned again, to events with other uids. Each restore therefore ends an *era*. An event belongs to the era in which it
was committed. It is *taken back* if it is missing from the dump of the restore that ended its era.

In the order of commits, the events of a key that were taken back are after those of the dump and before those of the
next era. An event's *place* is its index in that order, from 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

UID_BYTES = 16


class Logged(NamedTuple):
    """An event of the log."""

    key: int
    number: int
    uid: bytes
    shard: int
    kind: str | None


@dataclass(frozen=True)
class Restored:
    """One restore. Times are `time.monotonic()`."""

    dumped: float
    """Time at which the dump began."""
    rebased: float
    """Time at which `rebase` had ended. Relays were stopped before it and started afterwards."""
    kept: Mapping[int, int]
    """Key → its last number in the dump."""
    lost: Sequence[Logged]
    """Events of the old server that are not in the dump."""
    unsettled: Mapping[str, Collection[bytes]] = field(default_factory=dict[str, Collection[bytes]])
    """Sink → uids of the dump's events that its positions do not cover, and of its rows."""
    read_again: Mapping[str, Collection[bytes]] = field(default_factory=dict[str, Collection[bytes]])
    """Sink → uids of the dump's rows whose events its positions do not cover."""
    ticks: Collection[bytes] = ()
    """Uids of the events of schedules in the old server's log."""


class Committed:
    """The committed events of one sink: the uids of each key, by place."""

    def __init__(self, restores: Sequence[Restored] = ()) -> None:
        self.restores = restores
        self.keys: dict[int, bytearray] = {}
        self._taken_back: dict[tuple[int, int], int] = {}
        self._shifts: list[Mapping[int, int]] = [{}]
        for restored in restores:
            self._shifts.append(_shifted(self._shifts[-1], restored))

    def add(self, key: int, number: int, uid: bytes) -> None:
        """Add an event of the surviving log. Raise ValueError if the key already has an event with this number."""
        self._put(key, number, uid, sum(number > restored.kept.get(key, 0) for restored in self.restores))

    def take_back(self, restore: int, key: int, number: int, uid: bytes) -> None:
        """Add an event that the restore with this index took back. Raise ValueError as :meth:`add` does."""
        self._taken_back[key, self._put(key, number, uid, restore)] = restore

    def __len__(self) -> int:
        """Return the number of surviving events."""
        return sum(len(uids) for uids in self.keys.values()) // UID_BYTES - len(self.gaps()) - len(self._taken_back)

    @property
    def taken_back(self) -> int:
        """Return the number of events that were taken back."""
        return len(self._taken_back)

    def find(self, key: int, number: int, uid: bytes) -> int | None:
        """Return the event's place, or None if nothing was committed under this key, number and uid."""
        uids = self.keys.get(key, b"")
        places = {number - 1 + shift.get(key, 0) for shift in self._shifts} if number > 0 else ()
        return next((place for place in places if _uid(uids, place) == uid), None)

    def number(self, key: int, place: int) -> int:
        """Return the number that the event had within its key."""
        return place + 1 - self._shifts[self._era(key, place)].get(key, 0)

    def due(self, key: int, place: int) -> bool:
        """Return True if there is an event at this place and it was not taken back."""
        return any(_uid(self.keys[key], place)) and (key, place) not in self._taken_back

    def timely(self, key: int, place: int, at: float) -> bool:
        """Return True if an event may arrive at this time: after the rebase of its era and before the next one.

        After the last rebase only surviving events may arrive.
        """
        taken_back = self._taken_back.get((key, place))
        if taken_back is not None and at >= self.restores[taken_back].rebased:
            return False
        era = self._era(key, place)
        return era == 0 or at >= self.restores[era - 1].rebased

    def gaps(self) -> list[tuple[int, int]]:
        """Return key and place of each missing event before a key's last one; these are poison."""
        empty = bytes(UID_BYTES)
        return [
            (key, place)
            for key, uids in self.keys.items()
            if uids.find(empty) >= 0
            for place in range(len(uids) // UID_BYTES)
            if _uid(uids, place) == empty
        ]

    def _era(self, key: int, place: int) -> int:
        """Return the era of the event at this place."""
        for era in range(len(self.restores), 0, -1):
            if place + 1 - self._shifts[era].get(key, 0) > self.restores[era - 1].kept.get(key, 0):
                return era
        return 0

    def _put(self, key: int, number: int, uid: bytes, era: int) -> int:
        uids = self.keys.setdefault(key, bytearray())
        place = number - 1 + self._shifts[era].get(key, 0)
        begin, end = place * UID_BYTES, (place + 1) * UID_BYTES
        if len(uids) < end:
            uids.extend(bytes(end - len(uids)))
        elif any(uids[begin:end]):
            raise ValueError(f"number {number} is there twice: as {_uid(uids, place).hex()} and as {uid.hex()}")
        uids[begin:end] = uid
        return place


def _shifted(before: Mapping[int, int], restored: Restored) -> Mapping[int, int]:
    """Return by how much the places of each key exceed its numbers minus one after this restore."""
    last: dict[int, int] = {}
    for event in restored.lost:
        last[event.key] = max(event.number, last.get(event.key, 0))
    return {
        **before,
        **{key: before.get(key, 0) + number - restored.kept.get(key, 0) for key, number in last.items()},
    }


def _uid(uids: bytes | bytearray, place: int) -> bytes:
    return bytes(uids[place * UID_BYTES : (place + 1) * UID_BYTES])
