"""Traces of deliveries, recorded with OpenTelemetry if the variables ``OTEL_*`` ask for them.

Nothing of OpenTelemetry is imported otherwise. The spans are recorded around the sinks, so that the relay itself
contains nothing of this and a relay without traces does no work for them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias
from urllib.parse import quote

from structlog.stdlib import BoundLogger

from outbox_relay import __version__
from outbox_relay.emit_spans import CONVENTIONS
from outbox_relay.sinks import Sink

EXPORTER, DISABLED = "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
RESOURCE = "OTEL_RESOURCE_ATTRIBUTES"
DEFAULTS = {EXPORTER: "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
"""Values of variables that are not set, which the SDK reads. The extra ``otel`` has this protocol."""
MISSING = "the variables OTEL_* ask for traces, which need the extra otel: pip install 'outbox-relay[relay,otel]'"
STOP_SECONDS = 2.0
"""Time limit for the export of the last spans at a stop."""

Trace: TypeAlias = Callable[[str, Sink], Sink]
"""Returns a sink that records a span for each call of the sink with a name."""


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


def start(relay: str, log: BoundLogger) -> Trace:
    """Start recording traces for the relay named ``relay``, if that is wanted, and return what records spans.

    A relay that cannot record traces delivers nevertheless. The log then has the reason.
    """
    if not wanted(os.environ):
        return untraced
    try:
        return _configured(relay, log)
    except ImportError:
        problem = MISSING
    except Exception as error:
        # The message of another class may quote the value of a variable, such as a header with a token.
        problem = str(error) if type(error) is RuntimeError else type(error).__name__
    log.error("traces.not_recorded", reason=problem)
    return untraced


def _configured(relay: str, log: BoundLogger) -> Trace:
    """Have the SDK configure itself from the variables."""
    from opentelemetry import trace
    from opentelemetry.sdk._configuration import _OTelSDKConfigurator  # pyright: ignore[reportPrivateUsage] - of distros

    from outbox_relay.service.traced_sink import traced_sink

    for name, value in DEFAULTS.items():
        if not os.environ.get(name, "").strip():
            os.environ[name] = value
    ours = {"service.name": "outbox-relay", "service.version": __version__, "service.instance.id": relay}
    attributes = [*(f"{name}={quote(value)}" for name, value in ours.items()), os.environ.get(RESOURCE, "")]
    os.environ[RESOURCE] = ",".join(filter(None, attributes))  # of two values of an attribute, the last one counts
    configurator: Any = _OTelSDKConfigurator()
    configurator.configure()
    tracer = trace.get_tracer("outbox_relay", __version__, schema_url=CONVENTIONS)
    log.info("traces.recording")
    return lambda name, sink: traced_sink(tracer, name, sink)


def stop(trace: Trace) -> None:
    """Export the spans that are left, for ``STOP_SECONDS``. An export that takes longer ends with the process."""
    if trace is untraced:
        return
    from opentelemetry.trace import get_tracer_provider

    provider: Any = get_tracer_provider()
    thread = threading.Thread(target=provider.shutdown, name="traces", daemon=True)
    thread.start()
    thread.join(STOP_SECONDS)
