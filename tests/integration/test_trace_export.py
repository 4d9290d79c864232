"""Traces that cannot be exported or recorded: deliveries go on, the log says why, a stop takes no longer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import psycopg
import pytest

from outbox_relay.service.tracing import MISSING
from tests.support.collector import Collector
from tests.support.database import Database
from tests.support.receiver import Receiver
from tests.support.relay_config import webhook_with_files_config
from tests.support.service import RelayService
from tests.support.wait import until

EVENTS = 200
STOP_SECONDS = 10.0
"""Longest stop on a busy machine: the export of the last spans has 2 s of it."""


@pytest.fixture
def receiver() -> Generator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def emit_some(database: Database) -> None:
    with psycopg.connect(database.dsn) as connection:
        connection.execute("select outbox.emit('a.created', '1') from generate_series(1, %s)", [EVENTS])


def a_relay(database: Database, receiver: Receiver, directory: Path, **environment: str) -> RelayService:
    text = webhook_with_files_config(f'dsn = "{database.dsn}"', receiver.url, directory)
    return RelayService(directory, text, **{"CRM_TOKEN": "hunter2", "OTEL_BSP_SCHEDULE_DELAY": "50", **environment})


def stop_when_delivered(receiver: Receiver, relay: RelayService) -> float:
    """Wait until all events have arrived, stop the relay, and return how long that took."""
    until(lambda: len(receiver.requests) == EVENTS, seconds=30, what="every event arrives")
    began = time.monotonic()
    assert relay.stop() == 0
    return time.monotonic() - began


@pytest.mark.slow  # starts a relay process
def test_a_collector_that_refuses_is_logged_without_a_secret_and_stops_nothing(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    with Collector(status=401) as collector:
        variables = {**collector.variables, "OTEL_EXPORTER_OTLP_HEADERS": "api-key=hunter2,hunter2"}
        variables["OTEL_EXPORTER_OTLP_ENDPOINT"] += "/hunter2-path"
        with a_relay(database, receiver, tmp_path, **variables) as relay:
            emit_some(database)
            until(lambda: "Failed to export" in relay.log.read_text(), seconds=30, what="lost spans are logged")
            assert stop_when_delivered(receiver, relay) < STOP_SECONDS
            assert "hunter2" not in relay.log.read_text()
            assert "Traceback" not in relay.log.read_text()


@pytest.mark.slow
def test_a_collector_that_never_answers_holds_up_neither_deliveries_nor_the_stop(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    with Collector(status=None) as collector:
        queue = {
            "OTEL_BSP_MAX_QUEUE_SIZE": "20",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "10",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "60",
        }
        with a_relay(database, receiver, tmp_path, **collector.variables, **queue) as relay:
            emit_some(database)
            assert stop_when_delivered(receiver, relay) < STOP_SECONDS


PROGRAM = """
import sys
from outbox_relay.service import process, tracing
from tests.support.logs import RecordedLog

log = RecordedLog()
if "blocked" in sys.argv:
    sys.modules["opentelemetry"] = None
assert tracing.start("relay", log) is tracing.untraced
print(*[f"{level} {event} {values['reason']}" for level, event, values in log.lines], end="")
assert "blocked" in sys.argv or log.lines or not [name for name in sys.modules if name.startswith("opentelemetry")]
"""


@pytest.mark.parametrize(
    ("variables", "arguments", "shown"),
    [
        ({}, [], ""),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, [], "zipkin"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, [], "otlp_proto_grpc"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, ["blocked"], MISSING),
    ],
    ids=["unwanted", "unknown", "another protocol", "without the extra"],
)
def test_a_relay_that_records_no_traces_says_why(variables: dict[str, str], arguments: list[str], shown: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert shown in done.stdout
    assert done.stdout.startswith("error traces.not_recorded ") or not shown
