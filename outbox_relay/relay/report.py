"""The reports of a sink's state, to the database for people and other relays, and to the log."""

from __future__ import annotations

from collections.abc import Mapping

from structlog.stdlib import BoundLogger

from outbox_relay.domain.circuit import PAUSE_AFTER_SECONDS
from outbox_relay.domain.errors import DatabaseUnusable, PositionsMissing, RelayError, StatementFailed
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.log_events import RateLimitedLog
from outbox_relay.domain.outcomes import Attempt, clip
from outbox_relay.formats.trace_context import trace_id
from outbox_relay.postgres.store import Store
from outbox_relay.relay.outcomes import Outcomes
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.sink_spec import SinkSpec
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
MOST_PARTS = 10
"""Maximum number of parts of a destination that a line names."""
MISSING = (
    "the sink is not in the database: restart the relay to register it, or take it out of the settings; if it was "
    "removed and is to come back, run outbox-relay sinks remove {} --forget first"
)
"""The fault of a sink that is not in the database."""
OTHER_CLAIM = (
    'the sink has claim = "{}" in the database, which changes once no relay serves it and none of its rows is to be '
    "delivered: set it back until then, or give the sink a new name"
)
"""The fault of a sink that cannot be served with the ``claim`` of the settings yet."""


class SinkLog:
    """Writes changes of a sink's state. It keeps the state that was written last."""

    def __init__(self, log: BoundLogger, sink: str) -> None:
        self._log = log
        self._seldom = RateLimitedLog(log)
        self._sink = sink
        self._closed = True
        self._limited = False
        self._troubles: frozenset[str] = frozenset()

    def dead(self, event: StoredEvent, status: int | None, attempt: Attempt | None) -> None:
        """Write that an event is dead, at a limited rate, with its trace and the class of its reason.

        The reason itself may quote the answer of a destination. ``why`` shows it.
        """
        reason = attempt.code if attempt else "refused" if status is None else f"status {status}"
        trace = {} if (found := trace_id(event.headers)) is None else {"trace_id": found}
        self._seldom.warning("event.dead", sink=self._sink, uid=event.uid, **trace, reason=reason)

    def circuit(self, state: str, reason: str | None) -> None:
        """Write that the circuit opened or closed."""
        was_closed, self._closed = self._closed, state == "closed"
        if self._closed and not was_closed:
            self._log.info("circuit.closed", sink=self._sink)
        elif was_closed and not self._closed:
            self._log.warning("circuit.opened", sink=self._sink, reason=reason)

    def limit(self, limit: int | None) -> None:
        """Write that the number of concurrent requests is below the configured maximum, or no longer."""
        limited, self._limited = self._limited, limit is not None
        if limit is not None and not limited:
            self._log.warning("sink.throttled", sink=self._sink, in_flight_limit=limit)
        elif limit is None and limited:
            self._log.info("sink.unthrottled", sink=self._sink)

    def troubles(self, troubles: Mapping[str, str]) -> None:
        """Write which parts of the destination are in trouble, or no longer. ``troubles`` has their reasons."""
        before, self._troubles = self._troubles, frozenset(troubles)
        if new := [part for part in troubles if part not in before]:
            reason = "; ".join(troubles[part] for part in new[:MOST_PARTS])
            self._log.warning("sink.trouble", sink=self._sink, **_parts(new), reason=reason)
        if over := sorted(before - self._troubles):
            self._log.info("sink.trouble_over", sink=self._sink, **_parts(over))

    def paused(self, reason: str) -> None:
        """Write that this relay paused the sink."""
        self._log.warning("sink.paused", sink=self._sink, reason=reason)


def _parts(parts: list[str]) -> dict[str, object]:
    more = {"left_out": len(parts) - MOST_PARTS} if len(parts) > MOST_PARTS else {}
    return {"parts": parts[:MOST_PARTS], **more}


class SinkFault:
    """Keeps a refusal of the database, and finds the fault of one sink."""

    def __init__(self, leases: SinkLeases) -> None:
        self._leases = leases
        self._refusal: DatabaseUnusable | None = None

    def of(self, spec: SinkSpec, sink: Sink) -> str | None:
        """Return the reason why ``sink`` cannot be served; None if it can."""
        if self._leases.missing:
            return MISSING.format(spec.name)
        if self._leases.superseded and self._leases.row.claim != spec.settings.claim:
            return OTHER_CLAIM.format(self._leases.row.claim)
        if self._refusal:
            return str(self._refusal)
        return sink.fault

    def refuse(self, error: RelayError) -> None:
        """Keep a refusal of the database. Missing positions outlast any other one."""
        self.session_begins()
        if isinstance(error, DatabaseUnusable) and (self._refusal is None or isinstance(error, PositionsMissing)):
            self._refusal = error

    def session_begins(self) -> None:
        """Forget a refusal, except missing positions.

        Those last until the positions of owned shards are known.
        """
        if not isinstance(self._refusal, PositionsMissing):
            self._refusal = None

    def shards_are_owned(self) -> None:
        """Forget every refusal."""
        self._refusal = None


class Report:
    """The circuit, the last error and the limit of calls of one session, as they are reported."""

    def __init__(self, outcomes: Outcomes, sink_log: SinkLog, log: BoundLogger) -> None:
        self._outcomes = outcomes
        self._store: Store = outcomes.parts.store
        self._spec = outcomes.parts.spec
        self._leases = outcomes.parts.leases
        self._sink_log = sink_log
        self._log = log
        self._recorded: tuple[str, str | None, int | None] | None = None
        self._recorded_at = self._mended_at = float("-inf")
        self._next_at = float("-inf")
        self._failures_recorded: int = 0
        self._delivered_before = 0
        self._state: tuple[bool, int | None, str | None] = (True, None, None)
        self._changed_at = float("-inf")
        self._trouble: str | None = CLIENT  # what an earlier session recorded may be over
        self._own_error = False

    def write(self, now: float) -> float:
        """Report what has changed, at most once in ``RECORD_SECONDS``. Return when to call this again.

        A report that fails is repeated: only people see it late.
        """
        circuit, outcomes = self._outcomes.circuit, self._outcomes
        state = (circuit.state == "closed", outcomes.slots.reduced_limit, outcomes.gone)
        changed = state != self._state and now >= self._changed_at + RECORD_SECONDS
        if now < self._next_at and not changed:
            return self._next_at
        self._next_at = now + RECORD_SECONDS
        if changed:
            self._state, self._changed_at = state, now
        self._sink_log.circuit(circuit.state, circuit.last_error)
        self._sink_log.limit(outcomes.slots.reduced_limit)
        self._sink_log.troubles(outcomes.bound.troubles)
        try:
            self._record(now)
            self._pause_if_gone()
            self._record_failure(now)
            self._record_mended(now)
            self._record_trouble()
        except StatementFailed as error:
            self._log.debug("sink.not_reported", sink=self._spec.name, reason=str(error))
        return self._next_at

    def _record(self, now: float) -> None:
        outcomes, circuit = self._outcomes, self._outcomes.circuit
        error = outcomes.bound.notice if circuit.state == "closed" else circuit.last_error
        report = (circuit.state, error, outcomes.slots.reduced_limit)
        if not self._must_record(report, now):
            return
        if error is not None:
            self._own_error = True
            self._delivered_before = circuit.deliveries
        paused = self._store.record_circuit(self._spec.name, *report, PAUSE_AFTER_SECONDS)
        self._leases.record_report(circuit.state, report[2])
        self._recorded, self._recorded_at = report, now
        if paused is not None:
            self._sink_log.paused(paused)

    def _must_record(self, report: tuple[str, str | None, int | None], now: float) -> bool:
        """Return True if the report differs from the last one, or from the database, or is to be repeated."""
        state, error, limit = report
        if self._recorded is None:
            return report != ("closed", None, None) or self._is_stale(limit, now)
        if report != self._recorded or (state == "closed" and self._is_stale(limit, now)):
            return True
        return (state != "closed" or error is not None) and now - self._recorded_at >= REMIND_SECONDS

    def _is_stale(self, limit: int | None, now: float) -> bool:
        """Return True if a delivery disproves the state in the database, of another or an earlier relay.

        A relay with a reduced limit reports it when it changes. The others contradict it at most once per interval.
        """
        if self._outcomes.circuit.deliveries == self._delivered_before:
            return False
        row = self._leases.row
        patience = REMIND_SECONDS if limit is None else 0.0
        return row.circuit != "closed" or (row.in_flight_limit != limit and now - self._recorded_at > patience)

    def _pause_if_gone(self) -> None:
        reason = self._outcomes.gone
        if reason is not None:
            if self._store.pause_sink(self._spec.name, reason):
                self._sink_log.paused(reason)
            self._outcomes.gone = None

    def _record_failure(self, now: float) -> None:
        """Record the error of a closed circuit that no delivery has followed for a while, once for each failure.

        The circuit and the limit of calls in the database may be those of another relay, and stay as they are.
        """
        circuit = self._outcomes.circuit
        if circuit.state != "closed" or circuit.failing_since is None or circuit.last_error is None:
            return
        if circuit.failures != self._failures_recorded and now - circuit.failing_since >= FAILING_SECONDS:
            self._own_error = True
            self._delivered_before = circuit.deliveries
            self._store.record_failure(self._spec.name, circuit.last_error)
            self._failures_recorded = circuit.failures
            self._trouble = None  # which is recorded again in its place

    def _record_mended(self, now: float) -> None:
        """Record that the last error is over if an event was delivered after it.

        Errors of other relays are looked at once per interval.
        """
        circuit = self._outcomes.circuit
        if circuit.state != "closed" or circuit.deliveries == self._delivered_before:
            return
        others = self._leases.row.last_error_open and now - self._mended_at > MEND_SECONDS
        if self._outcomes.bound.notice is None and (self._own_error or others):
            self._store.record_mended(self._spec.name, own=self._own_error)
            self._own_error, self._mended_at = False, now
            self._trouble = None

    def _record_trouble(self) -> None:
        """Record why the destination is unreachable, as the client has found it without an event."""
        trouble = self._outcomes.parts.sink.trouble
        shown = None if trouble is None else clip(CLIENT + trouble)
        if shown != self._trouble:
            self._store.record_trouble(self._spec.name, shown)
            self._trouble = shown
