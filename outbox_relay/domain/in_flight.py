"""The events of a sink that are in flight, and the keys that must wait. Pure.

These rules keep the order of a key:

- While a key has a row of ``delivery`` that takes part in its order, its later events become held rows. Only the
  owner of the shard adds rows of a key.
- A settled position covers an event that became a row only if that row is committed with it or before it.
- The owner delivers a key directly again only after a query that started after the commit of its own last settlement
  of that key has shown that no such row is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from outbox_relay.domain.event import StoredEvent, memory_bytes
from outbox_relay.domain.window import Position, Tick, nothing_new


class Chunk:
    """The events of one read, in id order, each done or not.

    An event is done when it is delivered, or parked as a row of the next settlement. ``start`` is the position of the
    read, ``end`` the position after all events, and ``size`` the bytes in memory. Several shard groups may share a
    chunk: only its done events change.
    """

    __slots__ = ("_done", "end", "events", "size", "start")

    def __init__(self, events: Sequence[StoredEvent], start: Position, end: Position) -> None:
        self.events = events
        self.start = start
        self.end = end
        self.size = memory_bytes(events)
        self._done = bytearray(len(events))

    def settle(self, index: int) -> None:
        """Mark the event at ``index`` as done."""
        self._done[index] = 1

    def settle_all(self) -> None:
        """Mark every event as done."""
        self._done = bytearray(b"\x01" * len(self.events))

    def undone(self, before: int | None = None) -> list[int]:
        """Return the indexes of events that are not done, all or those below ``before``."""
        return [i for i, done in enumerate(self._done[:before]) if not done]

    @property
    def left(self) -> int:
        """The number of events that are not done."""
        return self._done.count(0)

    @property
    def last_done(self) -> int:
        """The index of the last event that is done; -1 if there is none."""
        return self._done.rfind(1)

    @property
    def finished(self) -> bool:
        """True if every event is done."""
        return 0 not in self._done

    def reached(self) -> Position:
        """Return the position before which every event of the chunk is done."""
        first = self._done.find(0)
        if first < 0:
            return self.end
        return self.start.at(self.events[first - 1].id) if first else self.start


class ShardGroup:
    """Shards at the same position that are read together, and their unsettled chunks.

    ``position`` is the end of the last read. The end of each chunk is kept here and not in the chunk, which other
    groups may share. A read without events only moves that end, so idle rounds use no memory while a destination is
    down.
    """

    __slots__ = ("_ends", "_settled", "chunks", "position", "shards")

    def __init__(self, shards: Iterable[int], position: Position) -> None:
        self.shards = frozenset(shards)
        self.position = position
        self.chunks: deque[Chunk] = deque()
        self._ends: deque[Position] = deque()
        self._settled = position

    def take(self, chunk: Chunk) -> None:
        """Add a chunk that was read, and move the position to its end."""
        self.position = chunk.end
        if chunk.events:
            self.chunks.append(chunk)
            self._ends.append(chunk.end)
        elif self._ends:
            self._ends[-1] = chunk.end
        else:
            self._settled = chunk.end

    def follow(self, tick: Tick) -> None:
        """Open the window up to ``tick``, unless it is empty or another is open."""
        if self.position.b is None and not nothing_new(self.position.a, tick):
            self.position = self.position.opened(tick)

    @property
    def settled(self) -> Position:
        """The position before which every event is done."""
        while self.chunks and self.chunks[0].finished:
            self.chunks.popleft()
            self._settled = self._ends.popleft()
        return self.chunks[0].reached() if self.chunks else self._settled

    def unsettled_before_last_done(self) -> list[tuple[Chunk, int]]:
        """Return the events, as (chunk, index), that precede an event that is done."""
        chunks = list(self.chunks)
        while chunks and chunks[-1].last_done < 0:
            chunks.pop()
        ends = [*(len(chunk.events) for chunk in chunks[:-1]), *(chunk.last_done for chunk in chunks[-1:])]
        return [(chunk, index) for chunk, end in zip(chunks, ends, strict=True) for index in chunk.undone(end)]

    @property
    def undone(self) -> int:
        """The number of events of these shards that are in flight."""
        return sum(chunk.events[index].shard in self.shards for chunk in self.chunks for index in chunk.undone())

    @property
    def idle(self) -> bool:
        """True if no event of these shards is in flight."""
        return all(chunk.finished for chunk in self.chunks)

    def split(self, leaving: Collection[int]) -> ShardGroup:
        """Move ``leaving`` shards to a new group, and return it.

        It has the same position and chunks, and is not read further.
        """
        other = ShardGroup(self.shards & frozenset(leaving), self.position)
        other.chunks, other._ends = deque(self.chunks), deque(self._ends)
        other._settled = self._settled
        self.shards -= other.shards
        return other

    def join(self, other: ShardGroup) -> None:
        """Add the shards of ``other``, which ``can_join`` this group."""
        self.shards |= other.shards

    def can_join(self, other: ShardGroup, *, inside: bool = False) -> bool:
        """Return True if both groups are idle at the same position, between two windows or, if ``inside``, anywhere."""
        return self.position == other.position and (inside or self.position.b is None) and self.idle and other.idle


class BlockedKeys:
    """The keys of one sink whose events must become rows.

    Each key has the number of the last settlement that touched it, from 1. ``touch`` assigns a key to the settlement
    being collected, ``begin`` closes that settlement and opens the next, and ``commit`` records that it is in the
    database.
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
        """Record that the settlement being collected writes a row of ``key``."""
        self._keys[key] = (self.collecting, shard)

    def load(self, rows: Iterable[tuple[str, int]]) -> None:
        """Add keys, as (key, shard), that have rows when their shard is taken over.

        They count as touched by the settlement being collected, so that no earlier question frees them.
        """
        for key, shard in rows:
            self._keys[key] = (self.collecting, shard)

    def begin(self) -> int:
        """Close the settlement being collected, and return its number."""
        self.collecting += 1
        return self.collecting - 1

    def commit(self, number: int) -> None:
        """Record that the settlement with this number is in the database."""
        self.committed = number

    def settled(self, most: int) -> tuple[int, list[str]]:
        """Return the last committed settlement and the keys to ask about.

        These are up to ``most`` keys that no later settlement touches. They move to the end, so that every key gets its
        turn.
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
        """Remove the keys that no longer have rows, and return them.

        These are the keys of ``asked`` that are not in ``still`` and were not touched after settlement ``asked_at``.
        """
        freed = [key for key in asked if key not in still and self._keys.get(key, (asked_at + 1, 0))[0] <= asked_at]
        for key in freed:
            del self._keys[key]
        return freed

    def forget(self, shards: Collection[int]) -> None:
        """Remove the keys of shards that this relay no longer owns."""
        self._keys = {key: at for key, at in self._keys.items() if at[1] not in shards}


class InFlight:
    """The events of one sink that were read and are not settled, the shards they belong to, and the blocked keys.

    A shard group is readable until its shards are drained. Then it is leaving: no further events are read for it, but
    its positions are written until it is dropped.
    """

    __slots__ = ("_chunks", "_inherited", "_leaving", "_progressed", "_readable", "_shards", "_written", "blocked")

    def __init__(self) -> None:
        self.blocked = BlockedKeys()
        self._readable: list[ShardGroup] = []
        self._leaving: list[ShardGroup] = []
        self._shards: frozenset[int] = frozenset()
        self._chunks: deque[Chunk] = deque()
        self._progressed: dict[int, Chunk] = {}
        self._written: dict[int, Position] = {}
        self._inherited: set[int] = set()

    # -- shards -----------------------------------------------------------------------------------------------

    @property
    def groups(self) -> Sequence[ShardGroup]:
        """All groups, readable or leaving."""
        return (*self._readable, *self._leaving)

    @property
    def readable(self) -> Sequence[ShardGroup]:
        """The groups that are read, in the order of their turns."""
        return tuple(self._readable)

    @property
    def leaving(self) -> Sequence[ShardGroup]:
        """The groups whose shards are drained."""
        return tuple(self._leaving)

    @property
    def shards(self) -> frozenset[int]:
        """The shards of all groups."""
        return self._shards

    def take_over(self, shards: Collection[int], position: Position) -> None:
        """Add shards whose stored position is ``position``, which an earlier owner wrote."""
        self._readable.append(ShardGroup(shards, position))
        self._shards |= frozenset(shards)
        self._written.update(dict.fromkeys(shards, position))
        self._inherited.update(shards)

    def drain(self, shards: Collection[int]) -> None:
        """Read no further events of ``shards``."""
        for group in self.readable:
            if group.shards.isdisjoint(shards):
                continue
            self._leaving.append(group.split(shards))
            if not group.shards:
                self._readable.remove(group)

    def drop(self, group: ShardGroup) -> None:
        """Remove a leaving group, whose shards are released, and the blocked keys of its shards."""
        self._leaving.remove(group)
        self._shards -= group.shards
        self.blocked.forget(group.shards)
        for shard in group.shards:
            self._written.pop(shard, None)
        self._inherited.difference_update(group.shards)

    def begin_round(self, tick: Tick) -> None:
        """Join readable groups that are idle at the same position, and open their windows up to ``tick``."""
        self.join()
        for group in self._readable:
            group.follow(tick)

    def join(self, *, inside: bool = False) -> None:
        """Join readable groups that are idle at the same position, with ``inside`` also within a window."""
        for group in self.readable:
            others = (each for each in self._readable if each is not group and each.can_join(group, inside=inside))
            if (other := next(others, None)) is not None:
                other.join(group)
                self._readable.remove(group)

    # -- events -----------------------------------------------------------------------------------------------

    @property
    def undone(self) -> int:
        """The number of events that are neither delivered nor parked."""
        return sum(chunk.left for chunk in self._chunks)

    def take(self, group: ShardGroup, chunk: Chunk) -> None:
        """Add a chunk that was read for a readable group, whose next turn comes after those of the others."""
        group.take(chunk)
        if chunk.events:
            self._chunks.append(chunk)
        self._readable.remove(group)
        self._readable.append(group)

    def has_capacity(self, chunks: int, events: int, size: int) -> bool:
        """Return True if fewer than these chunks, events and bytes are unfinished."""
        while self._chunks and self._chunks[0].finished:
            self._chunks.popleft()
        unfinished = [chunk for chunk in self._chunks if not chunk.finished]
        return (
            len(self._chunks) < chunks
            and sum(len(chunk.events) for chunk in unfinished) < events
            and sum(chunk.size for chunk in unfinished) < size
        )

    def settle(self, chunk: Chunk, index: int | None = None) -> None:
        """Mark the event at ``index``, or every event of the chunk, as done."""
        if index is None:
            chunk.settle_all()
        else:
            chunk.settle(index)
        self._progressed[id(chunk)] = chunk

    def park(self, chunk: Chunk, index: int, *, blocks: bool) -> int:
        """Mark the event at ``index`` as done by a row of the settlement being collected, and return its number.

        With ``blocks``, later events of its key become rows behind it.
        """
        event = chunk.events[index]
        if blocks and event.key is not None:
            self.blocked.touch(event.key, event.shard)
        self.settle(chunk, index)
        return self.blocked.collecting

    def unsettled_before_last_done(self) -> list[tuple[Chunk, int]]:
        """Return the events of all groups, as (chunk, index), that precede an event that is done."""
        events = [event for group in self.groups for event in group.unsettled_before_last_done()]
        return list(dict.fromkeys(events))

    # -- settlements ------------------------------------------------------------------------------------------

    def begin_settlement(self, *, everything: bool) -> tuple[int, dict[int, Position]]:
        """Close the settlement being collected. Return its number and the positions to write.

        Those are the positions of shards with events that are done since the last settlement, or of all shards with
        ``everything``, as far as they differ from the written ones. Inherited positions are written too, with
        ``everything``: a position of an earlier epoch does not say where this owner began to read.
        """
        progressed, self._progressed = self._progressed, {}
        moved = {event.shard for chunk in progressed.values() for event in chunk.events}
        positions: dict[int, Position] = {}
        for group in self.groups:
            settled = group.settled
            for shard in group.shards if everything else group.shards & moved:
                if self._written.get(shard) != settled or (everything and shard in self._inherited):
                    positions[shard] = settled
        return self.blocked.begin(), positions

    def record_written(self, positions: Mapping[int, Position]) -> set[int]:
        """Record that ``positions`` are in the database; return the shards whose position has advanced."""
        advanced = {shard for shard, position in positions.items() if self._written.get(shard) != position}
        self._written.update(positions)
        self._inherited.difference_update(positions)
        return advanced
