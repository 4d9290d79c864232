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

from outbox_relay.delivering import LEASE_MARGIN_SECONDS, Desk
from outbox_relay.errors import StartAgain
from outbox_relay.gate import Pass
from outbox_relay.log import Log
from outbox_relay.policy import DELIVERED, Dead, Delivered, Done, Retry, StandStill, Unavailable, Verdict, decide
from outbox_relay.store import ClaimedRow, RowBack, Store

POLL_SECONDS = 1.0
"""How often rows are looked for that nobody here knows of, the heads of all keys among them."""
BUSY_POLL_SECONDS = 0.1
"""The same while keys are blocked."""
MOST_ROWS = 1000
"""Rows in one claim, at most."""
MOST_UNSETTLED = 4 * MOST_ROWS
"""Outcomes that wait to be written, about: no row is claimed while there are as many."""
MOST_BYTES = 16 << 20
"""Payload bytes in one claim, at most, beyond the first row."""
MOST_CLAIMS = 5
"""A row that was claimed this often without ever being settled is dead: it stops whoever delivers it."""
MOST_KEYS = 1000
"""Keys in one question, at most."""


class Rows:
    """Everything this relay does with the rows of one sink."""

    def __init__(self, desk: Desk, store: Store, relay: UUID, log: Log) -> None:
        self._desk = desk
        self._store = store
        self._relay = relay
        self._log = log
        self._wake = asyncio.Event()
        self._due_at = float("inf")
        self._asked_at = self._swept_at = self._suspected_at = float("-inf")
        self._suspects = self._suspect_was_last = False
        self._heads: set[str] = set()
        self._tasks: asyncio.TaskGroup | None = None
        self._under_way = 0
        self._done: list[ClaimedRow] = []
        self._back: list[tuple[ClaimedRow, RowBack]] = []
        self._settle = asyncio.Event()
        self._settled = asyncio.Event()

    # -- told by others ---------------------------------------------------------------------------------------

    def due_in(self, seconds: float) -> None:
        """A row will be due in ``seconds``."""
        self._due_at = min(self._due_at, time.monotonic() + seconds)
        self._wake.set()

    def overdue(self, row: ClaimedRow, leave: Pass, verdict: Awaitable[Verdict]) -> None:
        """``row`` was made of a request that is under way: settle it by the ``verdict`` to come.

        Raises ``StartAgain`` when the session is ending: then nobody settles anything any more.
        """
        if self._tasks is None:
            raise RuntimeError("rows are not being settled")
        later = self._settle_later(row, leave, verdict)
        try:
            self._tasks.create_task(later)
        except RuntimeError:  # the group is shutting down
            later.close()
            raise StartAgain(f"sink {self._desk.spec.name}: the session is ending") from None
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
        """Claim, deliver and settle rows, until cancelled. Raises ``StartAgain`` or ``DatabaseLost``."""
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
        sent = time.monotonic()
        claimed = await self._claim(most)
        until = sent + LEASE_MARGIN_SECONDS
        rows = [row for row in claimed if not self._stops_everybody(row)]
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
        sweep = now - self._swept_at >= POLL_SECONDS
        heads = [self._heads.pop() for _ in range(min(len(self._heads), MOST_KEYS))]
        if self._due_at <= now:
            self._due_at = float("inf")
        claimed = await self._ask(most, heads, sweep=sweep)
        if not claimed and self._suspect_was_last:
            claimed = await self._ask_suspect(now)
        else:
            self._suspect_was_last = False
        if len(claimed) == most:
            self._heads.update(heads)
        elif not claimed:
            self._asked_at = now
            self._swept_at = now if sweep else self._swept_at
        return claimed

    async def _ask_suspect(self, now: float) -> list[ClaimedRow]:
        """One that may have killed its owners; ``_suspects`` says whether the last such question found one."""
        claimed = await self._ask(1, (), sweep=True, suspects=True)
        self._suspected_at, self._suspects, self._suspect_was_last = now, bool(claimed), bool(claimed)
        return claimed

    async def _ask(self, most: int, heads: Sequence[str], *, sweep: bool, suspects: bool = False) -> list[ClaimedRow]:
        desk = self._desk
        lease_seconds = desk.sink.timeout_seconds + 2 * LEASE_MARGIN_SECONDS
        return await self._store.claim_rows(
            desk.spec.name,
            self._relay,
            uuid4(),
            lease_seconds,
            most,
            MOST_BYTES,
            hold=desk.spec.hold,
            keys=heads,
            sweep=sweep,
            suspects=suspects,
            with_followers=desk.sink.keeps_order,
        )

    def _stops_everybody(self, row: ClaimedRow) -> bool:
        """Whether ``row`` was claimed too often without an outcome; then it is dead."""
        if row.claims <= MOST_CLAIMS:
            return False
        error = f"claimed {row.claims - 1} times without an outcome: whoever delivers it may have died of it"
        self._send_back(row, RowBack(row.event.id, row.lease, row.attempts, "dead", None, error))
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
                self._send_back(row, RowBack(row.event.id, row.lease, row.attempts))
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
                self._send_back(row, RowBack(event.id, row.lease, attempts, "waiting", delay, error, status, attempt))
            case Dead(attempts, error, status, attempt):
                self._send_back(row, RowBack(event.id, row.lease, attempts, "dead", None, error, status, attempt))
            case StandStill(error, status, retry_after, attempt):
                delay = max(desk.spec.circuit.probe_seconds, retry_after or 0.0)
                self._send_back(row, RowBack(event.id, row.lease, row.attempts, None, delay, error, status, attempt))

    def _send_back(self, row: ClaimedRow, back: RowBack) -> None:
        self._back.append((row, back))
        self._settle.set()

    async def _settling(self) -> None:
        """Write outcomes as they come, all that have come at once."""
        while True:
            await self._settle.wait()
            self._settle.clear()
            await self._settle_now()

    async def _settle_now(self) -> None:
        done, back, sink = list(self._done), list(self._back), self._desk.spec.name
        ours: set[int] = set()
        if done:
            ours |= await self._store.rows_done(sink, [(row.event.id, row.lease) for row in done])
        if back:
            ours |= await self._store.rows_back(sink, [b for _, b in back])
        del self._done[: len(done)], self._back[: len(back)]
        self._settled.set()
        lost = [row.event.id for row in (*done, *(row for row, _ in back)) if row.event.id not in ours]
        if lost:
            self._log.warning("leases of rows were lost before they were settled", sink=sink, rows=len(lost))
        for _, b in back:
            if b.due_in is not None:
                self.due_in(b.due_in)
        self._follow([*done, *(row for row, b in back if b.state == "dead" and not self._desk.spec.hold)])

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
            still = await self._store.still_blocked(desk.spec.name, keys, desk.spec.hold, server=server)
            blocked.free(asked_at, keys, still)
