"""Settling: what was delivered becomes positions, what was not becomes rows, in one transaction after another.

Strictly serial per sink. If a settlement fails or its outcome is unknown, the exception ends the session, and
the sink starts again from the ledger: a later settlement would cover rows that were never written.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from uuid import UUID

from outbox_relay.domain.errors import SessionReset
from outbox_relay.domain.in_flight import BlockedKeys, Chunk, ShardGroup
from outbox_relay.domain.window import Position
from outbox_relay.postgres.rows import NewRow
from outbox_relay.postgres.store import Store
from outbox_relay.relay.leases import Holding
from outbox_relay.relay.portions import write_in_portions

FLUSH_SECONDS = 0.1
"""Progress is written at least this often: a crash repeats at most what was delivered since."""
FORWARD_SECONDS = 5.0
"""Shards without events are brought forward this often: reading them from an older tick finds nothing."""
MOST_EVENTS = 20_000
MOST_CHUNKS = 64
MOST_BYTES = 64 << 20
"""Bounds of what is read and not settled, of one sink."""


class Settling:
    """What is in hand of one sink, and its way into the database, on the ``server`` that it was read from alone."""

    def __init__(self, store: Store, holding: Holding, relay: UUID, server: str | None = None) -> None:
        self._store = store
        self._holding = holding
        self._relay = relay
        self.server = server
        self._chunks: deque[Chunk] = deque()
        self._rows: list[NewRow] = []
        self._writing = 0
        self._progressed: dict[int, Chunk] = {}
        self._written: dict[int, Position] = {}
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()
        self._room = asyncio.Event()
        self._commits = asyncio.Condition()
        self._one_at_a_time = asyncio.Lock()
        self._in_doubt = False
        self._flushed_at = self._forwarded_at = time.monotonic()
        self.readers: list[ShardGroup] = []
        """Every reader whose shards are ours, those that are leaving included."""
        self.blocked = BlockedKeys()

    # -- what comes into hand -------------------------------------------------------------------------------

    def adopt(self, reader: ShardGroup) -> None:
        """The shards of ``reader`` stand in the ledger where it stands."""
        self.readers.append(reader)
        self._written.update(dict.fromkeys(reader.shards, reader.position))

    def drop(self, reader: ShardGroup) -> None:
        """The shards of ``reader`` are no longer ours."""
        self.readers.remove(reader)
        self.blocked.forget(reader.shards)
        for shard in reader.shards:
            self._written.pop(shard, None)

    def take(self, reader: ShardGroup, chunk: Chunk) -> None:
        """``chunk`` was read for ``reader``."""
        reader.take(chunk)
        if chunk.events:
            self._chunks.append(chunk)

    async def room(self, wake: asyncio.Event) -> bool:
        """Wait until another chunk may be read, or until ``nudge`` when ``wake`` is set; returns whether it may."""
        while not self._has_room():
            if wake.is_set():
                return False
            self._room.clear()
            await self._room.wait()
        return True

    def nudge(self) -> None:
        """Whoever waits for room looks again."""
        self._room.set()

    def _has_room(self) -> bool:
        while self._chunks and self._chunks[0].finished:
            self._chunks.popleft()
        open_chunks = [chunk for chunk in self._chunks if not chunk.finished]
        return (
            len(self._chunks) < MOST_CHUNKS
            and sum(len(chunk.events) for chunk in open_chunks) < MOST_EVENTS
            and sum(chunk.size for chunk in open_chunks) < MOST_BYTES
        )

    @property
    def in_hand(self) -> int:
        """Events that were read and are neither delivered nor parked."""
        return sum(len(chunk.undone()) for chunk in self._chunks if not chunk.finished)

    @property
    def unsettled(self) -> int:
        """Rows that are made and not in the database, as far as is known."""
        return len(self._rows) + self._writing

    # -- what becomes of it -----------------------------------------------------------------------------------

    def done(self, chunk: Chunk, index: int | None = None) -> None:
        """The event at ``index``, or every event of ``chunk``, was delivered."""
        if index is None:
            chunk.settle_all()
        else:
            chunk.settle(index)
        self._progress(chunk)

    def park(self, chunk: Chunk, index: int, row: NewRow, *, blocks: bool) -> int:
        """The event at ``index`` becomes ``row``; returns the number of the settlement that writes it.

        With ``blocks``, later events of its key must become rows behind it.
        """
        event = chunk.events[index]
        if blocks and event.key is not None:
            self.blocked.touch(event.key, event.shard)
        self._rows.append(row)
        chunk.settle(index)
        self._progress(chunk)
        self._urgent.set()
        return self.blocked.collecting

    def _progress(self, chunk: Chunk) -> None:
        self._progressed[id(chunk)] = chunk
        self._changed.set()
        self._room.set()

    # -- into the database ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Settle as things change, until cancelled. Raises ``SessionReset`` or ``DatabaseUnavailable``."""
        while True:
            await _within(FORWARD_SECONDS, self._changed)
            if not self._rows:
                await _within(self._flushed_at + FLUSH_SECONDS - time.monotonic(), self._urgent)
            await self.flush(everything=time.monotonic() - self._forwarded_at >= FORWARD_SECONDS)

    async def flush(self, *, everything: bool = False) -> None:
        """Write what has changed now: rows, and the positions of shards that delivered something.

        With ``everything``, also the positions of shards that only moved on. Raises ``SessionReset`` once a settlement
        did not come to its end: whoever waited for its turn meanwhile may get it before the session is ended.
        """
        async with self._one_at_a_time:
            if self._in_doubt:
                raise SessionReset(f"sink {self._holding.sink}: a settlement did not come to its end")
            self._in_doubt = True
            self._changed.clear()
            self._urgent.clear()
            rows, self._rows = self._rows, []
            self._writing = len(rows)
            number = self.blocked.begin()
            positions = self._positions(everything)
            if rows or positions:
                epochs = self._holding.epochs(range(64))
                fenced = {s: (epochs[s], p) for s, p in positions.items() if s in epochs}
                await self._write(fenced, rows, epochs)
                self._written.update(positions)
                await self._forget_crashes(positions)
            self._flushed_at = time.monotonic()
            self.blocked.commit(number)
            self._in_doubt = False
            self._writing = 0
        async with self._commits:
            self._commits.notify_all()

    async def _write(
        self, positions: dict[int, tuple[int, Position]], rows: list[NewRow], epochs: dict[int, int]
    ) -> None:
        """Write a settlement; if the database fails with it, in smaller ones, the positions with the last of its rows.

        Raises ``StatementFailed`` when even single rows fail again and again.
        """
        sink, left = self._holding.sink, rows

        async def write(most: int) -> bool:
            nonlocal left
            part, behind = left[:most], left[most:]
            covered = {} if behind else positions
            await self._store.settle(sink, self._relay, covered, part, epochs, server=self.server)
            left = behind
            self._writing = len(left)
            return bool(left)

        await write_in_portions(len(rows), write)

    async def committed(self, number: int) -> None:
        """Wait until the settlement with this number is in the database."""
        async with self._commits:
            await self._commits.wait_for(lambda: self.blocked.committed >= number)

    def _positions(self, everything: bool) -> dict[int, Position]:
        progressed, self._progressed = self._progressed, {}
        moved = {event.shard for chunk in progressed.values() for event in chunk.events}
        if everything:
            self._forwarded_at = time.monotonic()
        positions: dict[int, Position] = {}
        for reader in self.readers:
            settled = reader.settled
            for shard in reader.shards if everything else reader.shards & moved:
                if self._written.get(shard) != settled:
                    positions[shard] = settled
        return positions

    async def _forget_crashes(self, moved: dict[int, Position]) -> None:
        crashed = [s for s, lease in self._holding.held.items() if lease.crashes and s in moved]
        if crashed:
            epochs = self._holding.epochs(crashed)
            for shard in crashed:
                self._holding.held[shard] = self._holding.held[shard]._replace(crashes=0)
            await self._store.reset_crashes(self._holding.sink, self._relay, epochs)


async def _within(seconds: float, event: asyncio.Event) -> None:
    """Wait for ``event``, at most ``seconds``."""
    if seconds <= 0 or event.is_set():
        return
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
