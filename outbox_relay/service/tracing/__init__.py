"""Traces of deliveries, recorded with OpenTelemetry if the variables ``OTEL_*`` ask for them.

Nothing of OpenTelemetry is imported otherwise. The spans are recorded around the sinks, so that the relay itself
contains nothing of this and a relay without traces does no work for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from structlog.stdlib import BoundLogger

from outbox_relay.sinks import Sink

EXPORTER, DISABLED = "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
MISSING = "the variables OTEL_* ask for traces, which need the extra otel: pip install 'outbox-relay[relay,otel]'"

Trace: TypeAlias = Callable[[str, Sink], Sink]
"""Returns a sink that records a span for each call of the sink with a name."""


class Tracing(Protocol):
    """The traces of one process."""

    def traced(self, name: str, sink: Sink) -> Sink:
        """Return a sink that records a span for each call of ``sink``, whose name in the settings is ``name``."""
        ...

    def stop(self) -> None:
        """Export the spans that are left, for a limited time."""
        ...


def untraced(_: str, sink: Sink) -> Sink:
    """Return ``sink`` as it is."""
    return sink


def wanted(environ: Mapping[str, str]) -> bool:
    """Return True if the variables ask for traces: with an exporter other than none, or with an endpoint."""
    if environ.get(DISABLED, "").strip().lower() == "true":
        return False
    if exporter := environ.get(EXPORTER, "").strip():
        return exporter.lower() != "none"
    return any(environ.get(name, "").strip() for name in ENDPOINTS)


def start(environ: Mapping[str, str], relay: str, log: BoundLogger) -> Tracing | None:
    """Start recording traces for the relay named ``relay``. Return None if that is not wanted or not possible.

    A relay that cannot record traces delivers nevertheless. The log then has the reason.
    """
    if not wanted(environ):
        return None
    try:
        from outbox_relay.service.tracing.recording import RecordedTracing

        return RecordedTracing(environ, relay, log)
    except ImportError:
        problem = MISSING
    except Exception as error:
        # The message of another class may quote the value of a variable, such as a header with a token.
        problem = str(error) if type(error) is LookupError else type(error).__name__
    log.error("traces.not_recorded", reason=problem)
    return None
