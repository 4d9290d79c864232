"""The reports of a sink's state, for people and for other relays."""

from __future__ import annotations

import asyncio
import contextlib
import time

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.domain.outcomes import clip
from outbox_relay.domain.sink_spec import SinkSpec
from outbox_relay.postgres.store import Store
from outbox_relay.relay.breaker import CircuitBreaker
from outbox_relay.relay.limiter import ConcurrencyLimiter
from outbox_relay.relay.parked_limit import ParkedLimit
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.sinks import Sink

RECORD_SECONDS = 1.0
"""Minimum interval between two reports."""
REMIND_SECONDS = 60.0
"""Maximum interval between two reports while the circuit is not closed.

The database measures how long a destination is down by them.
"""

CLIENT = "client: "
"""Prefix of errors that the sink's client found without an event. ``record_trouble.sql`` clears only these."""


class SinkReport:
    """The report of a sink's circuit, last error and limit of requests.

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
    ) -> None:
        self._store = store
        self._spec = spec
        self._leases = leases
        self._breaker = breaker
        self._limiter = limiter
        self._parked_limit = parked_limit
        self._due = due
        self._recorded: tuple[str, str | None, int | None] | None = None
        self._recorded_at = float("-inf")
        self._troubles_over = 0

    def delivered(self) -> None:
        """Make a report due if a delivery disproves the state in the database."""
        if self._breaker.closed and self._is_stale():
            self._due.set()

    def _is_stale(self) -> bool:
        """Return True if the database has the state of another or an earlier relay.

        A relay with a reduced limit reports it when it changes. The others contradict it at most once per interval.
        """
        if self._leases.circuit != "closed":
            return True
        limit = self._limiter.reduced_limit
        patience = REMIND_SECONDS if limit is None else 0.0
        return self._leases.in_flight_limit != limit and time.monotonic() - self._recorded_at > patience

    async def run(self) -> None:
        """Report the sink's state when it changes, until cancelled.

        Raises ``DatabaseUnavailable``.

        A report that fails is repeated: only people see it late.
        """
        while True:
            try:
                await self._due.wait()
                self._due.clear()
                await self._record()
            except StatementFailed:
                self._due.set()
            await asyncio.sleep(RECORD_SECONDS)

    async def _record(self) -> None:
        state, limit = self._breaker.state, self._limiter.reduced_limit
        error = self._parked_limit.notice if state == "closed" else self._breaker.last_error
        report = (state, error, limit)
        if self._must_record(report):
            troubles_over = self._parked_limit.troubles_over
            await self._store.record_circuit(self._spec.name, *report, self._spec.circuit.pause_after_seconds)
            self._leases.record_report(state, limit)
            self._recorded, self._recorded_at = report, time.monotonic()
            self._troubles_over = troubles_over
        if self._breaker.gone is not None:
            await self._store.pause_sink(self._spec.name, self._breaker.gone)
            self._breaker.forget_gone()

    def _must_record(self, report: tuple[str, str | None, int | None]) -> bool:
        """Return True if the report is news, or a reminder that the circuit is not closed.

        The end of trouble is news even if the report is the same as before it.
        """
        state, _, limit = report
        if report != self._recorded or self._troubles_over != self._parked_limit.troubles_over:
            return True
        if (state, limit) != (self._leases.circuit, self._leases.in_flight_limit):
            return True
        pause_after = self._spec.circuit.pause_after_seconds
        remind = min(REMIND_SECONDS, pause_after / 10 or REMIND_SECONDS)
        return state != "closed" and time.monotonic() - self._recorded_at > remind


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
