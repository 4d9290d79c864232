"""Log lines of a sink for operators: one for each change, with the sink and the reason."""

from __future__ import annotations

from collections.abc import Mapping

from structlog.stdlib import BoundLogger

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Attempt
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.formats.trace_context import trace_id

MOST_PARTS = 10
"""Maximum number of parts of a destination that a line names."""


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
