"""The log: structured lines on stderr for operators, and none for a single event.

Each line has its name in ``event``, one of ``log_events``, and a text for people in ``message``.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import queue
import sys
import time

import structlog
from structlog.typing import EventDict, Processor

from outbox_relay.domain.log_events import KAFKA_CLIENT, LIBRARY, LOG_EVENTS

NAME = "outbox_relay"
"""The name of the relay's logger."""
KAFKA_LOGGER = "outbox_relay.kafka"
"""The logger to which Kafka's client writes."""
MOST_LINES = 10_000
"""Lines that wait to be written. Lines beyond them are dropped, and counted."""
FLUSH_SECONDS = 1.0
"""Longest wait for the lines that are left when the process ends."""


def configure(level: str, form: str, *, colors: bool = False) -> None:
    """Log to stderr at ``level``, "debug" to "critical", in the format "json" or "console".

    Records of libraries use the same format. Libraries whose records could name what is sent only log warnings.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        _add_message,
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    renderer: Processor = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.dev.ConsoleRenderer(
            colors=colors, event_key="message", exception_formatter=structlog.dev.plain_traceback
        )
    )
    handler = _Handler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_without_values, *shared, structlog.stdlib.ExtraAdder(allow=("sink",))],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    for former in root.handlers:
        former.close()
    root.handlers[:] = [handler]
    _Writer(handler).start()
    root.setLevel(level.upper())
    logging.raiseExceptions = False  # a record of a library that cannot be formatted is left out
    _quieten_libraries()


class _Handler(logging.handlers.QueueHandler):
    """Leaves lines to a thread, so that nothing else waits for their reader: a pipe that is not read is full soon."""

    def __init__(self) -> None:
        self.lines: queue.Queue[logging.LogRecord | None] = queue.Queue(MOST_LINES)
        super().__init__(self.lines)
        self.dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        """Add a line, or drop it if too many wait."""
        try:
            self.lines.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Wait until all lines are written, at most for a second."""
        until = time.monotonic() + FLUSH_SECONDS
        while self.lines.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.005)

    def close(self) -> None:
        """Write the lines that are left, for at most a second, and end the thread."""
        self.flush()
        with contextlib.suppress(queue.Full):
            self.lines.put_nowait(None)
        super().close()


class _Writer(logging.handlers.QueueListener):
    """Writes the lines of a handler to stderr, and says how many were dropped once lines are written again."""

    def __init__(self, source: _Handler) -> None:
        super().__init__(source.lines, logging.StreamHandler(sys.stderr))
        self._source = source

    def handle(self, record: logging.LogRecord) -> None:
        """Write a line."""
        super().handle(record)
        if self._source.dropped and self._source.lines.empty():
            dropped, self._source.dropped = self._source.dropped, 0
            logger().warning("log.dropped", lines=dropped)


def flush() -> None:
    """Wait until all lines are written, at most for a second, because ``os._exit`` does not wait."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def _without_values(_logger: object, _level: str, line: EventDict) -> EventDict:
    """Leave out what OpenTelemetry fills into its messages, such as headers and URLs: they may hold a secret."""
    record = line.get("_record")
    if record is not None and record.name.startswith("opentelemetry"):
        line["event"] = str(record.msg)
        line.pop("exc_info", None)
    return line


def _add_message(_logger: object, _level: str, line: EventDict) -> EventDict:
    """Add the message of the event. The text of a library becomes the message, and the event says whose it is."""
    event = str(line["event"])
    if event in LOG_EVENTS:
        line["message"] = LOG_EVENTS[event]
    else:
        line["message"] = event
        line["event"] = KAFKA_CLIENT if line.get("logger") == KAFKA_LOGGER else LIBRARY
    return line


def _quieten_libraries() -> None:
    for name in ("httpx2", "httpcore2", "asyncio", "aiohttp.access"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("urllib3").setLevel(logging.CRITICAL)  # warns with URLs, whose path may hold a token


def logger() -> structlog.stdlib.BoundLogger:
    """Return the logger of the relay.

    In an application that has not configured structlog it writes records to the logger ``outbox_relay`` of ``logging``.
    """
    if structlog.is_configured():
        return structlog.stdlib.get_logger(NAME)
    return structlog.wrap_logger(
        logging.getLogger(NAME),
        processors=[structlog.stdlib.filter_by_level, _as_record],
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def _as_record(_logger: object, _level: str, line: EventDict) -> tuple[tuple[str], dict[str, object]]:
    """Return the arguments of a method of ``logging``: the message with the fields, and the event as an attribute."""
    event, error = str(line.pop("event")), line.pop("exc_info", None)
    fields = "".join(f" {name}={value}" for name, value in line.items())
    text = f"{LOG_EVENTS.get(event, event)}{fields}"
    return (text,), {"exc_info": error, "extra": {"event": event, "fields": dict(line)}}


def reason(error: BaseException) -> str:
    """Return the message of ``error``, or the name of its class if the message is empty."""
    return str(error) or type(error).__name__
