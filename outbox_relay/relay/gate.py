"""What a sink is sent now: its circuit, those who wait for it, how many requests, and what people are told of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from outbox_relay.domain.circuit import Circuit
from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.outcomes import Unavailable, clip
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.store import Store
from outbox_relay.relay.leases import Holding

RECORD_SECONDS = 1.0
"""Least time between two records of the circuit in the database."""
REMIND_SECONDS = 60.0
"""Longest time between two records while it is not closed: the database counts how long a destination is down."""

COUNT_SHARE = 20
"""Rows are counted again after this many times the time that it took to count them, if that is longer than a second."""

CLIENT = "client: "
"""Prefix of errors that the sink's client met without an event. ``record_trouble.sql`` clears only these."""

TROUBLE_SECONDS = 5.0
"""How long a part of the destination is in trouble at least: by then the rows of its events are in the database."""

SHUT_SECONDS = 1.0
"""How often those who wait at a gate that was shut look again; their session ends."""

GONE_SECONDS = 10.0
"""How long a destination that said that it is gone is left alone at least: by then every relay knows of the pause."""


class Pass(NamedTuple):
    """Leave to send: in which term of the circuit it was given, and whether as the one probe."""

    term: int
    probe: bool


class Gate:
    """One circuit of one sink in this process, shared by everything that sends to it.

    ``unsettled`` says how many rows are made and not in the database yet.
    """

    def __init__(
        self, store: Store, holding: Holding, spec: SinkSpec, unsettled: Callable[[], int] = lambda: 0
    ) -> None:
        self._store = store
        self._holding = holding
        self._spec = spec
        self._circuit = Circuit(spec.circuit)
        self._moved = asyncio.Event()
        self._heard = asyncio.Event()
        self._told: tuple[str, str | None, int | None] | None = None
        self._told_at = float("-inf")
        self._note: str | None = None
        self._limit: int | None = None
        self._gone: str | None = None
        self._trouble: str | None = None
        self._troubled_at = float("-inf")
        self._unsettled = unsettled
        self._parked = 0
        self._standing = 0
        self._uncounted = False
        self._counted = asyncio.Event()
        self._rows_stand = asyncio.Event()
        self.is_shut = False
        """Whether no leave is given any more."""

    @property
    def state(self) -> str:
        """``closed``, ``open`` or ``half-open``."""
        return self._circuit.state

    @property
    def closed(self) -> bool:
        """Whether events flow."""
        return self._circuit.state == "closed"

    async def admit(self) -> Pass:
        """Wait until an event may be sent. Whoever gets the probe reports its outcome, or that it was ``unused``."""
        while (seconds := SHUT_SECONDS if self.is_shut else self._circuit.admission_delay(time.monotonic())) > 0.0:
            self._moved.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._moved.wait()
            except TimeoutError:
                continue
        return Pass(self._circuit.term, not self.closed)

    def shut(self) -> None:
        """Give no leave any more: the session ends."""
        self.is_shut = True

    def holds(self, leave: Pass) -> bool:
        """Whether the circuit has neither opened nor closed since ``leave`` was given for more than a probe."""
        return self.closed and leave.term == self._circuit.term

    def delivered(self, leave: Pass) -> None:
        """The destination took an event."""
        was_closed = self.closed
        self._circuit.delivered(leave.term)
        if self.closed and (not was_closed or self._stale()):
            self._changed()

    def _stale(self) -> bool:
        """Whether the database holds what another relay, or one that is gone, found out and we did not.

        A relay that gets fewer requests says so when that changes; those that do not gainsay it now and then at most.
        """
        if self._holding.circuit != "closed":
            return True
        patience = REMIND_SECONDS if self._limit is None else 0.0
        return self._holding.in_flight_limit != self._limit and time.monotonic() - self._told_at > patience

    def failed(self, event_id: int, reason: str, leave: Pass) -> None:
        """The destination failed with an event: one of several that open the circuit."""
        self._circuit.failed(event_id, reason, time.monotonic(), leave.term, at_once=False)
        self._changed()

    def unavailable(
        self, event_id: int, verdict: Unavailable, leave: Pass, *, at_once: bool, retry_after: float
    ) -> bool:
        """The destination is down or asks for less; returns whether the circuit opened by it."""
        at_once = at_once or verdict.throttled or verdict.gone
        retry_after = max(retry_after, GONE_SECONDS) if verdict.gone else retry_after
        opened = self._circuit.failed(
            event_id, verdict.reason, time.monotonic(), leave.term, at_once=at_once, retry_after=retry_after
        )
        if verdict.gone:
            self._gone = verdict.reason
        self._changed()
        return opened

    def unused(self, leave: Pass) -> None:
        """The probe was not needed."""
        self._circuit.unused(leave.term)
        self._moved.set()

    # -- rows that stand, and a part of the destination in trouble ----------------------------------------------

    @property
    def flows(self) -> bool:
        """Whether what was read can be delivered, or parked, now."""
        return self.closed and not self._full()

    def trouble(self, reason: str) -> None:
        """A part of the destination is in trouble: its events become rows, the others flow."""
        self._trouble, self._troubled_at = reason, time.monotonic()
        self._rows_stand.set()
        self._tell(reason)

    def parked(self) -> None:
        """One more event that is to be delivered has become a row."""
        self._parked += 1
        self._standing += 1
        self._rows_stand.set()

    async def room(self) -> None:
        """Wait until more events may become rows: ``parked_max`` bounds them, whatever made them.

        Rows are claimed and delivered meanwhile, so it ends by itself.
        """
        was_full = False
        while self._uncounted or self._full():
            if self._full():
                was_full = True
                self._tell(self._fullness())
            self._counted.clear()
            await self._counted.wait()
        if was_full:
            self._note = self._trouble

    def _full(self) -> bool:
        return self._standing >= self._spec.parked_max

    def _fullness(self) -> str:
        most = self._spec.parked_max
        if self._trouble is not None:
            return f"{self._trouble}; no more than {most} events may wait for it as rows"
        behind = "; those behind a dead letter wait until it is retried or discarded" if self._spec.hold else ""
        return f"{most} events wait as rows, and no more than that may (parked_max): the sink stands still{behind}"

    async def _count(self) -> None:
        """Count the rows that stand while any do; a part is in trouble no longer once no row waits for it."""
        while True:
            self._rows_stand.clear()
            asked_at = time.monotonic()
            await self._count_once(asked_at)
            self._uncounted = False
            self._counted.set()
            await asyncio.sleep(max(RECORD_SECONDS, COUNT_SHARE * (time.monotonic() - asked_at)))
            if not self._standing and self._trouble is None:
                await self._rows_stand.wait()

    async def _count_once(self, asked_at: float) -> None:
        """Ask the database, and add what is on its way there or has been parked since."""
        parked, unsettled, troubled = self._parked, self._unsettled(), self._trouble is not None
        try:
            count, waiting = await self._store.count_parked(self._spec.name, self._spec.parked_max, trouble=troubled)
        except StatementFailed:  # the next one may have more time; until then the count of this process goes on
            return
        self._standing = count + unsettled + self._parked - parked
        if troubled and not waiting and asked_at - self._troubled_at > TROUBLE_SECONDS:
            self._trouble = self._note = self._told = None

    def _tell(self, reason: str) -> None:
        if reason != self._note:
            self._note = reason
            self._heard.set()

    # -- what people are told -----------------------------------------------------------------------------------

    def limited(self, limit: int | None) -> None:
        """So many requests may be under way at once, fewer than the settings say; nothing: as many as those say."""
        self._limit = limit
        self._heard.set()

    def _changed(self) -> None:
        self._moved.set()
        self._heard.set()

    async def run(self) -> None:
        """Record what was found out, and count rows while that matters, until cancelled.

        Raises ``DatabaseUnavailable``.
        """
        self._uncounted = True
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._again(self._count))
            tasks.create_task(self._again(self._record))

    async def _again(self, part: Callable[[], Awaitable[None]]) -> None:
        """Run ``part`` again when a statement of it failed: only what people are told is late by that."""
        while True:
            try:
                await part()
            except StatementFailed:
                self._heard.set()
                await asyncio.sleep(RECORD_SECONDS)

    async def _record(self) -> None:
        while True:
            await self._heard.wait()
            self._heard.clear()
            state = self._circuit.state
            error = self._note if state == "closed" else self._circuit.last_error
            pause_after = self._spec.circuit.pause_after_seconds
            remind = min(REMIND_SECONDS, pause_after / 10 or REMIND_SECONDS)
            due = state != "closed" and time.monotonic() - self._told_at > remind
            news = (state, error, self._limit)
            known = (self._holding.circuit, self._holding.in_flight_limit)
            if (state, self._limit) != known or news != self._told or due:
                await self._store.record_circuit(self._holding.sink, *news, pause_after)
                self._holding.circuit, _, self._holding.in_flight_limit = news
                self._told, self._told_at = news, time.monotonic()
            if self._gone is not None:
                await self._store.pause_sink(self._holding.sink, self._gone)
                self._gone = None
            await asyncio.sleep(RECORD_SECONDS)


class ClientTrouble:
    """Records what a sink's client finds out about the destination without an event. ``asked`` returns that.

    It moves no circuit: only people are told.
    """

    def __init__(self, store: Store, sink: str, asked: Callable[[], str | None]) -> None:
        self._store = store
        self._sink = sink
        self._asked = asked

    async def run(self) -> None:
        """Record changes, and remind of an error that another relay may have cleared, until cancelled."""
        told: str | None = CLIENT  # an error that an earlier session recorded may be over
        told_at = float("-inf")
        while True:
            trouble = self._asked()
            error = None if trouble is None else clip(CLIENT + trouble)
            reminds = error is not None and time.monotonic() - told_at > REMIND_SECONDS
            if error != told or reminds:
                with contextlib.suppress(StatementFailed):  # it is tried again in a second
                    await self._store.record_trouble(self._sink, error)
                    told, told_at = error, time.monotonic()
            await asyncio.sleep(RECORD_SECONDS)


class Slots:
    """How many requests of a sink may be under way at once: up to ``most``, and fewer for a while after it asked.

    Halved when the destination asks for less; raised by one whenever as many as fit were delivered. ``changed`` is
    given the limit whenever it changes, nothing when it is ``most`` again.
    """

    def __init__(self, most: int, changed: Callable[[int | None], None] = lambda _: None) -> None:
        self._most = float(most)
        self._bears = float(most)
        self._changed = changed
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        """Requests that may be under way now."""
        return int(self._bears)

    def full(self) -> bool:
        """Whether the next one has to wait."""
        return self._taken >= self.limit

    def overfull(self) -> bool:
        """Whether more are taken than may be now: who has not begun should give his back."""
        return self._taken > self.limit

    async def acquire(self) -> None:
        """Wait for room for a request, which whoever takes it gives back by ``release``."""
        while self.full():
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                self._wake()
                raise
        self._taken += 1

    def release(self) -> None:
        """A request has ended."""
        self._taken -= 1
        self._wake()

    def fewer(self) -> None:
        """The destination asked for less."""
        self._set(max(1.0, self._bears / 2))

    def more(self) -> None:
        """A request was delivered."""
        if self._bears < self._most:
            self._set(min(self._most, self._bears + 1.0 / self._bears))
            self._wake()

    def _set(self, bears: float) -> None:
        before, self._bears = self.limit, bears
        if self.limit != before:
            self._changed(self.limit if bears < self._most else None)

    def _wake(self) -> None:
        room = self.limit - self._taken
        while room > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                room -= 1
