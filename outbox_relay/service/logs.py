"""The log: structured, one line per thing that an operator may act on, nothing per event."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor


def configure(level: str, form: str, *, colors: bool = False) -> None:
    """Log to stderr at ``level`` ("debug" to "critical"), as "json" or for a "console", with ``colors`` or without.

    Records of the libraries pass through the same renderer; those that could name what is sent are kept to
    warnings.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
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
        else structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(allow=("sink",))],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("httpx", "httpcore", "asyncio", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # The pool warns of every connection that it cannot make, in libpq's words; the relay says it once, and in its own.
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)


def logger(name: str = "outbox_relay") -> structlog.stdlib.BoundLogger:
    """The logger of a part."""
    return structlog.stdlib.get_logger(name)
