"""When a relay records traces, what of the tracing library's log is shown, and what a traced sink passes on."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Generator, Sequence
from datetime import UTC, datetime

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult

from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Failed, Unavailable, Verdict
from outbox_relay.service.traced_sink import MOST_LINKS, traced_sink
from outbox_relay.service.tracing import wanted
from outbox_relay.sinks import Call, Sink
from outbox_relay.sinks.posting import EventLoopThread, PostingSink
from tests.docs.pages import ROOT, prose
from tests.support.memory_sink import MemorySink
from tests.support.wait import until

PAGE = "docs/observability.md"
PACKAGE = ROOT / "outbox_relay"
ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}
PARENT = '{{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-{:016x}-{}"}}'


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "relay"}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://localhost:4318"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "console"}, True),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "None"}, False),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": ""}, True),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "True"}, False),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "false"}, True),
    ],
)
def test_the_variables_say_whether_traces_are_recorded(environ: dict[str, str], expected: bool) -> None:
    assert wanted(environ) is expected


def an_event(number: int, headers: str | None = None) -> StoredEvent:
    return StoredEvent(number, 0, f"uid-{number}", "a", "canary", b"1", "text/plain", headers, None, datetime.now(UTC))


@pytest.fixture
def thread() -> Generator[EventLoopThread]:
    """Return the thread in which memory sinks deliver."""
    thread = EventLoopThread()
    yield thread
    thread.stop()


Traced = Callable[..., tuple[Sink, InMemorySpanExporter]]


@pytest.fixture
def traced(thread: EventLoopThread) -> Traced:
    """Return a function that returns a traced sink for a memory sink, and what is exported."""

    def made(sink: MemorySink) -> tuple[Sink, InMemorySpanExporter]:
        exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        return traced_sink(provider.get_tracer("test"), "crm", PostingSink(sink, thread)), exporter

    return made


def answering(*verdicts: Verdict) -> Callable[[StoredEvent, int], Verdict]:
    return lambda event, _: verdicts[event.id]


def verdicts_of(made: Sink, events: Sequence[StoredEvent]) -> Sequence[Verdict] | None:
    made.submit(Call(events, float("inf")))
    [call] = until(lambda: made.completed(1.0), seconds=10, what="the call ends")
    return call.verdicts


def delivered(made: Sink, events: Sequence[StoredEvent], exporter: InMemorySpanExporter) -> ReadableSpan:
    verdicts_of(made, events)
    [span] = exporter.get_finished_spans()
    return span


def test_links_lead_to_recorded_spans_alone(traced: Traced) -> None:
    made, exporter = traced(MemorySink())
    events = [an_event(n, PARENT.format(n + 1, "01" if n % 2 else "00")) for n in range(4 * MOST_LINKS)]
    span = delivered(made, [an_event(9999), *events], exporter)
    assert [link.context.span_id for link in span.links] == [2 * n + 2 for n in range(MOST_LINKS)]
    assert span.parent is None


def test_a_failed_batch_has_the_class_of_its_first_failure(traced: Traced) -> None:
    made, exporter = traced(MemorySink(answering(DELIVERED, Unavailable("canary"), Failed("canary", 500))))
    span = delivered(made, [an_event(n) for n in range(3)], exporter)
    assert (span.attributes or {})["error.type"] == "unavailable"
    assert "canary" not in span.to_json()


def test_a_request_that_is_withdrawn_ends_its_span(traced: Traced) -> None:
    async def forever(_: StoredEvent, __: int) -> Verdict:
        await asyncio.sleep(3600)
        return DELIVERED

    made, exporter = traced(MemorySink(forever, keeps_order=False))
    made.submit(Call([an_event(1)], float("inf")))
    assert not made.completed(0.1)
    made.withdraw()
    [span] = exporter.get_finished_spans()
    assert (span.attributes or {})["error.type"] == "withdrawn"


class Faulty(Sampler, SpanProcessor):
    """A sampler and a processor of another package, one of which fails."""

    def __init__(self, failing: str) -> None:
        self._failing = failing

    def should_sample(self, *_arguments: object, **_named: object) -> SamplingResult:
        if self._failing == "sampler":
            raise RuntimeError("faulty")
        return SamplingResult(Decision.RECORD_AND_SAMPLE)

    def get_description(self) -> str:
        return "faulty"

    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError(f"{span.name} is not exported")


@pytest.mark.parametrize("failing", ["sampler", "processor"])
def test_a_library_that_fails_stops_no_delivery(failing: str, thread: EventLoopThread) -> None:
    provider = TracerProvider(sampler=Faulty(failing), shutdown_on_exit=False)
    provider.add_span_processor(Faulty(failing))
    made = traced_sink(provider.get_tracer("test"), "crm", PostingSink(MemorySink(), thread))
    assert verdicts_of(made, [an_event(0)]) is None


def test_the_page_has_every_attribute() -> None:
    sources = (PACKAGE / "emit_spans.py", PACKAGE / "service" / "traced_sink.py")
    code = "".join(path.read_text(encoding="utf-8") for path in sources).replace("{kind}", "name")
    recorded = set(re.findall(r'"((?:messaging|http|server|url|outbox|error)\.[a-z_.]+)"', code))
    rows = [line.split(" | ")[0] for line in prose(PAGE).splitlines() if line.startswith("| `")]
    described = {name for row in rows for name in re.findall(r"`([a-z_]+\.[a-z_.]+)`", row)}
    assert described == recorded | {"messaging.destination.template"}
