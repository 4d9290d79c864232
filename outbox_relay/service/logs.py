"""The log: structured lines on stderr for operators, and none for a single event.

Each line has its name in ``event``, one of ``log_events``, and a text for people in ``message``.
"""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import EventDict, Processor

from outbox_relay.domain.log_events import KAFKA_CLIENT, LIBRARY, LOG_EVENTS
from outbox_relay.service.log_writer import LogWriter

NAME = "outbox_relay"
"""The name of the relay's logger."""
KAFKA_LOGGER = "outbox_relay.kafka"
"""The logger to which Kafka's client writes."""


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
    handler = _new_handler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(allow=("sink",))],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    for former in root.handlers:
        former.close()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    _quieten_libraries()


def _new_handler() -> logging.Handler:
    """Return the handler that writes to stderr, which is no file in some tests."""
    try:
        return LogWriter(sys.stderr.fileno(), _report_dropped)
    except (AttributeError, OSError):
        return logging.StreamHandler(sys.stderr)


def _report_dropped(lines: int) -> None:
    logger().warning("log.dropped", lines=lines)


def flush() -> None:
    """Wait until all lines are written, at most for a second, because ``os._exit`` does not wait."""
    for handler in logging.getLogger().handlers:
        handler.flush()


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
