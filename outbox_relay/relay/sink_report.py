"""The reports of a sink's state, for people and for other relays."""

from __future__ import annotations

import asyncio
import contextlib
import time

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Attempt, clip
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.store import Store
from outbox_relay.relay.breaker import CircuitBreaker
from outbox_relay.relay.limiter import ConcurrencyLimiter
from outbox_relay.relay.parked_limit import ParkedLimit
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.sink_log import SinkLog
from outbox_relay.sinks import Sink

RECORD_SECONDS = 1.0
"""Minimum interval between two reports."""
REMIND_SECONDS = 60.0
"""Maximum interval between two reports while the circuit is not closed, or a part of the destination is in trouble.

The database measures how long a destination is down by them. An error that is not recorded again for three minutes may
be over.
"""
FAILING_SECONDS = 5.0
"""Time without a delivery after which an error is reported although too few events have failed to open the circuit."""
MEND_SECONDS = 30.0
"""Minimum interval between two statements that record that errors of other relays are over."""

CLIENT = "client: "
"""Prefix of errors that the sink's client found without an event. ``record_trouble.sql`` clears only these."""


class SinkReport:
    """The report of a sink's circuit, last error and limit of requests, to the database and the log.

    A report is due when ``due`` is set, which the breaker, the limiter and the parked limit do.
    """

    def __init__(
        self,
        store: Store,
        spec: SinkSpec,
        leases: SinkLeases,
        breaker: CircuitBreaker,
        limiter: ConcurrencyLimiter,
        parked_limit: ParkedLimit,
        due: asyncio.Event,
        log: BoundLogger,
    ) -> None:
        self._store = store
        self._spec = spec
        self._leases = leases
        self._breaker = breaker
        self._limiter = limiter
        self._parked_limit = parked_limit
        self._due = due
        self._log = SinkLog(log, spec.name)
        self._recorded: tuple[str, str | None, int | None] | None = None
        self._recorded_at = self._mended_at = float("-inf")
        self._failures_recorded = 0
        self._troubles_over = 0
        self._own_error = False
        self._delivers = False

    def delivered(self) -> None:
        """Make a report due if a delivery disproves the state in the database."""
        self._delivers = True
        if self._breaker.closed and (self._is_stale() or self._may_be_mended()):
            self._due.set()

    def dead(self, event: StoredEvent, status: int | None, attempt: Attempt | None) -> None:
        """Log that an event is dead."""
        self._log.dead(event, status, attempt)

    def _is_stale(self) -> bool:
        """Return True if the database has the state of another or an earlier relay.

        A relay with a reduced limit reports it when it changes. The others contradict it at most once per interval.
        """
        if self._leases.row.circuit != "closed":
            return True
        limit = self._limiter.reduced_limit
        patience = REMIND_SECONDS if limit is None else 0.0
        return self._leases.row.in_flight_limit != limit and time.monotonic() - self._recorded_at > patience

    def _may_be_mended(self) -> bool:
        """Return True if the last error in the database may be over, as far as this relay knows.

        Errors of other relays are looked at once per interval.
        """
        if self._parked_limit.notice is not None:
            return False
        others = self._leases.row.last_error_open and time.monotonic() - self._mended_at > MEND_SECONDS
        return self._own_error or others

    async def run(self) -> None:
        """Report the sink's state when it changes, until cancelled.

        Raises ``DatabaseUnavailable``.

        A report that fails is repeated: only people see it late.
        """
        while True:
            try:
                if await self._is_due():
                    self._due.clear()
                    self._write_log()
                    await self._record()
                    await self._record_mended()
                await self._record_failure()
            except StatementFailed:
                self._due.set()
            await asyncio.sleep(RECORD_SECONDS)

    async def _is_due(self) -> bool:
        """Wait until a report is due, or while no event is delivered for ``FAILING_SECONDS``. Return False then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if self._breaker.failing_since is None else FAILING_SECONDS):
                await self._due.wait()
        return self._due.is_set()

    def _write_log(self) -> None:
        self._log.circuit(self._breaker.state, self._breaker.last_error)
        self._log.limit(self._limiter.reduced_limit)
        self._log.troubles(self._parked_limit.troubles)

    async def _record(self) -> None:
        state, limit = self._breaker.state, self._limiter.reduced_limit
        error = self._parked_limit.notice if state == "closed" else self._breaker.last_error
        report = (state, error, limit)
        if self._must_record(report):
            troubles_over = self._parked_limit.troubles_over
            if error is not None:
                self._own_error, self._delivers = True, False
            paused = await self._store.record_circuit(self._spec.name, *report, self._spec.circuit.pause_after_seconds)
            self._leases.record_report(state, limit)
            self._recorded, self._recorded_at = report, time.monotonic()
            self._troubles_over = troubles_over
            if paused is not None:
                self._log.paused(paused)
        await self._pause_if_gone()

    async def _pause_if_gone(self) -> None:
        reason = self._breaker.gone
        if reason is not None:
            if await self._store.pause_sink(self._spec.name, reason):
                self._log.paused(reason)
            self._breaker.forget_gone()

    async def _record_failure(self) -> None:
        """Record the error of a closed circuit that no delivery has followed for a while, once for each failure.

        The circuit and the limit of requests in the database may be those of another relay, and stay as they are.
        """
        since, failures, error = self._breaker.failing_since, self._breaker.failures, self._breaker.last_error
        if since is None or error is None or failures == self._failures_recorded:
            return
        if time.monotonic() - since >= FAILING_SECONDS:
            self._own_error, self._delivers = True, False
            await self._store.record_failure(self._spec.name, error)
            self._failures_recorded = failures

    async def _record_mended(self) -> None:
        """Record that the last error is over if an event was delivered after it."""
        if self._delivers and self._breaker.closed and self._may_be_mended():
            await self._store.record_mended(self._spec.name, own=self._own_error)
            self._own_error, self._mended_at = False, time.monotonic()

    def _must_record(self, report: tuple[str, str | None, int | None]) -> bool:
        """Return True if the report is news, or a reminder of an error that is not over.

        The end of trouble is news even if the report is the same as before it.
        """
        state, error, limit = report
        if report != self._recorded or self._troubles_over != self._parked_limit.troubles_over:
            return True
        if (state, limit) != (self._leases.row.circuit, self._leases.row.in_flight_limit):
            return True
        pause_after = self._spec.circuit.pause_after_seconds
        remind = min(REMIND_SECONDS, pause_after / 10 or REMIND_SECONDS)
        return (state != "closed" or error is not None) and time.monotonic() - self._recorded_at > remind


class ClientTrouble:
    """Reports errors that a sink's client finds without an event.

    They do not move the circuit.
    """

    def __init__(self, store: Store, name: str, sink: Sink) -> None:
        self._store = store
        self._name = name
        self._sink = sink

    async def run(self) -> None:
        """Report changes, and errors that another relay may have cleared, until cancelled."""
        recorded: str | None = CLIENT  # an error that an earlier session recorded may be over
        recorded_at = float("-inf")
        while True:
            trouble = self._sink.trouble
            error = None if trouble is None else clip(CLIENT + trouble)
            reminds = error is not None and time.monotonic() - recorded_at > REMIND_SECONDS
            if error != recorded or reminds:
                with contextlib.suppress(StatementFailed):  # it is repeated in a second
                    await self._store.record_trouble(self._name, error)
                    recorded, recorded_at = error, time.monotonic()
            await asyncio.sleep(RECORD_SECONDS)
