"""What a sink is sent now: its circuit, those who wait for it, how many requests, and what people are told of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from outbox_relay.domain.circuit import Circuit
from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.outcomes import Unavailable
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.store import Store
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.sink_report import RECORD_SECONDS, REMIND_SECONDS

COUNT_SHARE = 20
"""Rows are counted again after this many times the time that it took to count them, if that is longer than a second."""

TROUBLE_SECONDS = 5.0
"""How long a part of the destination is in trouble at least: by then the rows of its events are in the database."""

HANDOVER_POLL_SECONDS = 1.0
"""How often those who wait at a gate that was shut look again; their session ends."""

GONE_SECONDS = 10.0
"""How long a destination that said that it is gone is left alone at least: by then every relay knows of the pause."""


class Permit(NamedTuple):
    """Leave to send: in which term of the circuit it was given, and whether as the one probe."""

    term: int
    probe: bool


class CircuitBreaker:
    """One circuit of one sink in this process, shared by everything that sends to it.

    ``unsettled`` says how many rows are made and not in the database yet.
    """

    def __init__(
        self, store: Store, leases: SinkLeases, spec: SinkSpec, unsettled: Callable[[], int] = lambda: 0
    ) -> None:
        self._store = store
        self._leases = leases
        self._spec = spec
        self._circuit = Circuit(spec.circuit)
        self._state_changed = asyncio.Event()
        self._report_due = asyncio.Event()
        self._recorded: tuple[str, str | None, int | None] | None = None
        self._recorded_at = float("-inf")
        self._notice: str | None = None
        self._limit: int | None = None
        self._gone: str | None = None
        self._trouble: str | None = None
        self._troubled_at = float("-inf")
        self._unsettled = unsettled
        self._parked = 0
        self._parked_count = 0
        self._uncounted = False
        self._counted = asyncio.Event()
        self._rows_parked = asyncio.Event()
        self.handing_over = False
        """Whether no leave is given any more."""

    @property
    def state(self) -> str:
        """``closed``, ``open`` or ``half-open``."""
        return self._circuit.state

    @property
    def closed(self) -> bool:
        """Whether events flow."""
        return self._circuit.state == "closed"

    async def admit(self) -> Permit:
        """Wait until an event may be sent. Whoever gets the probe reports its outcome, or that it was ``unused``."""
        while (seconds := self._admission_delay()) > 0.0:
            self._state_changed.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._state_changed.wait()
            except TimeoutError:
                continue
        return Permit(self._circuit.term, not self.closed)

    def _admission_delay(self) -> float:
        return HANDOVER_POLL_SECONDS if self.handing_over else self._circuit.admission_delay(time.monotonic())

    def begin_handover(self) -> None:
        """Give no leave any more: the session ends."""
        self.handing_over = True

    def holds(self, permit: Permit) -> bool:
        """Whether the circuit has neither opened nor closed since ``permit`` was given for more than a probe."""
        return self.closed and permit.term == self._circuit.term

    def delivered(self, permit: Permit) -> None:
        """The destination took an event."""
        was_closed = self.closed
        self._circuit.delivered(permit.term)
        if self.closed and (not was_closed or self._stale()):
            self._changed()

    def _stale(self) -> bool:
        """Whether the database holds what another relay, or one that is gone, found out and we did not.

        A relay that gets fewer requests says so when that changes; those that do not gainsay it now and then at most.
        """
        if self._leases.circuit != "closed":
            return True
        patience = REMIND_SECONDS if self._limit is None else 0.0
        return self._leases.in_flight_limit != self._limit and time.monotonic() - self._recorded_at > patience

    def failed(self, event_id: int, reason: str, permit: Permit) -> None:
        """The destination failed with an event: one of several that open the circuit."""
        self._circuit.failed(event_id, reason, time.monotonic(), permit.term, at_once=False)
        self._changed()

    def unavailable(
        self, event_id: int, verdict: Unavailable, permit: Permit, *, at_once: bool, retry_after: float
    ) -> bool:
        """The destination is down or asks for less; returns whether the circuit opened by it."""
        at_once = at_once or verdict.throttled or verdict.gone
        retry_after = max(retry_after, GONE_SECONDS) if verdict.gone else retry_after
        opened = self._circuit.failed(
            event_id, verdict.reason, time.monotonic(), permit.term, at_once=at_once, retry_after=retry_after
        )
        if verdict.gone:
            self._gone = verdict.reason
        self._changed()
        return opened

    def unused(self, permit: Permit) -> None:
        """The probe was not needed."""
        self._circuit.unused(permit.term)
        self._state_changed.set()

    # -- rows that stand, and a part of the destination in trouble ----------------------------------------------

    @property
    def flows(self) -> bool:
        """Whether what was read can be delivered, or parked, now."""
        return self.closed and not self._full()

    def trouble(self, reason: str) -> None:
        """A part of the destination is in trouble: its events become rows, the others flow."""
        self._trouble, self._troubled_at = reason, time.monotonic()
        self._rows_parked.set()
        self._set_notice(reason)

    def parked(self) -> None:
        """One more event that is to be delivered has become a row."""
        self._parked += 1
        self._parked_count += 1
        self._rows_parked.set()

    async def wait_for_capacity(self) -> None:
        """Wait until more events may become rows: ``parked_max`` bounds them, whatever made them.

        Rows are claimed and delivered meanwhile, so it ends by itself.
        """
        was_full = False
        while self._uncounted or self._full():
            if self._full():
                was_full = True
                self._set_notice(self._fullness())
            self._counted.clear()
            await self._counted.wait()
        if was_full:
            self._notice = self._trouble

    def _full(self) -> bool:
        return self._parked_count >= self._spec.parked_max

    def _fullness(self) -> str:
        most = self._spec.parked_max
        if self._trouble is not None:
            return f"{self._trouble}; no more than {most} events may wait for it as rows"
        behind = "; those behind a dead letter wait until it is retried or discarded" if self._spec.hold else ""
        return f"{most} events wait as rows, and no more than that may (parked_max): the sink stands still{behind}"

    async def _count(self) -> None:
        """Count the rows that stand while any do; a part is in trouble no longer once no row waits for it."""
        while True:
            self._rows_parked.clear()
            asked_at = time.monotonic()
            await self._count_once(asked_at)
            self._uncounted = False
            self._counted.set()
            await asyncio.sleep(max(RECORD_SECONDS, COUNT_SHARE * (time.monotonic() - asked_at)))
            if not self._parked_count and self._trouble is None:
                await self._rows_parked.wait()

    async def _count_once(self, asked_at: float) -> None:
        """Ask the database, and add what is on its way there or has been parked since."""
        parked, unsettled, troubled = self._parked, self._unsettled(), self._trouble is not None
        try:
            count, waiting = await self._store.standing(self._spec.name, self._spec.parked_max, trouble=troubled)
        except StatementFailed:  # the next one may have more time; until then the count of this process goes on
            return
        self._parked_count = count + unsettled + self._parked - parked
        if troubled and not waiting and asked_at - self._troubled_at > TROUBLE_SECONDS:
            self._trouble = self._notice = self._recorded = None

    def _set_notice(self, reason: str) -> None:
        if reason != self._notice:
            self._notice = reason
            self._report_due.set()

    # -- what people are told -----------------------------------------------------------------------------------

    def limited(self, limit: int | None) -> None:
        """So many requests may be under way at once, fewer than the settings say; nothing: as many as those say."""
        self._limit = limit
        self._report_due.set()

    def _changed(self) -> None:
        self._state_changed.set()
        self._report_due.set()

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
                self._report_due.set()
                await asyncio.sleep(RECORD_SECONDS)

    async def _record(self) -> None:
        while True:
            await self._report_due.wait()
            self._report_due.clear()
            state = self._circuit.state
            error = self._notice if state == "closed" else self._circuit.last_error
            pause_after = self._spec.circuit.pause_after_seconds
            remind = min(REMIND_SECONDS, pause_after / 10 or REMIND_SECONDS)
            due = state != "closed" and time.monotonic() - self._recorded_at > remind
            news = (state, error, self._limit)
            known = (self._leases.circuit, self._leases.in_flight_limit)
            if (state, self._limit) != known or news != self._recorded or due:
                await self._store.record_circuit(self._leases.sink, *news, pause_after)
                self._leases.circuit, _, self._leases.in_flight_limit = news
                self._recorded, self._recorded_at = news, time.monotonic()
            if self._gone is not None:
                await self._store.pause_gone(self._leases.sink, self._gone)
                self._gone = None
            await asyncio.sleep(RECORD_SECONDS)
