"""What is in hand of a sink: chunks of its windows, how far each is done, and the keys that must wait. Pure.

The rules that keep the order of a key:

- While a key has a row of ``delivery`` that takes part in its order, its later events become held rows behind
  it; the owner of the shard is the only one who adds rows of a key.
- A settled position covers an event that became a row only if that row is committed with it or before it.
- The owner delivers a key directly again only after a query, started after its own last settlement that
  touched the key was committed, has shown that no such row is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence

from outbox_relay.domain.event import Event, memory_bytes
from outbox_relay.domain.window import Position, Tick, nothing_new


class Chunk:
    """Events of one read, in id order, each done (delivered, or parked as a row of the next settlement) or not.

    ``start`` names the window; ``end`` is the position once all is done; ``size`` is the bytes in memory. A chunk may
    belong to several readers: only what is done of it ever changes.
    """

    __slots__ = ("_done", "end", "events", "size", "start")

    def __init__(self, events: Sequence[Event], start: Position, end: Position) -> None:
        self.events = events
        self.start = start
        self.end = end
        self.size = memory_bytes(events)
        self._done = bytearray(len(events))

    def settle(self, index: int) -> None:
        """The event at ``index`` is done."""
        self._done[index] = 1

    def settle_all(self) -> None:
        """Every event is done."""
        self._done = bytearray(b"\x01" * len(self.events))

    def undone(self, before: int | None = None) -> list[int]:
        """The places of the events that are not done, of all or of those ``before`` a place."""
        return [i for i, done in enumerate(self._done[:before]) if not done]

    @property
    def last_done(self) -> int:
        """The place of the last event that is done; -1 when none is."""
        return self._done.rfind(1)

    @property
    def finished(self) -> bool:
        """Whether every event is done."""
        return 0 not in self._done

    def reached(self) -> Position:
        """The position before which every event of the chunk is done."""
        first = self._done.find(0)
        if first < 0:
            return self.end
        return self.start.at(self.events[first - 1].id) if first else self.start


class Reader:
    """Shards that stand at the same position and are read together.

    ``position`` is how far they have been read; ``chunks`` is what was read and is not settled yet.

    The position behind each chunk is kept here and not in the chunk, which others may share. A round that finds no
    event only moves it: while a destination is down there is one round after another, and nothing may grow with them.
    """

    __slots__ = ("_ends", "_settled", "chunks", "position", "shards")

    def __init__(self, shards: Iterable[int], position: Position) -> None:
        self.shards = frozenset(shards)
        self.position = position
        self.chunks: deque[Chunk] = deque()
        self._ends: deque[Position] = deque()
        self._settled = position

    def take(self, chunk: Chunk) -> None:
        """``chunk`` was read: reading goes on behind it."""
        self.position = chunk.end
        if chunk.events:
            self.chunks.append(chunk)
            self._ends.append(chunk.end)
        elif self._ends:
            self._ends[-1] = chunk.end
        else:
            self._settled = chunk.end

    def follow(self, tick: Tick) -> None:
        """Begin the window that ends at ``tick``, if it may hold anything and no other is being read."""
        if self.position.b is None and not nothing_new(self.position.a, tick):
            self.position = self.position.opened(tick)

    @property
    def settled(self) -> Position:
        """The position before which everything is done."""
        while self.chunks and self.chunks[0].finished:
            self.chunks.popleft()
            self._settled = self._ends.popleft()
        return self.chunks[0].reached() if self.chunks else self._settled

    def gaps(self) -> list[tuple[Chunk, int]]:
        """What is in hand and not done before something that is, in order: chunk and place of each event."""
        chunks = list(self.chunks)
        while chunks and chunks[-1].last_done < 0:
            chunks.pop()
        ends = [*(len(chunk.events) for chunk in chunks[:-1]), *(chunk.last_done for chunk in chunks[-1:])]
        return [(chunk, place) for chunk, end in zip(chunks, ends, strict=True) for place in chunk.undone(end)]

    @property
    def undone(self) -> int:
        """Events of these shards that are in hand and not done."""
        return sum(chunk.events[index].shard in self.shards for chunk in self.chunks for index in chunk.undone())

    @property
    def idle(self) -> bool:
        """Whether nothing of these shards is in hand."""
        return all(chunk.finished for chunk in self.chunks)

    def split(self, leaving: Collection[int]) -> Reader:
        """Take ``leaving`` shards out: the reader returned holds them, stands here, and is to read no further."""
        other = Reader(self.shards & frozenset(leaving), self.position)
        other.chunks, other._ends = deque(self.chunks), deque(self._ends)
        other._settled = self._settled
        self.shards -= other.shards
        return other

    def join(self, other: Reader) -> None:
        """Go on for the shards of ``other``, which ``meets`` this one."""
        self.shards |= other.shards

    def meets(self, other: Reader) -> bool:
        """Whether both stand between windows at the same place with nothing in hand, so that one can go for both."""
        return self.position == other.position and self.position.b is None and self.idle and other.idle


class Blocked:
    """The keys of one sink whose events must become rows, and since which settlement.

    Settlements are numbered from 1. ``touch`` belongs to the settlement that is being collected; ``begin`` closes
    it and opens the next; ``commit`` says that it is in the database.
    """

    __slots__ = ("_keys", "collecting", "committed")

    def __init__(self) -> None:
        self._keys: dict[str, tuple[int, int]] = {}
        self.collecting = 1
        self.committed = 0

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def touch(self, key: str, shard: int) -> None:
        """A row of ``key`` is made by the settlement that is being collected."""
        self._keys[key] = (self.collecting, shard)

    def load(self, rows: Iterable[tuple[str, int]]) -> None:
        """Keys (key, shard) that already have rows when their shard is taken over.

        They count as touched by the settlement that is being collected, so that no question asked before frees them.
        """
        for key, shard in rows:
            self._keys[key] = (self.collecting, shard)

    def begin(self) -> int:
        """Close the settlement that was collected; returns its number."""
        self.collecting += 1
        return self.collecting - 1

    def commit(self, number: int) -> None:
        """The settlement with this number is in the database."""
        self.committed = number

    def settled(self, most: int) -> tuple[int, list[str]]:
        """(number of the last committed settlement, up to ``most`` keys that no later one touches): what to ask about.

        The keys asked about go to the end, so that all have their turn.
        """
        asked: list[str] = []
        for key, (touched, _) in self._keys.items():
            if touched <= self.committed:
                asked.append(key)
                if len(asked) == most:
                    break
        for key in asked:
            self._keys[key] = self._keys.pop(key)
        return self.committed, asked

    def free(self, asked_at: int, asked: Iterable[str], still: Collection[str]) -> list[str]:
        """Forget those of ``asked`` without rows ``still`` that were not touched after ``asked_at``; returns them."""
        freed = [key for key in asked if key not in still and self._keys.get(key, (asked_at + 1, 0))[0] <= asked_at]
        for key in freed:
            del self._keys[key]
        return freed

    def forget(self, shards: Collection[int]) -> None:
        """Drop the keys of shards that are no longer ours."""
        self._keys = {key: at for key, at in self._keys.items() if at[1] not in shards}
