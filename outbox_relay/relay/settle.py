"""The settlement of a session: what became of its events and rows, written to the server they were read from.

Settlements of a sink are strictly serial: the positions of a later one would cover rows that were never written. If the
outcome of one is unknown, the exception ends the session, and the sink starts from the stored positions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar
from uuid import UUID

from structlog.stdlib import BoundLogger

from outbox_relay.domain.attempts import AttemptRecord
from outbox_relay.domain.errors import DatabaseUnusable, LeaseLost, StatementFailed
from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.in_flight import Chunk, InFlight
from outbox_relay.domain.window import Position
from outbox_relay.postgres.rows import ClaimedRow, DeliveredRow, NewRow, RowUpdate
from outbox_relay.relay.measures import DeadReason, SinkMeasures
from outbox_relay.relay.sink_leases import SinkLeases

T = TypeVar("T")

FLUSH_SECONDS = 0.1
"""Maximum interval between two settlements while events are delivered. A crash repeats at most those since the last."""
REPLAY_FLUSH_SECONDS = 0.5
"""The same for a replay, which always writes the positions of all its shards."""
FORWARD_SECONDS = 5.0
"""Interval at which the positions of shards without events are moved on. Reading them from an older tick finds none."""
GATHER_SECONDS = 0.025
"""Maximum wait of an outcome of a row for others, while other rows are being delivered."""
MOST_EVENTS = 20_000
"""Maximum number of events of one sink in chunks that are not settled."""
MOST_CHUNKS = 64
"""Maximum number of chunks of one sink that are not settled."""
MOST_BYTES = 64 << 20
"""Maximum size in memory of the chunks of one sink that are not settled."""
MOST_ROWS = 4_000
"""Maximum number of rows and records in one statement, and of outcomes of rows beyond which no row is claimed."""
NEVER = float("inf")
MOST_TRIES = 6
"""Number of tries before a statement ends its session. They take at least two seconds."""
FIRST_PAUSE_SECONDS = 0.05
"""Pause after the first failed try, doubled after each further one."""
SHRINK = 8
"""Factor by which the next portion is smaller."""
NOT_FOR_ITS_SIZE = ("40", "55P03", StatementFailed.NO_CONNECTION)
"""SQLSTATEs of failures that a smaller statement would meet as well: deadlocks, serialisation, locks, no connection."""
SUSPEND_SECONDS = 5.0
"""Time for which no attempt is recorded after records were dropped, so that few settlements are written twice."""
MOST_CAUSES = 10
"""Maximum number of causes that are logged before attempts are recorded again."""
PASSING = (*NOT_FOR_ITS_SIZE, "57014")
"""SQLSTATEs of failures that may pass without a fix. Records are dropped only before they would end the session."""


def is_for_its_size(error: StatementFailed) -> bool:
    """Return whether a smaller statement may succeed where this one failed."""
    return not (error.sqlstate or "").startswith(NOT_FOR_ITS_SIZE)


def pause(failed: int) -> None:
    """Wait before a statement is repeated that failed ``failed`` times in a row."""
    time.sleep(FIRST_PAUSE_SECONDS * 2.0**failed)


class AttemptRecorder:
    """The records of one sink, which the settlements of its events and rows carry, under the name of ``relay``."""

    def __init__(self, relay: str, log: BoundLogger) -> None:
        self.dropped = 0
        """The number of records that were dropped since the start of the relay."""
        self._log = log
        self._relay = relay
        self._failures = 0
        self._suspended_until = float("-inf")
        self._causes = set[str]()
        self._dropped_before = 0

    def settle(self, records: int, write: Callable[[str | None], T]) -> T:
        """Call ``write`` with the name under which the attempts are recorded.

        If it fails with the records, call it again with None, which records none.

        Raises as ``write``.
        """
        if not records:
            return write(None)
        if time.monotonic() < self._suspended_until:
            return self._write_without(records, write)
        try:
            written = write(self._relay)
        except (StatementFailed, DatabaseUnusable) as error:
            self._failures += 1
            if self._may_pass(error):
                raise
            written = self._write_without(records, write)
            self._suspend(error, records)
            return written
        self._failures = 0
        self._resume()
        return written

    def _may_pass(self, error: StatementFailed | DatabaseUnusable) -> bool:
        passing = isinstance(error, StatementFailed) and (error.sqlstate or "").startswith(PASSING)
        return passing and self._failures < MOST_TRIES - 1

    def _write_without(self, records: int, write: Callable[[str | None], T]) -> T:
        written = write(None)
        self.dropped += records
        return written

    def _suspend(self, error: StatementFailed | DatabaseUnusable, records: int) -> None:
        """Drop records for a while. Each cause is logged once until attempts are recorded again."""
        self._suspended_until = time.monotonic() + SUSPEND_SECONDS
        if not self._causes:
            self._dropped_before = self.dropped - records
        cause = (error.sqlstate if isinstance(error, StatementFailed) else None) or str(error)
        if cause not in self._causes and len(self._causes) < MOST_CAUSES:
            self._causes.add(cause)
            dropped = self.dropped - self._dropped_before
            self._log.warning("attempts.dropped", reason=str(error), dropped=dropped)

    def _resume(self) -> None:
        if self._causes:
            self._log.info("attempts.recorded", dropped=self.dropped - self._dropped_before)
            self._causes.clear()


class SettlementStore(Protocol):
    """The statements of a settlement."""

    def settle(
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

    def reset_crashes(self, sink: str, owner: UUID, held: Mapping[int, int]) -> None:
        """Reset the crash count of shards (shard → epoch)."""
        ...

    def delete_rows(
        self, sink: str, done: Sequence[DeliveredRow], *, relay: str | None = "", only_tried: bool = False
    ) -> dict[int, bool]:
        """Delete delivered rows; return those whose lease was valid: id → whether a row of its key is left."""
        ...

    def update_rows(self, sink: str, updates: Sequence[RowUpdate], *, relay: str | None = "") -> set[int]:
        """Update rows that were not delivered; return the ids of those whose lease was valid."""
        ...


class Portion:
    """A write that the database may fail with: it is repeated in smaller parts, after a pause."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._most = MOST_ROWS
        self._failed = 0
        self.not_before = -NEVER
        """The time when the part that failed is repeated, in seconds of the clock."""

    def write(self, rows: int, write: Callable[[int], bool]) -> bool:
        """Call ``write`` with the size of a part until it returns False, since everything is written: return True then.

        Return False if a part failed, or its pause is not over. It has no effect, and is smaller the next time if its
        size may be the reason.

        Raises ``StatementFailed`` after ``MOST_TRIES`` failures in a row. If size may be the reason, a single row must
        have failed.
        """
        if self._now() < self.not_before:
            return False
        self._most = min(self._most, max(1, rows))
        try:
            while write(self._most):
                self._failed = 0
        except StatementFailed as error:
            self._failed += 1
            shrinks = is_for_its_size(error) and self._most > 1
            if self._failed >= MOST_TRIES and not shrinks:
                raise
            if shrinks:
                self._most = max(1, self._most // SHRINK)
            self.not_before = self._now() + FIRST_PAUSE_SECONDS * 2.0**self._failed
            return False
        self._most, self._failed, self.not_before = MOST_ROWS, 0, -NEVER
        return True


@dataclass(slots=True)
class Settlement:
    """Positions, with the new rows and records that they cover, which are written with them or before."""

    number: int
    positions: Mapping[int, Position]
    rows: Sequence[NewRow]
    records: Sequence[AttemptRecord]
    dead: Sequence[DeadReason]


class Settler:
    """Collects what became of events and rows, and writes it.

    ``server`` is the incarnation of the server that the events were read from. ``on_written`` is called with claimed
    rows whose outcomes are in the database: those, the ids of valid leases, the rows that others may wait for, and the
    number of rows that are gone.
    """

    def __init__(
        self,
        store: SettlementStore,
        leases: SinkLeases,
        relay: UUID,
        in_flight: InFlight,
        recorder: AttemptRecorder,
        server: str,
        now: Callable[[], float],
        on_written: Callable[[Sequence[ClaimedRow], Collection[int], Sequence[ClaimedRow], int], None],
        *,
        hold: bool = False,
        only_tried: bool = True,
        measures: SinkMeasures | None = None,
        of_replay: bool = False,
    ) -> None:
        self._store = store
        self._leases = leases
        self._relay = relay
        self._in_flight = in_flight
        self._recorder = recorder
        self.server = server
        self._now = now
        self._on_written = on_written
        self._hold = hold
        self._only_tried = only_tried
        self._measures = measures or SinkMeasures()
        self._rows: list[NewRow] = []
        self._dead: list[DeadReason] = []
        self._records: list[AttemptRecord] = []
        self._pending: Settlement | None = None
        self._done: list[tuple[ClaimedRow, AttemptRecord | None]] = []
        self._back: list[tuple[ClaimedRow, RowUpdate, DeadReason | None]] = []
        self._of_replay = of_replay
        self._flush_seconds = REPLAY_FLUSH_SECONDS if of_replay else FLUSH_SECONDS
        self._portions = tuple(Portion(now) for _ in range(3))
        self._at = NEVER
        self._flushed_at = self._forwarded_at = now()

    @property
    def unsettled(self) -> int:
        """The number of new rows that are not in the database."""
        return len(self._rows) + (len(self._pending.rows) if self._pending else 0)

    @property
    def changed_rows(self) -> int:
        """The number of claimed rows whose outcome is not in the database."""
        return len(self._done) + len(self._back)

    def has_capacity(self) -> bool:
        """Return True if another chunk may be read."""
        return len(self._records) < MOST_EVENTS and self._in_flight.has_capacity(MOST_CHUNKS, MOST_EVENTS, MOST_BYTES)

    # -- outcomes -----------------------------------------------------------------------------------------------

    def done(self, chunk: Chunk, index: int | None = None) -> None:
        """Record that the event at ``index``, or every event of ``chunk``, was delivered."""
        self._in_flight.settle(chunk, index)
        self.moved()

    def moved(self) -> None:
        """Write positions soon: some have moved."""
        self._at = min(self._at, self._flushed_at + self._flush_seconds)

    def record(self, record: AttemptRecord) -> None:
        """Record a delivery with the next settlement."""
        self._records.append(record)

    def park(self, chunk: Chunk, index: int, row: NewRow, *, blocks: bool, dead: DeadReason | None = None) -> None:
        """Make the event at ``index`` a row of the next settlement, which is dead for the reason ``dead`` if given.

        With ``blocks``, later events of its key become rows behind it.
        """
        self._in_flight.park(chunk, index, blocks=blocks)
        self._rows.append(row)
        if dead is not None:
            self._dead.append(dead)
        self._at = 0.0

    def finish(self, row: ClaimedRow, record: AttemptRecord | None) -> None:
        """Delete a row that was delivered."""
        self._done.append((row, record))
        self._gather(row)

    def send_back(self, row: ClaimedRow, back: RowUpdate, dead: DeadReason | None = None) -> None:
        """Leave a row that was not delivered as ``back`` states; ``dead`` is why it is dead."""
        self._back.append((row, back, dead))
        self._gather(row)

    def _gather(self, row: ClaimedRow) -> None:
        """Wait for more outcomes. A row that was claimed before without one does not: see ``MOST_CLAIMS``."""
        self._at = 0.0 if row.claims > 1 else min(self._at, self._now() + GATHER_SECONDS)

    # -- settlements --------------------------------------------------------------------------------------------

    def due_at(self, awaited: int) -> float:
        """Return when the next settlement is due, in seconds of the clock. ``awaited`` rows have no outcome yet."""
        repeated_at = max(portion.not_before for portion in self._portions)
        if self.changed_rows and not awaited:
            return repeated_at
        return min(self._at, self._forwarded_at + FORWARD_SECONDS if repeated_at == -NEVER else repeated_at)

    def settle(self, *, everything: bool = False) -> bool:
        """Write all that was collected. With ``everything``, also positions of shards that only moved on.

        Return True if all events and positions are written. What the database failed with is repeated by a later call.
        Outcomes of claimed rows do not wait for it, unless they are of new rows: those of slow calls that have ended.
        """
        now = self._now()
        everything = everything or self._of_replay or now - self._forwarded_at >= FORWARD_SECONDS
        written = self._write_pending()
        if written:
            self._begin(everything=everything)
            if everything:
                self._forwarded_at = now
            written = self._write_pending()
        self._flushed_at, self._at = self._now(), NEVER
        unwritten = {row.id for row in self._pending.rows} if self._pending else set[int]()
        unwritten.update(row.id for row in self._rows)
        self._write_done(unwritten)
        self._write_back(unwritten)
        return written

    def _begin(self, *, everything: bool) -> None:
        """Close the settlement that was collected, which is to be written before the next one is closed."""
        number, positions = self._in_flight.begin_settlement(everything=everything)
        if positions or self._rows or self._records:
            self._pending = Settlement(number, positions, self._rows, self._records, self._dead)
            self._rows, self._records, self._dead = [], [], []
        else:
            self._in_flight.blocked.commit(number)

    def _write_pending(self) -> bool:
        """Write rows and records in portions if need be, and the positions with the last of them.

        Return True if no settlement is left. Raises ``LeaseLost`` if a shard was lost.
        """
        pending = self._pending
        if pending is None:
            return True
        if not self._portions[0].write(len(pending.rows) + len(pending.records), self._write_part):
            return False
        self._pending = None
        self._measures.died(pending.dead)
        self.wrote(pending.positions)
        self._in_flight.blocked.commit(pending.number)
        return True

    def wrote(self, positions: Mapping[int, Position]) -> None:
        """Record positions that are in the database."""
        self.forget_crashes(self._in_flight.record_written(positions))

    def _write_part(self, most: int) -> bool:
        pending, leases = self._pending, self._leases
        assert pending is not None  # noqa: S101 - the caller has looked
        if leases.lost:
            raise LeaseLost(f"sink {leases.sink}: a shard was lost")
        epochs = leases.epochs(range(SHARDS))
        rows, records = pending.rows[:most], pending.records[: max(0, most - len(pending.rows))]
        left, later = pending.rows[len(rows) :], pending.records[len(records) :]
        fenced = dict[int, tuple[int, Position]]()
        if not left and not later:
            fenced = {s: (epochs[s], position) for s, position in pending.positions.items() if s in epochs}

        def settle(name: str | None) -> None:
            self._store.settle(
                *(leases.sink, self._relay, fenced, rows, epochs), records=records, relay=name, server=self.server
            )

        with self._measures.settle.time():
            self._recorder.settle(len(records) + sum(row.record is not None for row in rows), settle)
        pending.rows, pending.records = left, later
        return bool(left or later)

    def _write_done(self, unwritten: Collection[int]) -> None:
        self._done.sort(key=lambda done: done[0].event.id in unwritten)
        left = sum(row.event.id not in unwritten for row, _ in self._done)

        def write(most: int) -> bool:
            nonlocal left
            portion = self._done[: min(left, most)]
            deleted = [DeliveredRow(row.event.id, row.lease, record) for row, record in portion]

            def delete(name: str | None) -> dict[int, bool]:
                return self._store.delete_rows(self._leases.sink, deleted, relay=name, only_tried=self._only_tried)

            with self._measures.settle.time():
                ours = self._recorder.settle(sum(d.record is not None for d in deleted), delete)
            del self._done[: len(portion)]
            left -= len(portion)
            rows = [row for row, _ in portion]
            self._on_written(rows, ours.keys(), [row for row in rows if ours.get(row.event.id)], len(ours))
            return left > 0

        if left:
            self._portions[1].write(left, write)

    def _write_back(self, unwritten: Collection[int]) -> None:
        self._back.sort(key=lambda back: back[0].event.id in unwritten)
        left = sum(row.event.id not in unwritten for row, _, _ in self._back)

        def write(most: int) -> bool:
            nonlocal left
            portion = self._back[: min(left, most)]
            updates = [each for _, each, _ in portion]

            def update(name: str | None) -> set[int]:
                return self._store.update_rows(self._leases.sink, updates, relay=name)

            with self._measures.settle.time():
                ours = self._recorder.settle(sum(u.record is not None for u in updates), update)
            del self._back[: len(portion)]
            left -= len(portion)
            self._measures.died(dead for row, _, dead in portion if dead and row.event.id in ours)
            freed = [row for row, b, _ in portion if b.state == "dead" and not self._hold]
            self._on_written([row for row, _, _ in portion], ours, freed, 0)
            return left > 0

        if left:
            self._portions[2].write(left, write)

    def forget_crashes(self, advanced: Collection[int]) -> None:
        """Reset the crash count of shards whose position has advanced."""
        crashed = [s for s, lease in self._leases.held.items() if lease.crashes and s in advanced]
        if crashed:
            with suppress(StatementFailed):  # the next advance resets it
                self._store.reset_crashes(self._leases.sink, self._relay, self._leases.epochs(crashed))
                self._leases.forget_crashes(crashed)
