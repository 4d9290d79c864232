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
from outbox_relay.sinks import ExtendsCalls, ExtendsDeliveries, RunsHandlers, Sink
from outbox_relay.sinks.kafka import KafkaSink
from outbox_relay.sinks.webhook import WebhookSink

MOST_LINKS = 128
"""Maximum number of links of a span. The SDK keeps as many unless ``OTEL_SPAN_LINK_COUNT_LIMIT`` says otherwise."""
MOST_SEARCHED = 8 * MOST_LINKS
"""Maximum number of events of a call whose headers are searched for a context to link to."""

Attributes: TypeAlias = Mapping[str, str | int]


def traced_sink(tracer: Tracer, name: str, sink: Sink) -> Sink:
    """Return a sink that records a span for each call of ``sink``."""
    match sink:
        case WebhookSink():
            return TracedRequests(tracer, name, sink, sink.shown_url)
        case KafkaSink():
            return TracedBatches(tracer, name, sink, sink.topic, "kafka")
        case _:
            return TracedBatches(tracer, name, sink, name, "outbox")


class _TracedSink:
    """A sink with the methods of another."""

    def __init__(self, tracer: Tracer, sink: Sink) -> None:
        self.max_batch = sink.max_batch
        self.max_in_flight = sink.max_in_flight
        self.keeps_order = sink.keeps_order
        self.timeout_seconds = sink.timeout_seconds
        self._tracer = tracer
        self._sink = sink

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._sink!r})"

    @property
    def trouble(self) -> str | None:
        """Return why the destination is unreachable, as far as the sink knows."""
        return self._sink.trouble

    def deadlines(self) -> Mapping[int, float]:
        """Return the ends of deliveries that may outlast the time limit of the sink."""
        return self._sink.deadlines() if isinstance(self._sink, ExtendsDeliveries) else {}

    def extend(self, until: float) -> None:
        """Let calls last for as long as the leases of the shards."""
        if isinstance(self._sink, ExtendsCalls):
            self._sink.extend(until)

    @property
    def fault(self) -> str | None:
        """Return why the sink can call no handler, or None."""
        return self._sink.fault if isinstance(self._sink, RunsHandlers) else None

    async def open(self) -> None:
        """Open the sink."""
        await self._sink.open()

    async def reset(self) -> None:
        """Reset the sink."""
        await self._sink.reset()

    async def check(self) -> str | None:
        """Check the sink."""
        return await self._sink.check()

    async def close(self) -> None:
        """Close the sink."""
        await self._sink.close()


class TracedBatches(_TracedSink):
    """Records a *send* span for each call, which links to the contexts in which the events were created."""

    def __init__(self, tracer: Tracer, name: str, sink: Sink, destination: str, system: str) -> None:
        super().__init__(tracer, sink)
        self._span_name = f"send {destination}"
        kind = "template" if "{" in destination else "name"
        self._attributes: Attributes = {
            "messaging.system": system,
            "messaging.operation.type": "send",
            "messaging.operation.name": "send",
            f"messaging.destination.{kind}": destination,
            "outbox.sink": name,
        }

    async def deliver(self, batch: Sequence[StoredEvent], until: float, attempt: int = 0, /) -> Sequence[Verdict]:
        """Deliver as the sink does, and record a span."""
        attributes = {**self._attributes, "messaging.batch.message_count": len(batch)}
        if len(batch) == 1:
            attributes["messaging.message.id"] = batch[0].uid
        span = _start(self._tracer, self._span_name, batch, attributes)
        with _Ending(span):
            verdicts = await self._sink.deliver(batch, until, attempt)
            _end_batch(span, verdicts)
        return verdicts


class TracedRequests(_TracedSink):
    """Records a CLIENT span of HTTP for each request, a child of the context in which the event was created."""

    def __init__(self, tracer: Tracer, name: str, sink: Sink, url: str) -> None:
        super().__init__(tracer, sink)
        parts = urlsplit(url)
        self._attributes: Attributes = {
            "http.request.method": "POST",
            "url.full": url,
            "server.address": parts.hostname or "",
            "server.port": parts.port or (443 if parts.scheme == "https" else 80),
            "outbox.sink": name,
        }

    async def deliver(self, batch: Sequence[StoredEvent], until: float, attempt: int = 0, /) -> Sequence[Verdict]:
        """Deliver as the sink does, and record a span.

        The first attempt is passed on as number 1, as it is sent, so that the verdict has the status of the response.
        """
        if not batch:
            return await self._sink.deliver(batch, until, attempt)
        attributes = {**self._attributes, "outbox.event.uid": batch[0].uid, "outbox.event.type": batch[0].type}
        if attempt > 1:
            attributes["http.request.resend_count"] = attempt - 1
        span = _start(self._tracer, "POST", batch, attributes)
        with _Ending(span):
            [verdict] = await self._sink.deliver(batch, until, attempt or 1)
            _end_request(span, verdict)
        return [verdict]


class _Ending:
    """Ends a span with the block, also one of a call that is cancelled or raises."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            _fail(self._span, kind.__name__)
        with suppress(Exception):
            self._span.end()


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


def _end_batch(span: Span, verdicts: Sequence[Verdict]) -> None:
    failed = len(verdicts) - verdicts.count(DELIVERED)
    if failed:
        first = next(verdict for verdict in verdicts if not isinstance(verdict, Delivered))
        span.set_attribute("outbox.events.undelivered", failed)
        _fail(span, _error_type(first))


def _end_request(span: Span, verdict: Verdict) -> None:
    if verdict.status is not None:
        span.set_attribute("http.response.status_code", verdict.status)
    if not isinstance(verdict, Delivered):
        _fail(span, _error_type(verdict) if verdict.status is None else str(verdict.status))


def _error_type(verdict: Verdict) -> str:
    """Return the class of a failure: the code of the attempt, or the class of the verdict."""
    attempt = None if isinstance(verdict, Delivered) else verdict.attempt
    return type(verdict).__name__.lower() if attempt is None else attempt.code


def _fail(span: Span, error_type: str) -> None:
    span.set_attribute("error.type", error_type)
    span.set_status(StatusCode.ERROR)
