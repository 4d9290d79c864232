"""The export of spans: bounded, counted, and logged in our own words at a limited rate."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from structlog.stdlib import BoundLogger

from outbox_relay.domain.log_events import RateLimitedLog

REPORT_SECONDS = 60.0
"""Least time between two log lines about spans that are lost."""
FULL = "the queue of spans is full: they end faster than they are exported"
LIBRARY = "opentelemetry"
EXPORT_LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")
"""Loggers of the library for the export, which the relay reports in lines of its own."""


class LibraryLog(logging.Handler):
    """Turns lines of the library into ours: without the values that may hold a secret, such as headers and URLs."""

    def __init__(self, log: BoundLogger) -> None:
        super().__init__(logging.WARNING)
        self._seldom = RateLimitedLog(log, REPORT_SECONDS)
        self.last_problem = ""
        """The last problem of an export. It is left to the line that says how many spans were lost."""

    def install(self) -> None:
        """Take over the lines of the library, and leave out those of the client below it."""
        library = logging.getLogger(LIBRARY)
        library.propagate = False
        library.handlers[:] = [self]
        # It logs URLs, whose path may hold a token.
        logging.getLogger("urllib3").setLevel(logging.CRITICAL)

    def emit(self, record: logging.LogRecord) -> None:
        """Remember or log a line."""
        problem = _shown(record)
        if record.name.startswith(EXPORT_LOGGERS):
            self.last_problem = problem
        else:
            self._seldom.warning("traces.library_problem", reason=problem)


def _shown(record: logging.LogRecord) -> str:
    """Return the message of ``record`` with its numbers and classes of errors, and without its other values."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    try:
        return str(record.msg) % tuple(map(_harmless, arguments))
    except (TypeError, ValueError):
        return str(record.msg)


def _harmless(value: object) -> object:
    if isinstance(value, int | float):
        return value
    return type(value).__name__ if isinstance(value, BaseException) else "…"


class ExportCounts:
    """Counts of the spans that one processor was given, handed to its exporter and exported.

    Each number is written by one thread.
    """

    def __init__(self, log: BoundLogger) -> None:
        self._seldom = RateLimitedLog(log, REPORT_SECONDS)
        self.ended = 0
        self.dropped = 0
        self.handed_over = 0
        self.exported = 0

    @property
    def waiting(self) -> int:
        """The number of spans in the queue."""
        return self.ended - self.dropped - self.handed_over

    def report(self, reason: str) -> None:
        """Log that spans are lost, at a limited rate."""
        lost = self.dropped + self.handed_over - self.exported
        self._seldom.warning("traces.lost", reason=reason, lost=lost)


class MeasuredProcessor(BatchSpanProcessor):
    """The SDK's processor, which exports in a thread of its own, with counts.

    It keeps as many spans as ``OTEL_BSP_MAX_QUEUE_SIZE`` says and drops those that end while the queue is full.
    """

    def __init__(self, exporter: SpanExporter, library: LibraryLog, log: BoundLogger) -> None:
        self.counts = ExportCounts(log)
        self._most = self._default_max_queue_size()
        super().__init__(_MeasuredExporter(exporter, self.counts, library))

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span that is sampled, or drop and count it."""
        if not (span.context and span.context.trace_flags.sampled):
            return
        counts = self.counts
        counts.ended += 1
        if counts.waiting > self._most:
            counts.dropped += 1
            counts.report(FULL)
        else:
            super().on_end(span)


class _MeasuredExporter(SpanExporter):
    """An exporter that counts what it exports, and logs what it cannot."""

    def __init__(self, exporter: SpanExporter, counts: ExportCounts, library: LibraryLog) -> None:
        self._exporter = exporter
        self._counts = counts
        self._library = library

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export ``spans``. Called in the thread of the processor."""
        counts = self._counts
        counts.handed_over += len(spans)
        self._library.last_problem = ""
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            counts.exported += len(spans)
        else:
            counts.report(self._library.last_problem or "the exporter failed")
        return result

    def shutdown(self) -> None:
        """Give up an export that waits to be tried again."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Do as the exporter does."""
        return self._exporter.force_flush(timeout_millis)
