"""An application that records traces, configured as its makers do it, and emits events in a span of its own.

usage: python -m tests.support.traced_application DSN [--many]

Each line of stdin is a JSON object with the arguments of one event. The uids are printed. Without ``--many`` each event
has a statement of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import psycopg

from outbox_relay import outbox
from tests.support.database import Database

SECONDS = 60


def emit_traced(
    database: Database, environment: Mapping[str, str], *events: dict[str, Any], many: bool = False
) -> list[str]:
    """Emit in a process of its own that exports its spans as ``environment`` says, and return the uids."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.traced_application", database.dsn, *(["--many"] if many else [])],
        input="\n".join(map(json.dumps, events)).encode(),
        capture_output=True,
        check=False,
        timeout=SECONDS,
        env={**os.environ, "OTEL_SERVICE_NAME": "shop", **environment},
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().split()


def _main() -> None:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    events = [outbox.Event(**json.loads(line)) for line in sys.stdin]
    with psycopg.connect(sys.argv[1]) as connection, trace.get_tracer("shop").start_as_current_span("checkout"):
        uids = outbox.emit_many(connection, events) if "--many" in sys.argv else _one_by_one(connection, events)
    sys.stdout.write("\n".join(map(str, uids)))
    provider.shutdown()


def _one_by_one(connection: psycopg.Connection[Any], events: list[outbox.Event]) -> list[Any]:
    return [outbox.emit(connection, e.type, e.payload, key=e.key, headers=e.headers) for e in events]


if __name__ == "__main__":
    _main()
