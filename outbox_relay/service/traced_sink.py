"""A sink that records a span for each call: *send* for batches, a CLIENT span of HTTP for each webhook request.

No payload, key, header or secret is in a span. What goes to the destination stays as it is: the event's own context is
what is forwarded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, TypeAlias, cast
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


class TracedSink:
    """A sink that records a span for each call of ``sink``, which links to the contexts of the events.

    That of a single event is a child of the context in which the event was created. Everything else is that of
    ``sink``.
    """

    def __init__(self, tracer: Tracer, name: str, sink: Sink) -> None:
        self._tracer = tracer
        self._sink = sink
        self._posts = False
        self._spans: dict[Call, Span] = {}
        match sink:
            case PostingSink(client=WebhookSink() as client):
                client.delivery_details = self._posts = True
                self._span_name, self._attributes = "POST", _of_request(client.shown_url)
            case KafkaSink():
                self._span_name, self._attributes = f"send {sink.topic}", _of_batch(sink.topic, "kafka")
            case _:
                self._span_name, self._attributes = f"send {name}", _of_batch(name, "outbox")
        self._attributes = {**self._attributes, "outbox.sink": name}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def submit(self, call: Call) -> None:
        """Begin a call and its span."""
        try:
            self._spans[call] = self._start(call)
        except Exception:  # an error of the library, for example in a sampler of another package
            self._spans[call] = INVALID_SPAN
        self._sink.submit(call)

    def completed(self, seconds: float) -> Sequence[Call]:
        """Return the calls that have ended, and end their spans."""
        calls = self._sink.completed(seconds)
        for call in calls:
            if (span := self._spans.pop(call, None)) is not None:
                with suppress(Exception):  # an error of the library must not end the loop
                    self._describe(span, call)
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

    def _start(self, call: Call) -> Span:
        events, context = call.events, Context()
        if len(events) == 1 and (parent := trace_context(events[0].headers)) is not None:
            context = set_span_in_context(NonRecordingSpan(_span_context(parent)), context)
        links = [Link(_span_context(found)) for found in islice(_recorded(events), MOST_LINKS)]
        attributes = {**self._attributes, **self._of_call(call)}
        return self._tracer.start_span(self._span_name, context, SpanKind.CLIENT, attributes, links)

    def _of_call(self, call: Call) -> Attributes:
        event = call.events[0]
        if self._posts:
            resent: Attributes = {"http.request.resend_count": call.attempt - 1} if call.attempt > 1 else {}
            return {"outbox.event.uid": event.uid, "outbox.event.type": event.type, **resent}
        single: Attributes = {"messaging.message.id": event.uid} if len(call.events) == 1 else {}
        return {"messaging.batch.message_count": len(call.events), **single}

    def _describe(self, span: Span, call: Call) -> None:
        """Add the outcome of a call to its span."""
        failed = [verdict for verdict in call.verdicts or () if not isinstance(verdict, Delivered)]
        if not self._posts:
            if failed:
                span.set_attribute("outbox.events.undelivered", len(failed))
                _fail(span, _error_type(failed[0]))
            return
        status = (DELIVERED if call.verdicts is None else call.verdicts[0]).status
        if status is not None:
            span.set_attribute("http.response.status_code", status)
        if failed:
            _fail(span, _error_type(failed[0]) if status is None else str(status))


def _of_batch(destination: str, system: str) -> Attributes:
    kind = "template" if "{" in destination else "name"
    return {
        "messaging.system": system,
        "messaging.operation.type": "send",
        "messaging.operation.name": "send",
        f"messaging.destination.{kind}": destination,
    }


def _of_request(url: str) -> Attributes:
    parts = urlsplit(url)
    return {
        "http.request.method": "POST",
        "url.full": url,
        "server.address": parts.hostname or "",
        "server.port": parts.port or (443 if parts.scheme == "https" else 80),
    }


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


def _error_type(verdict: Verdict) -> str:
    """Return the class of a failure: the code of the attempt, or the class of the verdict."""
    attempt = None if isinstance(verdict, Delivered) else verdict.attempt
    return type(verdict).__name__.lower() if attempt is None else attempt.code


def _fail(span: Span, error_type: str) -> None:
    span.set_attribute("error.type", error_type)
    span.set_status(StatusCode.ERROR)


def traced_sink(tracer: Tracer, name: str, sink: Sink) -> Sink:
    """Return a sink that records a span for each call of ``sink``, whose name in the settings is ``name``."""
    return cast("Sink", TracedSink(tracer, name, sink))
