"""The rows of ``delivery``: claimed with leases, delivered, settled under the fence of their lease.

Any relay that serves a sink may claim its rows. A row of a key is claimed only when no earlier row of its key
takes part in the order, or together with those before it for a sink that keeps the order of its calls; so the rows of a
key come one after another, whoever delivers them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from uuid import UUID, uuid4

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import SessionReset, StatementFailed
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.outcomes import (
    DELIVERED,
    Dead,
    Delivered,
    Done,
    Retry,
    StandStill,
    Unavailable,
    Verdict,
    decide,
)
from outbox_relay.postgres.rows import MOST_PAYLOAD, ClaimedRow, RowUpdate
from outbox_relay.postgres.store import Store
from outbox_relay.relay.dispatch import LEASE_MARGIN_SECONDS, Desk
from outbox_relay.relay.gate import Pass
from outbox_relay.relay.portions import (
    FIRST_PAUSE_SECONDS,
    MOST_TRIES,
    SHRINK,
    is_for_its_size,
    pause,
    write_in_portions,
)

POLL_SECONDS = 1.0
"""How often rows are looked for that nobody here knows of, the heads of all keys among them."""
SWEEP_SECONDS = 5.0
"""The same for held rows while no key is blocked here: only a relay that crashed leaves such rows behind."""
BUSY_POLL_SECONDS = 0.1
"""The same while keys are blocked."""
MOST_ROWS = 1000
"""Rows in one claim, at most."""
MOST_UNSETTLED = 4 * MOST_ROWS
"""Outcomes that wait to be written, about: no row is claimed while there are as many."""
MOST_BYTES = 16 << 20
"""Bytes of payload, key and headers in one claim, at most, beyond the first row."""
MOST_CLAIMS = 5
"""A row that was claimed this often without ever being settled is dead: it stops whoever delivers it."""
MOST_KEYS = 1000
"""Keys in one question, at most, and in one sweep."""
MOST_PAUSE_SECONDS = 1.0
"""Longest pause between two claims that fail."""


class Portion:
    """How much one claim may hold: less after one that failed, more after those that did not."""

    def __init__(self) -> None:
        self.rows = MOST_ROWS
        self.payload_bytes = MOST_BYTES
        self.failed = 0
        """Claims in a row that failed."""
        self.bare = False
        """Whether not even a single row could be claimed: the next comes without its payload."""

    def pause_seconds(self) -> float:
        """Return how long to wait before the next claim, after one that failed."""
        return min(MOST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0**self.failed)

    def failure(self, error: StatementFailed) -> None:
        """Claim less next time, unless the failure says nothing about the size."""
        self.failed += 1
        if not is_for_its_size(error):
            return
        self.bare = self.rows == 1
        self.rows = max(1, self.rows // SHRINK)
        self.payload_bytes = self.payload_bytes // SHRINK if self.rows > 1 else 0

    def success(self) -> None:
        """Claim more again."""
        self.failed = 0
        if not self.bare:
            self.rows = min(MOST_ROWS, 2 * self.rows)
            self.payload_bytes = min(MOST_BYTES, max(1 << 10, 2 * self.payload_bytes))
        self.bare = False


class Rows:
    """Everything this relay does with the rows of one sink."""

    def __init__(self, desk: Desk, store: Store, relay: UUID, log: BoundLogger) -> None:
        self._desk = desk
        self._store = store
        self._relay = relay
        self._log = log
        self._wake = asyncio.Event()
        self._due_at = float("inf")
        self._asked_at = self._swept_at = self._suspected_at = float("-inf")
        self._swept: str | None = None
        self._portion = Portion()
        self._suspects = self._suspect_was_last = False
        self._heads: set[str] = set()
        self._doubtful: list[UUID] = []
        """Leases of claims that failed here and may have taken effect in the database."""
        self._tasks: asyncio.TaskGroup | None = None
        self._under_way = 0
        self._done: list[ClaimedRow] = []
        self._back: list[tuple[ClaimedRow, RowUpdate]] = []
        self._settle = asyncio.Event()
        self._settled = asyncio.Event()

    # -- told by others ---------------------------------------------------------------------------------------

    def due_in(self, seconds: float) -> None:
        """A row will be due in ``seconds``."""
        self._due_at = min(self._due_at, time.monotonic() + seconds)
        self._wake.set()

    def overdue(self, row: ClaimedRow, leave: Pass, verdict: Awaitable[Verdict]) -> None:
        """``row`` was made of a request that is under way: settle it by the ``verdict`` to come.

        Raises ``SessionReset`` when the session is ending, since nothing is settled after that.
        """
        if self._tasks is None:
            raise RuntimeError("rows are not being settled")
        later = self._settle_later(row, leave, verdict)
        try:
            self._tasks.create_task(later)
        except RuntimeError:  # the group is shutting down
            later.close()
            raise SessionReset(f"sink {self._desk.spec.name}: the session is ending") from None
        self._under_way += 1

    async def _settle_later(self, row: ClaimedRow, leave: Pass, verdict: Awaitable[Verdict]) -> None:
        try:
            self._decide(row, await verdict, leave)
        finally:
            self._under_way -= 1

    @property
    def under_way(self) -> int:
        """Rows that are being delivered here or wait to be settled."""
        return self._under_way + len(self._done) + len(self._back)

    # -- the loops ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Claim, deliver and settle rows, until cancelled. Raises ``SessionReset`` or ``DatabaseUnavailable``."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._settling())
            tasks.create_task(self._unblocking())
            while True:
                await self._pause()
                if self._desk.holding.serving:
                    await self._claim_and_deliver(tasks)
                else:
                    await asyncio.sleep(BUSY_POLL_SECONDS)

    async def _pause(self) -> None:
        """Wait until a row may be due."""
        most = BUSY_POLL_SECONDS if len(self._desk.settling.blocked) else POLL_SECONDS
        while not self._heads:
            left = min(self._due_at, self._asked_at + most) - time.monotonic()
            if left <= 0:
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(left):
                    await self._wake.wait()
            except TimeoutError:
                return

    async def _claim_and_deliver(self, tasks: asyncio.TaskGroup) -> None:
        """One claim and what follows from it. Only a probe is claimed while the circuit is not closed.

        A slot comes before the leave to send, as for events of the log: whoever has the probe never waits for a slot.
        """
        desk = self._desk
        await self._room()
        await desk.slots.acquire()
        leave = await desk.gate.admit()
        slots, most = await self._take_slots(1 if leave.probe else MOST_ROWS)
        sent = lease_clock()
        claimed = await self._claim(most)
        until = sent + LEASE_MARGIN_SECONDS
        rows = self._deliverable(claimed)
        calls = [rows[first : first + desk.sink.max_batch] for first in range(0, len(rows), desk.sink.max_batch)]
        self._give_slots(slots - len(calls))
        if rows:
            self._wake.set()
        elif leave.probe:
            desk.gate.unused(leave)
        for call in calls:
            if desk.sink.keeps_order and self._suspect_was_last:
                await self._call(call, until, leave)
            else:
                tasks.create_task(self._call(call, until, leave))

    async def _room(self) -> None:
        """Wait until outcomes are settled, where that has fallen behind."""
        while len(self._done) + len(self._back) >= MOST_UNSETTLED:
            self._settled.clear()
            await self._settled.wait()

    async def _take_slots(self, most: int) -> tuple[int, int]:
        """Calls that may begin, the one that was waited for among them, and how many rows they hold, up to ``most``."""
        desk, taken = self._desk, 1
        if desk.sink.keeps_order:
            return taken, min(most, desk.sink.max_batch)
        while taken < most and not desk.slots.full():
            await desk.slots.acquire()
            taken += 1
        return taken, taken

    def _give_slots(self, count: int) -> None:
        for _ in range(count):
            self._desk.slots.release()

    async def _claim(self, most: int) -> list[ClaimedRow]:
        """Rows to deliver now: one that may have killed its owners comes alone, in turn with the others."""
        now = time.monotonic()
        due = self._suspects or now - self._suspected_at >= POLL_SECONDS
        if due and not self._suspect_was_last and (suspect := await self._ask_suspect(now)):
            return suspect
        often = self._swept is not None or len(self._desk.settling.blocked)
        if now - self._swept_at >= (POLL_SECONDS if often else SWEEP_SECONDS) and len(self._heads) < MOST_KEYS:
            await self._sweep(now)
        heads = [self._heads.pop() for _ in range(min(len(self._heads), MOST_KEYS))]
        if self._due_at <= now:
            self._due_at = float("inf")
        most, most_bytes = min(most, self._portion.rows), self._portion.payload_bytes
        claimed = await self._ask(most, heads)
        if not claimed and self._suspect_was_last:
            claimed = await self._ask_suspect(now)
        else:
            self._suspect_was_last = False
        cut = len(claimed) == most or 2 * sum(len(row.event.payload or b"") for row in claimed) > most_bytes
        if cut or self._portion.failed:
            self._heads.update(heads)
        elif not claimed:
            self._asked_at = now
        return claimed

    async def _sweep(self, now: float) -> None:
        """Look at the next keys with held rows: what another relay left behind is found in the end.

        All have their turn, ``MOST_KEYS`` in a second, so that many cost no more than few.
        """
        self._swept_at = now
        try:
            keys = await self._store.held_keys(self._desk.spec.name, self._swept, MOST_KEYS)
        except StatementFailed:
            return
        self._swept = keys[-1] if len(keys) == MOST_KEYS else None
        self._heads.update(keys)

    async def _ask_suspect(self, now: float) -> list[ClaimedRow]:
        """One that may have killed its owners; ``_suspects`` says whether the last such question found one."""
        claimed = await self._ask(1, (), suspects=True)
        self._suspected_at, self._suspects, self._suspect_was_last = now, bool(claimed), bool(claimed)
        return claimed

    async def _ask(self, most: int, heads: Sequence[str], *, suspects: bool = False) -> list[ClaimedRow]:
        """Claim up to ``most`` rows: fewer after a claim that failed, none when this one does."""
        desk, portion, bare = self._desk, self._portion, self._portion.bare
        lease, lease_seconds = uuid4(), desk.sink.timeout_seconds + 2 * LEASE_MARGIN_SECONDS
        try:
            await self._give_doubtful_back()
            self._doubtful.append(lease)
            claimed = await self._store.claim_rows(
                desk.spec.name,
                self._relay,
                lease,
                lease_seconds,
                min(most, portion.rows),
                portion.payload_bytes,
                hold=desk.spec.hold,
                keys=heads,
                suspects=suspects,
                with_followers=desk.sink.keeps_order,
                most_payload=0 if bare else MOST_PAYLOAD,
            )
        except StatementFailed as error:
            if portion.failed.bit_count() <= 1:  # not each of many in a row
                self._log.warning("claim of rows failed", sink=desk.spec.name, reason=str(error), rows=portion.rows)
            portion.failure(error)
            await asyncio.sleep(portion.pause_seconds())
            return []
        self._doubtful.clear()
        portion.success()
        return [await self._whole(row) for row in claimed] if bare else claimed

    async def _give_doubtful_back(self) -> None:
        """Give back what a claim took whose answer did not come, or could not be loaded.

        Else its rows would wait for the end of their leases, with a claim counted against each that was never tried.
        """
        if self._doubtful:
            await self._store.give_leases_back(self._desk.spec.name, self._doubtful)
            self._doubtful.clear()

    async def _whole(self, row: ClaimedRow) -> ClaimedRow:
        """Return ``row`` with its payload, which it was claimed without; one that cannot be read is its fault.

        Raises ``StatementFailed`` when something else than the payload is the reason, again and again.
        """
        event, reason = row.event, ""
        if event.fault is None or not event.fault.startswith("payload"):
            return row
        for tries in range(1, MOST_TRIES):
            try:
                found = await self._store.row_payload(self._desk.spec.name, event.id, row.lease)
            except StatementFailed as error:
                if tries == MOST_TRIES - 1 and not is_for_its_size(error):
                    raise
                reason = str(error)
                await pause(tries)
            else:
                if found is None:
                    return row
                payload, fault = found
                return row._replace(event=event._replace(payload=payload or b"", fault=fault))
        return row._replace(event=event._replace(fault=f"its payload could not be read: {reason}"))

    def _deliverable(self, claimed: list[ClaimedRow]) -> list[ClaimedRow]:
        """Return the rows that may be sent.

        One that can never be is dead, and with when_dead = "hold" those behind it go back.
        """
        desk, rows, stopped = self._desk, list[ClaimedRow](), set[str]()
        for row in claimed:
            key = row.event.key if row.ordered else None
            if key in stopped:
                self._send_back(row, RowUpdate(row.event.id, row.lease, row.attempts))
            elif not self._stops_everybody(row) and not self._is_faulty(row):
                rows.append(row)
            elif key is not None and desk.spec.hold:
                stopped.add(key)
        return rows

    def _is_faulty(self, row: ClaimedRow) -> bool:
        """Whether the event of ``row`` cannot be delivered by any relay; then it is dead."""
        if row.event.fault is None:
            return False
        self._send_back(row, RowUpdate(row.event.id, row.lease, row.attempts, "dead", None, row.event.fault))
        return True

    def _stops_everybody(self, row: ClaimedRow) -> bool:
        """Whether ``row`` was claimed too often without an outcome; then it is dead."""
        if row.claims <= MOST_CLAIMS:
            return False
        error = f"claimed {row.claims - 1} times without an outcome: whoever delivers it may have died of it"
        self._send_back(row, RowUpdate(row.event.id, row.lease, row.attempts, "dead", None, error))
        return True

    # -- deliver ----------------------------------------------------------------------------------------------

    async def _deliver(self, rows: list[ClaimedRow], until: float, leave: Pass) -> None:
        self._under_way += len(rows)
        try:
            verdicts = await self._desk.sink.deliver([row.event for row in rows], until, rows[0].attempts + 1)
            self._sort_out(rows, verdicts, leave)
        finally:
            self._under_way -= len(rows)

    def _sort_out(self, rows: list[ClaimedRow], verdicts: Sequence[Verdict], leave: Pass) -> None:
        """Settle row by row; what was not delivered only because of a row before it says nothing of its own."""
        if verdicts.count(DELIVERED) == len(rows):
            self._desk.gate.delivered(leave)
            self._desk.slots.more()
            self._done += rows
            self._settle.set()
            return
        stopped: set[str] = set()
        for row, verdict in zip(rows, verdicts, strict=True):
            key = row.event.key if self._desk.keyed(row.event) else None
            if key in stopped and isinstance(verdict, Unavailable):
                self._send_back(row, RowUpdate(row.event.id, row.lease, row.attempts))
                continue
            self._decide(row, verdict, leave)
            if key is not None and not isinstance(verdict, Delivered):
                stopped.add(key)

    async def _call(self, rows: list[ClaimedRow], until: float, leave: Pass) -> None:
        try:
            await self._deliver(rows, until, leave)
        finally:
            self._desk.slots.release()

    # -- settle -----------------------------------------------------------------------------------------------

    def _decide(self, row: ClaimedRow, verdict: Verdict, leave: Pass) -> None:
        desk, event = self._desk, row.event
        judged = desk.judged(event, verdict, leave, failed_before=row.attempts > 0)
        match decide(row.attempts, judged, desk.spec.retry, desk.noise()):
            case Done():
                self._done.append(row)
                self._settle.set()
            case Retry(delay, attempts, error, status, attempt):
                self._send_back(row, RowUpdate(event.id, row.lease, attempts, "waiting", delay, error, status, attempt))
            case Dead(attempts, error, status, attempt):
                self._send_back(row, RowUpdate(event.id, row.lease, attempts, "dead", None, error, status, attempt))
            case StandStill(error, status, retry_after, attempt):
                delay = max(desk.spec.circuit.probe_seconds, retry_after or 0.0)
                self._send_back(row, RowUpdate(event.id, row.lease, row.attempts, None, delay, error, status, attempt))

    def _send_back(self, row: ClaimedRow, back: RowUpdate) -> None:
        self._back.append((row, back))
        self._settle.set()

    async def _settling(self) -> None:
        """Write outcomes as they come, all that have come at once."""
        while True:
            await self._settle.wait()
            self._settle.clear()
            await self._settle_now()

    async def _settle_now(self) -> None:
        """Write the outcomes that have come: in smaller portions, and again, when the database fails with them.

        What was not written stays, whatever happens. Raises ``StatementFailed`` in the end.
        """
        done, back = len(self._done), len(self._back)

        async def write(most: int) -> bool:
            nonlocal done, back
            if done:
                done -= await self._write_done(min(done, most))
            elif back:
                back -= await self._write_back(min(back, most))
            return bool(done or back)

        await write_in_portions(MOST_UNSETTLED, write)

    async def _write_done(self, count: int) -> int:
        done = self._done[:count]
        ours = await self._store.delete_rows(self._desk.spec.name, [(row.event.id, row.lease) for row in done])
        del self._done[:count]
        self._written(done, ours)
        self._follow(done)
        return count

    async def _write_back(self, count: int) -> int:
        back, hold = self._back[:count], self._desk.spec.hold
        ours = await self._store.update_rows(self._desk.spec.name, [b for _, b in back])
        del self._back[:count]
        self._written([row for row, _ in back], ours)
        for _, b in back:
            if b.due_in is not None:
                self.due_in(b.due_in)
        self._follow([row for row, b in back if b.state == "dead" and not hold])
        return count

    def _written(self, rows: list[ClaimedRow], ours: set[int]) -> None:
        self._settled.set()
        lost = sum(row.event.id not in ours for row in rows)
        if lost:
            sink = self._desk.spec.name
            self._log.warning("leases of rows were lost before they were settled", sink=sink, rows=lost)

    def _follow(self, gone: list[ClaimedRow]) -> None:
        """The rows behind those that are gone may be claimed."""
        self._heads.update(row.event.key for row in gone if row.ordered and row.event.key is not None)
        self._wake.set()

    async def _unblocking(self) -> None:
        """Ask for blocked keys, as long as there are any: none can be asked for before the next settlement is in."""
        settling = self._desk.settling
        while True:
            if not len(settling.blocked):
                await settling.committed(settling.blocked.collecting)
            await self._unblock()
            await asyncio.sleep(BUSY_POLL_SECONDS / 2)

    async def _unblock(self) -> None:
        """Deliver keys straight from the log again once nothing of them is left."""
        blocked, desk = self._desk.settling.blocked, self._desk
        asked_at, keys = blocked.settled(MOST_KEYS)
        if keys:
            server = desk.settling.server
            try:
                still = await self._store.still_blocked(desk.spec.name, keys, desk.spec.hold, server=server)
            except StatementFailed:  # they stay blocked, and are asked for again in their turn
                await asyncio.sleep(MOST_PAUSE_SECONDS)
            else:
                blocked.free(asked_at, keys, still)
