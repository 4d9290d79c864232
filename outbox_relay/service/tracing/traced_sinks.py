"""Sinks that record a span for each call: *send* for batches, CLIENT spans of HTTP for single requests.

No payload, key, header or secret is in a span. What goes to the destination stays as it is: the event's own context is
what is forwarded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TypeAlias
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Delivered, Verdict
from outbox_relay.formats.trace_context import TraceContext, trace_context
from outbox_relay.sinks import Call, Sink
from outbox_relay.sinks.kafka import KafkaSink
from outbox_relay.sinks.posting import PostingSink
from outbox_relay.sinks.webhook import WebhookSink

MOST_LINKS = 128
"""Maximum number of links of a span. The SDK keeps as many unless ``OTEL_SPAN_LINK_COUNT_LIMIT`` says otherwise."""
MOST_SEARCHED = 8 * MOST_LINKS
"""Maximum number of events of a call whose headers are searched for a context to link to."""

Attributes: TypeAlias = Mapping[str, str | int]


def traced_sink(tracer: Tracer, name: str, sink: Sink) -> Sink:
    """Return a sink that records a span for each call of ``sink``."""
    match sink:
        case PostingSink(client=WebhookSink() as client):
            client.delivery_details = True
            return TracedRequests(tracer, sink, *of_requests(name, client.shown_url))
        case KafkaSink():
            return TracedSink(tracer, sink, *of_batches(name, sink.topic, "kafka"))
        case _:
            return TracedSink(tracer, sink, *of_batches(name, name, "outbox"))


def of_batches(name: str, destination: str, system: str) -> tuple[str, Attributes]:
    """Return the name and the attributes of the spans of batches."""
    kind = "template" if "{" in destination else "name"
    return f"send {destination}", {
        "messaging.system": system,
        "messaging.operation.type": "send",
        "messaging.operation.name": "send",
        f"messaging.destination.{kind}": destination,
        "outbox.sink": name,
    }


def of_requests(name: str, url: str) -> tuple[str, Attributes]:
    """Return the name and the attributes of the spans of requests."""
    parts = urlsplit(url)
    return "POST", {
        "http.request.method": "POST",
        "url.full": url,
        "server.address": parts.hostname or "",
        "server.port": parts.port or (443 if parts.scheme == "https" else 80),
        "outbox.sink": name,
    }


class TracedSink(Sink):
    """A sink that records a *send* span for each call of ``sink``, which links to the contexts of the events."""

    def __init__(self, tracer: Tracer, sink: Sink, span_name: str, attributes: Attributes) -> None:
        self.max_batch, self.max_in_flight = sink.max_batch, sink.max_in_flight
        self.keeps_order, self.timeout_seconds = sink.keeps_order, sink.timeout_seconds
        self._tracer = tracer
        self._sink = sink
        self._span_name = span_name
        self._attributes = attributes
        self._spans: dict[Call, Span] = {}
        self.open, self.wake, self.extend, self.purge = sink.open, sink.wake, sink.extend, sink.purge
        self.deadlines, self.check, self.close = sink.deadlines, sink.check, sink.close

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._sink!r})"

    @property
    def trouble(self) -> str | None:
        """See ``Sink``."""
        return self._sink.trouble

    @property
    def fault(self) -> str | None:
        """See ``Sink``."""
        return self._sink.fault

    @property
    def hanging(self) -> int:
        """See ``Sink``."""
        return self._sink.hanging

    def submit(self, call: Call) -> None:
        """Begin a call and its span."""
        attributes = {**self._attributes, **self.attributes(call)}
        self._spans[call] = _start(self._tracer, self._span_name, call.events, attributes)
        self._sink.submit(call)

    def completed(self, seconds: float) -> Sequence[Call]:
        """Return the calls that have ended, and end their spans."""
        calls = self._sink.completed(seconds)
        for call in calls:
            if (span := self._spans.pop(call, None)) is not None:
                with suppress(Exception):  # an error of the library must not end the loop
                    self.describe(span, call)
                    span.end()
        return calls

    def withdraw(self) -> None:
        """Forget all calls, and end their spans."""
        self._sink.withdraw()
        spans, self._spans = self._spans, {}
        for span in spans.values():
            with suppress(Exception):
                _fail(span, "withdrawn")
                span.end()

    def attributes(self, call: Call) -> Attributes:
        """Return the attributes of the span of one call."""
        count: Attributes = {"messaging.batch.message_count": len(call.events)}
        return {**count, "messaging.message.id": call.events[0].uid} if len(call.events) == 1 else count

    def describe(self, span: Span, call: Call) -> None:
        """Add the outcome of a call to its span."""
        failed = [verdict for verdict in call.verdicts or () if not isinstance(verdict, Delivered)]
        if failed:
            span.set_attribute("outbox.events.undelivered", len(failed))
            _fail(span, _error_type(failed[0]))


class TracedRequests(TracedSink):
    """Records a CLIENT span of HTTP for each request, a child of the context in which the event was created."""

    def attributes(self, call: Call) -> Attributes:
        """Return the attributes of the span of one request."""
        event = call.events[0]
        found: Attributes = {"outbox.event.uid": event.uid, "outbox.event.type": event.type}
        return {**found, "http.request.resend_count": call.attempt - 1} if call.attempt > 1 else found

    def describe(self, span: Span, call: Call) -> None:
        """Add the response to the span."""
        verdict = DELIVERED if call.verdicts is None else call.verdicts[0]
        if verdict.status is not None:
            span.set_attribute("http.response.status_code", verdict.status)
        if not isinstance(verdict, Delivered):
            _fail(span, _error_type(verdict) if verdict.status is None else str(verdict.status))


# -- the beginning of a span --------------------------------------------------------------------------------------


def _start(tracer: Tracer, name: str, batch: Sequence[StoredEvent], attributes: Attributes) -> Span:
    """Start a span that links to the contexts of ``batch``, and is a child of that of a single event.

    If the library fails, for example in a sampler of another package, return a span that is not recorded.
    """
    try:
        return _started(tracer, name, batch, attributes)
    except Exception:
        return INVALID_SPAN


def _started(tracer: Tracer, name: str, batch: Sequence[StoredEvent], attributes: Attributes) -> Span:
    parent = trace_context(batch[0].headers) if len(batch) == 1 else None
    context = Context() if parent is None else set_span_in_context(NonRecordingSpan(_span_context(parent)), Context())
    links = [Link(_span_context(found)) for found in islice(_recorded(batch), MOST_LINKS)]
    return tracer.start_span(name, context, SpanKind.CLIENT, attributes, links)


def _recorded(batch: Sequence[StoredEvent]) -> Iterator[TraceContext]:
    """Yield the contexts of events whose create span was recorded. A link to any other would lead nowhere."""
    with_headers = (event for event in batch if event.headers is not None)
    for event in islice(with_headers, MOST_SEARCHED):
        found = trace_context(event.headers)
        if found is not None and found.sampled:
            yield found


def _span_context(found: TraceContext) -> SpanContext:
    state = TraceState.from_header([found.state]) if found.state else TraceState()
    return SpanContext(int(found.trace_id, 16), int(found.span_id, 16), True, TraceFlags(found.flags), state)


# -- its end ------------------------------------------------------------------------------------------------------


def _error_type(verdict: Verdict) -> str:
    """Return the class of a failure: the code of the attempt, or the class of the verdict."""
    attempt = None if isinstance(verdict, Delivered) else verdict.attempt
    return type(verdict).__name__.lower() if attempt is None else attempt.code


def _fail(span: Span, error_type: str) -> None:
    span.set_attribute("error.type", error_type)
    span.set_status(StatusCode.ERROR)
