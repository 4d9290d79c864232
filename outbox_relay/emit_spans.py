"""Create spans of emitted events, for applications that record traces with OpenTelemetry.

OpenTelemetry is not imported here. It is looked up among the modules that the application has imported.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, cast
from uuid import UUID

from outbox_relay import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer, TracerProvider

CONVENTIONS: Final = "https://opentelemetry.io/schemas/1.44.0"
"""The version of the semantic conventions that the spans follow."""
HEADERS_MAX_BYTES: Final = 16384
"""Longest headers that the database accepts, as the text of a jsonb value."""
TRACESTATE_MAX_CHARS: Final = 512
"""Longest ``tracestate`` that is stored. Every receiver accepts as much (W3C Trace Context, 3.3.1.5)."""

Row = tuple[str, bytes, str | None, str | None, str | None, str | None, str, str | None, str | None, str | None]
"""The parameters of one event: its type is the first, the JSON text of its headers the fourth."""

_log = logging.getLogger(__name__)
_known: tuple[TracerProvider | None, Tracer | None] = (None, None)


class CreateSpans:
    """The create spans of events that are emitted with one statement. They end with the ``with`` block.

    There are none if the application records no traces. A tracer that fails never fails the caller's transaction.

    ``rows`` are the parameters of the events, with ``traceparent`` and ``tracestate`` among their headers. An event
    that has a ``traceparent`` of its own keeps it and has no span.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._trace: Any = sys.modules.get("opentelemetry.trace")
        self._spans: list[Span | None] = []
        self._uids: list[UUID] = []
        self.rows: list[Row] = []
        try:
            if self._trace is not None and _is_active(self._trace):
                self._begin(rows)
        except Exception:
            _log.debug("create spans are not recorded", exc_info=True)
        if len(self.rows) < len(rows):
            self.rows = list(rows)

    def _begin(self, rows: Sequence[Row]) -> None:
        tracer = _tracer(self._trace)
        for row in rows:
            own = _own_headers(row[3])
            span = None if _has(own, "traceparent") else self._start(tracer, row[0])
            self._spans.append(span)
            self.rows.append(row if span is None else _with_context(row, own, span.get_span_context()))

    def _start(self, tracer: Tracer, event_type: str) -> Span:
        attributes = {
            "messaging.system": "outbox",
            "messaging.operation.type": "create",
            "messaging.operation.name": "create",
            "messaging.destination.name": event_type,
        }
        return tracer.start_span(f"create {event_type}", kind=self._trace.SpanKind.PRODUCER, attributes=attributes)

    def emitted(self, uids: list[UUID]) -> list[UUID]:
        """Keep the uids of the events for their spans, and return them."""
        self._uids = uids
        return uids

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            for span, uid in zip_longest(self._spans, self._uids):
                if span is not None:
                    self._end(span, uid, kind)
        except Exception:
            _log.debug("create spans are not recorded", exc_info=True)

    def _end(self, span: Span, uid: UUID | None, kind: type[BaseException] | None) -> None:
        if uid is not None:
            span.set_attribute("messaging.message.id", str(uid))
        if kind is not None:
            span.set_attribute("error.type", f"{kind.__module__}.{kind.__qualname__}")
            span.set_status(self._trace.StatusCode.ERROR)
        span.end()


def _is_active(trace: Any) -> bool:
    """Return True if a provider was set up, or if a context is to be passed on without one."""
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return True
    return bool(trace.get_current_span().get_span_context().is_valid)


def _tracer(trace: Any) -> Tracer:
    """Return the tracer of the application's provider, made once for each provider."""
    global _known  # noqa: PLW0603 - a pair that is replaced whole, so that threads never see half of it
    provider: TracerProvider = trace.get_tracer_provider()
    known, tracer = _known
    if tracer is None or known is not provider:
        tracer = provider.get_tracer("outbox_relay.outbox", __version__, schema_url=CONVENTIONS)
        _known = provider, tracer
    return tracer


def _with_context(row: Row, own: Mapping[str, str], context: SpanContext) -> Row:
    """Return ``row`` with the context among its headers, as far as the limit of their size allows."""
    if not context.is_valid:
        return row
    parent = {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 0xFF:02x}"}
    state = context.trace_state.to_header()
    added = [parent]
    if state and len(state) <= TRACESTATE_MAX_CHARS and not _has(own, "tracestate"):
        added.insert(0, {**parent, "tracestate": state})
    for ours in added:
        # The text has ASCII only, and is therefore at least as long as what the database measures.
        text = json.dumps({**own, **ours})
        if len(text) <= HEADERS_MAX_BYTES:
            return cast("Row", (*row[:3], text, *row[4:]))
    return row


def _own_headers(text: str | None) -> Mapping[str, str]:
    return {} if text is None else cast("dict[str, str]", json.loads(text))


def _has(headers: Mapping[str, str], name: str) -> bool:
    return any(each.lower() == name for each in headers)
