"""Emitting in an application with and without traces: create spans, and the context in the event's headers."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import psycopg
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, TraceState

from outbox_relay import __version__, outbox
from tests.support.database import Database

OWN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
REMOTE = SpanContext(
    0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True, TraceFlags(1), TraceState([("a", "1")])
)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Return the spans of an application with a tracer."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    use(provider, monkeypatch)
    return exporter


@pytest.fixture
def connection(shared_database: Database) -> Generator[psycopg.Connection[Any]]:
    with psycopg.connect(shared_database.dsn) as connection:
        yield connection
        connection.rollback()


def use(provider: trace.TracerProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this application have the provider; a process can be given one only once."""
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)


def headers(connection: psycopg.Connection[Any]) -> list[dict[str, str] | None]:
    """Return the headers of all events that this transaction emitted."""
    return [row[0] for row in connection.execute("select headers from outbox.event order by id").fetchall()]


def named(span: ReadableSpan) -> str:
    """Return the traceparent that names the span, without its flags."""
    assert span.context is not None
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-"


def inside(context: SpanContext) -> Any:
    """Make the context the current one inside the block, as after a request of another service."""
    return trace.use_span(NonRecordingSpan(context))


def test_a_create_span_is_recorded_and_its_context_is_stored(
    connection: psycopg.Connection[Any], spans: InMemorySpanExporter
) -> None:
    with inside(REMOTE):
        uid = outbox.emit(connection, "order.created", {"id": 1}, key="order-1", headers={"tenant": "acme"})
    [span] = spans.get_finished_spans()
    [found] = headers(connection)
    assert found is not None
    assert found.pop("traceparent").startswith(named(span))
    assert found == {"tenant": "acme", "tracestate": "a=1"}
    assert (span.name, span.kind, span.parent) == ("create order.created", SpanKind.PRODUCER, REMOTE)
    assert dict(span.attributes or {}) == {
        "messaging.system": "outbox",
        "messaging.operation.type": "create",
        "messaging.operation.name": "create",
        "messaging.destination.name": "order.created",
        "messaging.message.id": str(uid),
    }
    assert span.instrumentation_scope is not None
    assert (span.instrumentation_scope.name, span.instrumentation_scope.version) == ("outbox_relay.outbox", __version__)
    assert span.instrumentation_scope.schema_url == "https://opentelemetry.io/schemas/1.44.0"


async def test_every_function_records_a_span_per_event(
    shared_database: Database, connection: psycopg.Connection[Any], spans: InMemorySpanExporter
) -> None:
    events = [outbox.Event("a", 1), outbox.Event("b", 2)]
    uids = [outbox.emit(connection.cursor(), "a", 1), *outbox.emit_many(connection, events)]
    found = headers(connection)
    async with await psycopg.AsyncConnection.connect(shared_database.dsn) as other:
        uids += [await outbox.aemit(other, "a", 1), *await outbox.aemit_many(other, events)]
        rows = await (await other.execute("select headers from outbox.event order by id")).fetchall()
        found += [row[0] for row in rows]
        await other.rollback()
    ended = spans.get_finished_spans()
    assert [(span.attributes or {})["messaging.message.id"] for span in ended] == [str(uid) for uid in uids]
    assert [(each or {})["traceparent"][:-2] for each in found] == [named(span) for span in ended]


def test_the_api_alone_changes_nothing_but_passes_a_context_on(
    connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(trace.ProxyTracerProvider(), monkeypatch)
    outbox.emit(connection, "a", 1)
    with inside(REMOTE):
        outbox.emit(connection, "a", 1)
    assert headers(connection) == [None, {"traceparent": OWN, "tracestate": "a=1"}]


def test_a_tracer_that_fails_fails_no_emit(
    connection: psycopg.Connection[Any], spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken processor")

    provider = trace.get_tracer_provider()
    assert isinstance(provider, TracerProvider)
    processor = SimpleSpanProcessor(spans)
    provider.add_span_processor(processor)
    monkeypatch.setattr(processor, "on_end", fail)
    outbox.emit(connection, "ending", 1)
    monkeypatch.setattr(processor, "on_start", fail)
    outbox.emit(connection, "starting", 1)
    ending, starting = headers(connection)
    assert "traceparent" in (ending or {})
    assert starting is None
