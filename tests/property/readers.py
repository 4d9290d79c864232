"""Readers of one sink for random histories: they treat shards, windows, rows and positions as relays do.

They use the product's statements and its rules of windows, and no clock. The state that a reader keeps may be out of
date: it reads up to an old tick, and settles after its lease has ended.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from uuid import UUID, uuid4

from outbox_relay.domain.attempts import AttemptRecord, delivery_record
from outbox_relay.domain.errors import LeaseLost, StatementFailed
from outbox_relay.domain.event import StoredEvent, cut_unread, pop_passed_by, pop_scan_end
from outbox_relay.domain.outcomes import DELIVERED
from outbox_relay.domain.routing import like_pattern
from outbox_relay.domain.window import Position, next_slice, nothing_new, position_after
from outbox_relay.postgres.log import MOST_PAYLOAD, TickResult
from outbox_relay.postgres.rows import NewRow
from outbox_relay.postgres.shards import Claimed
from outbox_relay.postgres.store import Store
from outbox_relay.relay.replay_reader import ReplayLog
from outbox_relay.relay.sink_spec import ReplaySpec

LEASE_SECONDS = 3600.0
MANY_IDS = 1_000_000
MANY_BYTES = 1 << 30
SIZES = (None, 1, 2000)
"""Sizes of small events, of which each read draws one; None reads events of every size."""
RECORDED = 0.2
"""Share of the deliveries that leave a record."""


@dataclass
class Received:
    """The events that the destination of a sink has received, and those of them that were settled so that it counts."""

    delivered: set[int] = field(default_factory=set[int])
    settled: set[int] = field(default_factory=set[int])


@dataclass
class Piece:
    """A read of one shard: its place, and the events that are left to do, by index."""

    start: Position
    events: list[StoredEvent]
    end: Position
    left: set[int]

    @property
    def settled(self) -> Position:
        """The position after the events that are done without a gap."""
        if not self.left:
            return self.end
        first = min(self.left)
        return self.start.at(self.events[first - 1].id) if first else self.start


@dataclass
class Reading:
    """One shard of one reader."""

    epoch: int
    position: Position
    pieces: list[Piece] = field(default_factory=list[Piece])

    @property
    def settled(self) -> Position:
        """The position that may be written."""
        return next((piece.settled for piece in self.pieces if piece.left), self.position)

    def done(self) -> list[int]:
        """Return the ids of the events before that position."""
        ids: list[int] = []
        for piece in self.pieces:
            first = min(piece.left, default=len(piece.events))
            ids += [event.id for event in piece.events[:first]]
            if piece.left:
                break
        return ids


class Reader:
    """A relay's session for one sink: claimed shards, read under the patterns of one generation."""

    def __init__(
        self, store: Store, sink: str, generation: int, patterns: Collection[str], drawn: random.Random
    ) -> None:
        self.sink = sink
        self.generation = generation
        self.relay = uuid4()
        self.readings: dict[int, Reading] = {}
        self.draining = False
        self.lost = False
        self._types = None if "*" in patterns else [like_pattern(pattern) for pattern in patterns]
        self._store = store
        self._settlements: Store | ReplayLog = store
        self._drawn = drawn
        self._sizes = random.Random(generation)  # apart, so that histories with a known seed stay the same
        self._tick: TickResult | None = None
        self._versions = -1
        self._rows: list[tuple[NewRow, int]] = []
        self._records: list[AttemptRecord] = []
        self.parked = set[int]()
        """The ids of the events that it made rows."""

    def _claimed(self) -> list[Claimed]:
        """Claim every shard that has no owner."""
        self._store.renew_sessions(self.relay, [self.sink], LEASE_SECONDS)
        return self._store.claim_shards(self.sink, self.relay, self.generation, 64, known=self.readings)

    def claim(self, shards: Collection[int]) -> dict[int, int]:
        """Claim every shard that has no owner; return the epochs of those among ``shards``."""
        claimed = self._claimed()
        epochs = {c.shard: c.epoch for c in claimed if c.shard in shards}
        if epochs:
            positions = self._store.positions(self.sink, list(epochs))
            self.readings |= {shard: Reading(epoch, positions[shard]) for shard, epoch in epochs.items()}
        return epochs

    def tick(self) -> None:
        """Take a tick, and read no more if another generation is in force or the sink has another name."""
        self._tick = self._store.tick()
        if self._tick.config_versions != self._versions:
            self._versions = self._tick.config_versions
            rows = [row for row in self._store.sinks([self.sink]) if row.name == self.sink]
            self.draining |= not rows or rows[0].generation != self.generation

    def read(self, received: Received) -> None:
        """Read a few events of one shard, and deliver some of them."""
        if self._tick is None or self.draining or self.lost or not self.readings:
            return
        shard = self._drawn.choice(sorted(self.readings))
        reading = self.readings[shard]
        if reading.position.b is None:
            if nothing_new(reading.position.a, self._tick.tick):
                return
            reading.position = reading.position.opened(self._tick.tick)
        piece = self._piece(shard, reading.position)
        reading.pieces.append(piece)
        reading.position = piece.end
        for index in sorted(piece.left):
            self._begin(shard, piece, index, received)

    def _piece(self, shard: int, start: Position) -> Piece:
        slice_ = next_slice(start, MANY_IDS, self._store.floor())
        most = self._drawn.choice([1, 3, 100])
        assert start.b is not None
        events, is_cut = list[StoredEvent](), True
        window = ([shard], self._types, start.a, start.b, slice_.after, slice_.upto, most)
        if not slice_.late and (size := self._sizes.choice(SIZES)) is not None:
            events = self._store.read_small(*window, size, most_payload=MANY_BYTES)
            is_cut = cut_unread(events)
        if is_cut and not events:
            ask, is_cut = self._store.read_late if slice_.late else self._store.read_rest, False
            events = ask(*window, MANY_BYTES)
        upto = pop_scan_end(events)
        if is_cut or len(events) >= most:
            upto = events[-1].id
        end = position_after(start, slice_) if upto is None else start.at(upto)
        discarded = self._store.discarded(self.sink, [(e.id, UUID(e.uid)) for e in events])
        return Piece(start, events, end, {n for n, event in enumerate(events) if event.id not in discarded})

    def _begin(self, shard: int, piece: Piece, index: int, received: Received) -> None:
        """Deliver an event, park it, or leave it in flight."""
        event = piece.events[index]
        match self._drawn.choice(["deliver"] * 6 + ["waiting", "dead", "leave"]):
            case "deliver":
                received.delivered.add(event.id)
                piece.left.discard(index)
                if self._drawn.random() < RECORDED:
                    self._records += filter(None, [delivery_record("all", event, DELIVERED, 0, time.monotonic())])
            case "waiting" | "dead" as state:
                self.parked.add(event.id)
                self._rows.append((NewRow(event.id, shard, state, ordered=False), shard))
                piece.left.discard(index)
            case _:
                pass

    def finish(self, received: Received) -> None:
        """Deliver what is in flight."""
        for reading in self.readings.values():
            for piece in reading.pieces:
                received.delivered.update(piece.events[index].id for index in piece.left)
                piece.left.clear()

    def settle(self) -> dict[int, list[int]]:
        """Write rows and positions. Return the ids of the events that the positions of each shard cover."""
        if self.lost:
            return {}
        epochs = {shard: reading.epoch for shard, reading in self.readings.items()}
        positions = {shard: (reading.epoch, reading.settled) for shard, reading in self.readings.items()}
        rows, self._rows = [row for row, _ in self._rows], []
        records, self._records = self._records, []
        try:
            self._settlements.settle(*(self.sink, self.relay, positions, rows, epochs), records=records, relay="reader")
        except LeaseLost:
            self.lost = True
            return {}
        return {shard: reading.done() for shard, reading in self.readings.items()}

    def release(self) -> None:
        """Release every shard; nothing may be in flight."""
        held = {shard: reading.epoch for shard, reading in self.readings.items()}
        self._store.release_shards(self.sink, self.relay, held)


class ReplayReader(Reader):
    """A relay's session for one replay, which reads and settles through the product's ``ReplayLog``."""

    def __init__(self, store: Store, number: int, generation: int, drawn: random.Random) -> None:
        super().__init__(store, f"~{number}", generation, ["*"], drawn)
        self.number = number
        self._log = self._settlements = ReplayLog(store, ReplaySpec(number))

    def claim(self, shards: Collection[int]) -> dict[int, int]:
        """Claim every shard that has no owner; those that are not among ``shards`` have no events."""
        claimed = self._claimed()
        epochs = {c.shard: c.epoch for c in claimed}
        if epochs:
            positions = self._log.positions(list(epochs), server=None)
            self.readings |= {shard: Reading(epoch, positions[shard]) for shard, epoch in epochs.items()}
            for shard in self.readings.keys() - set(shards):
                self.readings[shard].position = _end(positions[shard])
        return {shard: epoch for shard, epoch in epochs.items() if shard in shards}

    def read(self, received: Received) -> None:
        """Read a few events of one shard that is not at its end, and deliver some of them."""
        unread = sorted(shard for shard, reading in self.readings.items() if reading.position.b is not None)
        if self.lost or not unread:
            return
        shard = self._drawn.choice(unread)
        reading = self.readings[shard]
        try:
            piece = self._piece(shard, reading.position)
        except StatementFailed:  # a rebase came, and the replay has not adopted it
            self.lost = True
            return
        reading.pieces.append(piece)
        reading.position = piece.end
        for index in sorted(piece.left):
            self._begin(shard, piece, index, received)

    def _piece(self, shard: int, start: Position) -> Piece:
        slice_ = next_slice(start, MANY_IDS, self._store.floor())
        most = self._drawn.choice([1, 3, 100])
        events = self._log.read([shard], slice_, most, MANY_BYTES, MOST_PAYLOAD, None)
        upto = events[-1].id if len(events) >= most else None
        end = position_after(start, slice_) if upto is None else start.at(upto)
        passed_by = pop_passed_by(events)
        self._log.take(events, passed_by)
        return Piece(start, events, end, set(range(len(events))))


def _end(position: Position) -> Position:
    """Return the end of the window of ``position``."""
    return position if position.b is None else position_after(position, next_slice(position, MANY_IDS, 0))
