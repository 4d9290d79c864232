"""The provider of spans and their export, configured by the variables ``OTEL_*`` as the SDK reads them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from structlog.stdlib import BoundLogger

from outbox_relay import __version__
from outbox_relay.emit_spans import CONVENTIONS
from outbox_relay.service.tracing import EXPORTER, MISSING
from outbox_relay.service.tracing.export import LibraryLog, MeasuredProcessor
from outbox_relay.service.tracing.traced_sinks import traced_sink
from outbox_relay.sinks import Sink

STOP_SECONDS = 2.0
"""Time limit for the export of the last spans at a stop."""
EXPORTERS = "opentelemetry_traces_exporter"
"""The group of entry points by which the SDK finds exporters."""
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP = "http/protobuf"
OTLP = {HTTP: "otlp_proto_http", "grpc": "otlp_proto_grpc"}
SERVICE_NAME = "outbox-relay"


class RecordedTracing:
    """Traces that are recorded and exported in the background. Raises LookupError without a usable exporter."""

    def __init__(self, environ: Mapping[str, str], relay: str, log: BoundLogger) -> None:
        self._log = log
        library = LibraryLog(log)
        library.install()
        self._provider = TracerProvider(resource=_resource(relay), shutdown_on_exit=False)
        self._processors = [MeasuredProcessor(exporter, library, log) for exporter in _exporters(environ)]
        for processor in self._processors:
            self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("outbox_relay", __version__, schema_url=CONVENTIONS)
        log.info("traces.recording")

    def traced(self, name: str, sink: Sink) -> Sink:
        """Return a sink that records a span for each call of ``sink``, whose name in the settings is ``name``."""
        return traced_sink(self._tracer, name, sink)

    def stop(self) -> None:
        """Export the spans that are left, for ``STOP_SECONDS``. An export that takes longer ends with the process."""
        thread = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        thread.start()
        thread.join(STOP_SECONDS)
        lost = sum(each.counts.ended - each.counts.exported for each in self._processors)
        if lost:
            self._log.warning("traces.lost_at_stop", lost=lost)


def _resource(relay: str) -> Resource:
    """Return the resource that the variables describe, with defaults of this service."""
    found = Resource.create()
    ours = {"service.name": SERVICE_NAME, "service.version": __version__, "service.instance.id": relay}
    known = {name for name in found.attributes if name != "service.name"}
    if not str(found.attributes.get("service.name", "")).startswith("unknown_service"):
        known.add("service.name")
    return found.merge(Resource({name: value for name, value in ours.items() if name not in known}))


def _exporters(environ: Mapping[str, str]) -> Iterator[SpanExporter]:
    for name in (environ.get(EXPORTER, "").strip() or "otlp").split(","):
        wanted = name.strip()
        entry = OTLP.get(_protocol(environ), "") if wanted == "otlp" else wanted
        found = next(iter(entry_points(group=EXPORTERS, name=entry)), None)
        if found is None:
            raise LookupError(_unknown(wanted, _protocol(environ)))
        yield found.load()()


def _protocol(environ: Mapping[str, str]) -> str:
    return next((value for name in PROTOCOLS if (value := environ.get(name, "").strip())), HTTP)


def _unknown(name: str, protocol: str) -> str:
    if name != "otlp":
        return f"{EXPORTER}: no exporter named {name} is installed"
    if protocol == HTTP:
        return MISSING
    return f"{PROTOCOLS[1]}: no exporter for {protocol} is installed; the extra otel has {HTTP}"
