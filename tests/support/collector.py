"""An OpenTelemetry collector of the tests' own: takes OTLP over HTTP, decodes it, and keeps the spans."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan

from outbox_relay.workbench.embedded.ports import LOOPBACK

START_SECONDS = 10
Value = str | int | float | bool
Context = tuple[str, str]
"""The ids of a trace and of a span, as a traceparent has them."""


@dataclass(frozen=True)
class Span:
    """A span that was received."""

    name: str
    kind: str
    context: Context
    parent: str
    """The id of the parent span, or an empty text."""
    links: list[Context]
    state: str
    attributes: dict[str, Value]
    failed: bool
    resource: dict[str, Value]
    scope: str
    schema: str

    @property
    def traceparent(self) -> str:
        """The header that names this span, without its flags."""
        return f"00-{self.context[0]}-{self.context[1]}-"


class Collector:
    """Listens on a port of its own, for use with `with`. It answers with `status`, or not at all if that is None."""

    def __init__(self, status: int | None = 200) -> None:
        self.status = status
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.port = 0
        self._started = threading.Event()
        self._ending = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="collector", daemon=True)

    @property
    def endpoint(self) -> str:
        """The value for OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a process that exports to this collector, at once."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}

    @property
    def spans(self) -> list[Span]:
        """All spans that were received."""
        return [span for body in list(self.bodies) for span in _spans(body)]

    def named(self, *names: str) -> list[Span]:
        """Return the spans with one of these names."""
        return [span for span in self.spans if span.name in names]

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(START_SECONDS), "the collector did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(START_SECONDS)
        assert not self._thread.is_alive(), "the collector did not end"

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        application = web.Application(client_max_size=1 << 26)
        application.router.add_post("/{path:.*}", self._take)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, LOOPBACK, 0)
        await site.start()
        self.port = runner.addresses[0][1]
        self._started.set()
        await self._ending.wait()
        await runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.paths.append(request.path)
        self.headers.append(dict(request.headers))
        if self.status is None:
            await self._ending.wait()
            return web.Response(status=503)
        if self.status == 200:
            self.bodies.append(body)
        return web.Response(
            status=self.status,
            body=ExportTraceServiceResponse().SerializeToString(),
            content_type="application/x-protobuf",
        )


def _spans(body: bytes) -> Iterable[Span]:
    for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield _span(span, of_resource, of_scope.scope.name, of_scope.schema_url)


def _span(span: ProtoSpan, of_resource: ResourceSpans, scope: str, schema: str) -> Span:
    return Span(
        span.name,
        ProtoSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        (span.trace_id.hex(), span.span_id.hex()),
        span.parent_span_id.hex(),
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        span.trace_state,
        _values(span.attributes),
        span.status.code == Status.STATUS_CODE_ERROR,
        _values(of_resource.resource.attributes),
        scope,
        schema,
    )


def _values(attributes: Iterable[KeyValue]) -> dict[str, Value]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> Value:
    kind = value.WhichOneof("value")
    assert kind in ("string_value", "int_value", "double_value", "bool_value"), kind
    found: Value = getattr(value, kind)
    return found
