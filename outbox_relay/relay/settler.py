"""The settlement of events: positions and rows, written in one transaction.

Settlements of a sink are strictly serial. If one fails or its outcome is unknown, the exception ends the session, and
the sink starts from the stored positions: a later settlement would cover rows that were never written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol
from uuid import UUID

from outbox_relay.domain.attempts import AttemptRecord, delivery_record
from outbox_relay.domain.errors import DatabaseUnusable, LeaseLost, SessionReset, StatementFailed
from outbox_relay.domain.event import SHARDS, StoredEvent
from outbox_relay.domain.in_flight import Chunk, InFlight
from outbox_relay.domain.measures import DeadReason, SinkMeasures
from outbox_relay.domain.outcomes import Delivered, Verdict
from outbox_relay.domain.window import Position
from outbox_relay.postgres.rows import NewRow
from outbox_relay.relay.attempt_recorder import AttemptRecorder
from outbox_relay.relay.portions import write_in_portions
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.timing import timed

FLUSH_SECONDS = 0.1
"""Maximum interval between two settlements while events are delivered. A crash repeats at most those since the last."""
FORWARD_SECONDS = 5.0
"""Interval at which the positions of shards without events are moved on. Reading them from an older tick finds none."""
MOST_EVENTS = 20_000
"""Maximum number of events of one sink in chunks that are not settled."""
MOST_CHUNKS = 64
"""Maximum number of chunks of one sink that are not settled."""
MOST_RECORDED = 4_000
"""Maximum number of recorded deliveries in one statement, so that the event loop is not held up by their parameters."""
MOST_BYTES = 64 << 20
"""Maximum size in memory of the chunks of one sink that are not settled."""


class SettlementStore(Protocol):
    """The statements of a settlement: those of the ``Store``, or of a replay."""

    async def settle(
        self,
        sink: str,
        owner: UUID,
        positions: Mapping[int, tuple[int, Position]],
        rows: Sequence[NewRow],
        epochs: Mapping[int, int],
        *,
        records: Sequence[AttemptRecord] = (),
        relay: str | None = "",
        server: str | None = None,
    ) -> None:
        """Write positions (shard → epoch, position) and rows, all or none."""
        ...

    async def reset_crashes(self, sink: str, owner: UUID, held: Mapping[int, int]) -> None:
        """Reset the crash count of shards (shard → epoch)."""
        ...


class Settler:
    """Writes what became of the events in flight to the server they were read from.

    ``server`` is the incarnation of that server. Settlements are ``flush_seconds`` apart while events are delivered,
    and positions of shards without events are written every ``forward_seconds``.
    """

    def __init__(
        self,
        store: SettlementStore,
        leases: SinkLeases,
        relay: UUID,
        in_flight: InFlight,
        recorder: AttemptRecorder,
        server: str | None = None,
        forward_seconds: float = FORWARD_SECONDS,
        flush_seconds: float = FLUSH_SECONDS,
        measures: SinkMeasures | None = None,
    ) -> None:
        self._store = store
        self._leases = leases
        self._relay = relay
        self._in_flight = in_flight
        self.server = server
        self._recorder = recorder
        self._measures = measures or SinkMeasures()
        self._rows: list[NewRow] = []
        self._dead: list[DeadReason] = []
        self._records: list[AttemptRecord] = []
        self._recording = 0
        self._writing = 0
        self._changed = asyncio.Event()
        self._urgent = asyncio.Event()
        self._reader_waits = False
        self._commits = asyncio.Condition()
        self._one_at_a_time = asyncio.Lock()
        self._in_doubt = False
        self._forward_seconds = forward_seconds
        self._flush_seconds = flush_seconds
        self._flushed_at = self._forwarded_at = time.monotonic()

    @property
    def unsettled(self) -> int:
        """The number of new rows that are not known to be in the database."""
        return len(self._rows) + self._writing

    def has_capacity(self) -> bool:
        """Return True if another chunk may be read.

        If not, the wake event of the sink is set once one may.
        """
        unrecorded = len(self._records) + self._recording
        has_capacity = unrecorded < MOST_EVENTS and self._in_flight.has_capacity(MOST_CHUNKS, MOST_EVENTS, MOST_BYTES)
        self._reader_waits = not has_capacity
        return not self._reader_waits

    # -- outcomes of events -----------------------------------------------------------------------------------

    def done(self, chunk: Chunk, index: int | None = None) -> None:
        """Record that the event at ``index``, or every event of ``chunk``, was delivered."""
        self._in_flight.settle(chunk, index)
        self._progress(chunk)

    def record(self, events: Sequence[StoredEvent], verdicts: Sequence[Verdict]) -> None:
        """Record the deliveries among ``verdicts`` with the next settlement."""
        now = time.monotonic()
        for event, verdict in zip(events, verdicts, strict=True):
            if isinstance(verdict, Delivered) and (record := delivery_record("all", event, verdict, 0, now)):
                self._records.append(record)

    def park(self, chunk: Chunk, index: int, row: NewRow, *, blocks: bool, dead: DeadReason | None = None) -> int:
        """Make the event at ``index`` a row, which is dead for the reason ``dead`` if there is one.

        Return the number of the settlement that writes the row.

        With ``blocks``, later events of its key become rows behind it.
        """
        number = self._in_flight.park(chunk, index, blocks=blocks)
        self._rows.append(row)
        if dead is not None:
            self._dead.append(dead)
        self._progress(chunk)
        self._urgent.set()
        return number

    def _progress(self, chunk: Chunk) -> None:
        """Record progress. Only a chunk that is finished gives the reader capacity."""
        self._changed.set()
        if self._reader_waits and chunk.finished and self.has_capacity():
            self._leases.wake.set()

    def moved(self) -> None:
        """Make a settlement due, since a position moved without an event."""
        self._changed.set()

    # -- settlements ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Settle as things change, until cancelled.

        Raises ``SessionReset`` or ``DatabaseUnavailable``.
        """
        while True:
            await _within(FORWARD_SECONDS, self._changed)
            if not self._rows:
                await _within(self._flushed_at + self._flush_seconds - time.monotonic(), self._urgent)
            await self.flush(everything=time.monotonic() - self._forwarded_at >= self._forward_seconds)

    async def flush(self, *, everything: bool = False) -> None:
        """Write the new rows, and the positions of shards with settled events.

        With ``everything``, also write the positions of shards that only moved on. Raises ``SessionReset`` if an
        earlier settlement did not finish: a caller that waited for its turn may get it before the session has ended.
        """
        async with self._one_at_a_time:
            if self._in_doubt:
                raise SessionReset(f"sink {self._leases.sink}: a settlement did not finish")
            self._in_doubt = True
            self._changed.clear()
            self._urgent.clear()
            rows, self._rows = self._rows, []
            dead, self._dead = self._dead, []
            self._writing = len(rows)
            records, self._records = self._records, []
            self._recording = len(records)
            if everything:
                self._forwarded_at = time.monotonic()
            number, positions = self._in_flight.begin_settlement(everything=everything)
            if rows or positions or records:
                with timed(self._measures.settle):
                    await self._write(positions, rows, records)
                self._measures.died(dead)
                await self._forget_crashes(self._in_flight.record_written(positions))
            self._flushed_at = time.monotonic()
            self._in_flight.blocked.commit(number)
            self._in_doubt = False
            self._writing = 0
            self._recording = 0
        if records and self._reader_waits and self.has_capacity():
            self._leases.wake.set()
        async with self._commits:
            self._commits.notify_all()

    async def write_alone(self, write: Callable[[], Awaitable[Mapping[int, Position]]]) -> None:
        """Call ``write`` between two settlements. It writes positions itself, and returns them.

        Otherwise a settlement could write an earlier position of the same shard after it.

        Raises as ``flush`` and as ``write``. Unless ``write`` raises ``StatementFailed`` or ``DatabaseUnusable``, its
        outcome is in doubt, and no later settlement passes.
        """
        async with self._one_at_a_time:
            if self._in_doubt:
                raise SessionReset(f"sink {self._leases.sink}: a settlement did not finish")
            if self._leases.lost:
                raise LeaseLost(f"sink {self._leases.sink}: a shard was lost")
            self._in_doubt = True
            try:
                positions = await write()
            except (StatementFailed, DatabaseUnusable):
                self._in_doubt = False
                raise
            await self._forget_crashes(self._in_flight.record_written(positions))
            self._in_doubt = False

    async def _write(self, positions: dict[int, Position], rows: list[NewRow], records: list[AttemptRecord]) -> None:
        """Write a settlement.

        If the database fails with it, write smaller ones: rows, then ``records``, the positions with the last of them.

        Raises ``StatementFailed`` when even single rows fail repeatedly, and ``LeaseLost`` if a shard was lost: claimed
        again, its new epoch would pass the fence.
        """
        sink, left, unrecorded = self._leases.sink, rows, records
        if self._leases.lost:
            raise LeaseLost(f"sink {sink}: a shard was lost")
        epochs = self._leases.epochs(range(SHARDS))
        fenced = {shard: (epochs[shard], position) for shard, position in positions.items() if shard in epochs}

        async def write(most: int) -> bool:
            nonlocal left, unrecorded
            portion, behind = left[:most], left[most:]
            recorded, later = unrecorded[: most - len(portion)], unrecorded[most - len(portion) :]
            covered = {} if behind or later else fenced

            async def settle(name: str | None) -> None:
                await self._store.settle(
                    *(sink, self._relay, covered, portion, epochs), records=recorded, relay=name, server=self.server
                )

            carried = len(recorded) + sum(row.record is not None for row in portion)
            await self._recorder.settle(carried, settle)
            left, unrecorded = behind, later
            self._writing, self._recording = len(left), len(unrecorded)
            return bool(left or unrecorded)

        most = min(len(rows) + len(records), max(len(rows), MOST_RECORDED))
        await write_in_portions(most, write)

    async def committed(self, number: int) -> None:
        """Wait until the settlement with this number is in the database."""
        async with self._commits:
            await self._commits.wait_for(lambda: self._in_flight.blocked.committed >= number)

    async def _forget_crashes(self, advanced: Collection[int]) -> None:
        crashed = [s for s, lease in self._leases.held.items() if lease.crashes and s in advanced]
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
