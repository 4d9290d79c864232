"""One line for each change of a sink, with its name and the reason."""

from __future__ import annotations

from datetime import UTC, datetime

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import Attempt
from outbox_relay.relay.report import SinkLog
from tests.support.logs import RecordedLog


def an_event(uid: str, headers: str | None = None) -> StoredEvent:
    return StoredEvent(1, 0, uid, "a", None, b"canary", "text/plain", headers, None, datetime.now(UTC))


def a_log() -> tuple[RecordedLog, SinkLog]:
    log = RecordedLog()
    return log, SinkLog(log, "crm")


def test_the_circuit_has_a_line_when_it_opens_and_when_it_closes() -> None:
    log, sink = a_log()
    for state in ("closed", "open", "half-open", "open", "closed", "closed"):
        sink.circuit(state, "connection refused")
    assert log.lines == [
        ("warning", "circuit.opened", {"sink": "crm", "reason": "connection refused"}),
        ("info", "circuit.closed", {"sink": "crm"}),
    ]


def test_dead_events_are_named_at_a_limited_rate_without_what_the_destination_said() -> None:
    log, sink = a_log()
    sink.dead(an_event("uid-1"), 422, Attempt("http_422", answer="no such customer"))
    for n in range(1000):
        sink.dead(an_event(f"uid-{n}"), 422, None)
    assert log.lines == [("warning", "event.dead", {"sink": "crm", "uid": "uid-1", "reason": "http_422"})]


def test_the_reason_of_a_dead_event_is_the_most_precise_class_that_is_known() -> None:
    reasons: list[str] = []
    for status, attempt in ((None, None), (422, None), (422, Attempt("timeout"))):
        log, sink = a_log()
        sink.dead(an_event("uid-1"), status, attempt)
        [(_, values)] = log.warnings
        reasons.append(values["reason"])
    assert reasons == ["refused", "status 422", "timeout"]
