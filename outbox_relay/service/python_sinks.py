"""Build Python sinks from their settings. Secrets of the relay stay out of their worker processes."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import structlog

from outbox_relay.postgres.conninfo import find_authorities
from outbox_relay.service.logs import logger
from outbox_relay.settings import PythonSettings, Settings, WebhookSettings
from outbox_relay.sinks.python import PythonSink, WorkerTask

OWN_VARIABLES = ("OUTBOX_RELAY_", "PG")
"""Beginnings of the names of variables that are the relay's own: its settings, and defaults of its connection."""
MOST_THREADS = 64
"""Maximum number of threads of a worker process."""


def python_sink(
    name: str, settings: Settings, sink: PythonSettings, replay: int | None = None, slots: int | None = None
) -> PythonSink:
    """Return the Python sink ``name``, or its client for a ``replay`` with ``slots`` calls at once, not yet open."""
    log = logger().bind(relay=settings.relay.name, sink=name)
    workers = sink.workers if replay is None else 1
    max_in_flight = slots or sink.max_in_flight
    threads = min(MOST_THREADS, math.ceil(max_in_flight / workers))
    dsn = sink.dsn.get_secret_value() if sink.transaction and sink.dsn is not None else ""
    find_authorities(dsn)
    environment = worker_environment(settings, os.environ)

    def report(line: str, left_out: int) -> None:
        if structlog.is_configured():  # not in a check, whose findings say it
            log.info("handler.output", line=line, left_out=left_out)

    def report_end(reason: str, delay: float) -> None:
        if structlog.is_configured():
            log.warning("worker.ended", reason=reason, again_in_seconds=round(delay, 2))

    return PythonSink(
        name,
        WorkerTask(sink.handler, name, threads, dsn, sink.max_memory_mb or None, environment, replay),
        report=report,
        on_end=report_end,
        workers=workers,
        max_in_flight=max_in_flight,
        timeout_seconds=sink.timeout_seconds,
        delivery_details=sink.record_attempts == "all",
    )


def worker_environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker: those of ``environ`` without the relay's own and those of webhook headers."""
    webhooks = (sink for sink in settings.sinks.values() if isinstance(sink, WebhookSettings))
    secret = {value.env for sink in webhooks for value in sink.headers.values() if value.env is not None}
    return {name: value for name, value in environ.items() if not name.startswith(OWN_VARIABLES) and name not in secret}
