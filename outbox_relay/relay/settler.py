"""The settlement of events: positions and rows, written in one transaction.

Settlements of a sink are strictly serial. If one fails or its outcome is unknown, the exception ends the session, and
the sink starts from the stored positions: a later settlement would cover rows that were never written.
"""

from __future__ import annotations

import asyncio
import time
from uuid import UUID

from outbox_relay.domain.errors import SessionReset
from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.in_flight import Chunk, InFlight
from outbox_relay.domain.window import Position
from outbox_relay.postgres.rows import NewRow
from outbox_relay.postgres.store import Store
from outbox_relay.relay.portions import write_in_portions
from outbox_relay.relay.sink_leases import SinkLeases

FLUSH_SECONDS = 0.1
"""Maximum interval between two settlements while events are delivered. A crash repeats at most those since the last."""
FORWARD_SECONDS = 5.0
"""Interval at which the positions of shards without events are moved on. Reading them from an older tick finds none."""
MOST_EVENTS = 20_000
"""Maximum number of events of one sink in chunks that are not settled."""
MOST_CHUNKS = 64
"""Maximum number of chunks of one sink that are not settled."""
MOST_BYTES = 64 << 20
"""Maximum size in memory of the chunks of one sink that are not settled."""


class Settler:
    """Writes what became of the events in flight to the server they were read from.

    ``server`` is the incarnation of that server.
    """

    def __init__(
        self, store: Store, leases: SinkLeases, relay: UUID, in_flight: InFlight, server: str | None = None
    ) -> None:
        self._store = store
        self._leases = leases
        self._relay = relay
        self._in_flight = in_flight
        self.server = server
        self._rows: list[NewRow] = []
        self._writing = 0
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()
        self._reader_waits = False
        self._commits = asyncio.Condition()
        self._one_at_a_time = asyncio.Lock()
        self._in_doubt = False
        self._flushed_at = self._forwarded_at = time.monotonic()

    @property
    def unsettled(self) -> int:
        """The number of new rows that are not known to be in the database."""
        return len(self._rows) + self._writing

    def has_capacity(self) -> bool:
        """Return True if another chunk may be read.

        If not, the wake event of the sink is set once one may.
        """
        self._reader_waits = not self._in_flight.has_capacity(MOST_CHUNKS, MOST_EVENTS, MOST_BYTES)
        return not self._reader_waits

    # -- outcomes of events -----------------------------------------------------------------------------------

    def done(self, chunk: Chunk, index: int | None = None) -> None:
        """Record that the event at ``index``, or every event of ``chunk``, was delivered."""
        self._in_flight.settle(chunk, index)
        self._progress(chunk)

    def park(self, chunk: Chunk, index: int, row: NewRow, *, blocks: bool) -> int:
        """Make the event at ``index`` a row.

        Return the number of the settlement that writes the row.

        With ``blocks``, later events of its key become rows behind it.
        """
        number = self._in_flight.park(chunk, index, blocks=blocks)
        self._rows.append(row)
        self._progress(chunk)
        self._urgent.set()
        return number

    def _progress(self, chunk: Chunk) -> None:
        """Record progress. Only a chunk that is finished gives the reader capacity."""
        self._changed.set()
        if self._reader_waits and chunk.finished and self.has_capacity():
            self._leases.wake.set()

    # -- settlements ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Settle as things change, until cancelled.

        Raises ``SessionReset`` or ``DatabaseUnavailable``.
        """
        while True:
            await _within(FORWARD_SECONDS, self._changed)
            if not self._rows:
                await _within(self._flushed_at + FLUSH_SECONDS - time.monotonic(), self._urgent)
            await self.flush(everything=time.monotonic() - self._forwarded_at >= FORWARD_SECONDS)

    async def flush(self, *, everything: bool = False) -> None:
        """Write the new rows, and the positions of shards with settled events.

        With ``everything``, also write the positions of shards that only moved on. Raises ``SessionReset`` if an
        earlier settlement did not finish: a caller that waited for its turn may get it before the session has ended.
        """
        async with self._one_at_a_time:
            if self._in_doubt:
                raise SessionReset(f"sink {self._leases.sink}: a settlement did not come to its end")
            self._in_doubt = True
            self._changed.clear()
            self._urgent.clear()
            rows, self._rows = self._rows, []
            self._writing = len(rows)
            if everything:
                self._forwarded_at = time.monotonic()
            number, positions = self._in_flight.begin_settlement(everything=everything)
            if rows or positions:
                await self._write(positions, rows)
                self._in_flight.record_written(positions)
                await self._forget_crashes(positions)
            self._flushed_at = time.monotonic()
            self._in_flight.blocked.commit(number)
            self._in_doubt = False
            self._writing = 0
        async with self._commits:
            self._commits.notify_all()

    async def _write(self, positions: dict[int, Position], rows: list[NewRow]) -> None:
        """Write a settlement.

        If the database fails with it, write smaller ones, the positions with the last rows.

        Raises ``StatementFailed`` when even single rows fail repeatedly.
        """
        sink, left = self._leases.sink, rows
        epochs = self._leases.epochs(range(SHARDS))
        fenced = {shard: (epochs[shard], position) for shard, position in positions.items() if shard in epochs}

        async def write(most: int) -> bool:
            nonlocal left
            portion, behind = left[:most], left[most:]
            covered = {} if behind else fenced
            await self._store.settle(sink, self._relay, covered, portion, epochs, server=self.server)
            left = behind
            self._writing = len(left)
            return bool(left)

        await write_in_portions(len(rows), write)

    async def committed(self, number: int) -> None:
        """Wait until the settlement with this number is in the database."""
        async with self._commits:
            await self._commits.wait_for(lambda: self._in_flight.blocked.committed >= number)

    async def _forget_crashes(self, moved: dict[int, Position]) -> None:
        crashed = [s for s, lease in self._leases.held.items() if lease.crashes and s in moved]
        if crashed:
            epochs = self._leases.epochs(crashed)
            self._leases.forget_crashes(crashed)
            await self._store.reset_crashes(self._leases.sink, self._relay, epochs)


async def _within(seconds: float, event: asyncio.Event) -> None:
    """Wait at most ``seconds`` for ``event``."""
    if seconds <= 0 or event.is_set():
        return
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
