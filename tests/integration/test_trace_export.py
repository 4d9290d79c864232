"""Traces that cannot be exported or recorded: deliveries go on, the log says why, a stop takes no longer."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from outbox_relay.service.tracing import MISSING
from tests.support.collector import Collector
from tests.support.database import Database
from tests.support.ports import free_port
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


def events_of(relay: RelayService, event: str) -> list[dict[str, Any]]:
    return [line for line in relay.lines() if line["event"] == event]


def deliver_and_stop(database: Database, receiver: Receiver, relay: RelayService) -> float:
    """Emit and deliver events, stop the relay, and return how long the stop took."""
    emit_some(database)
    return stop_when_delivered(receiver, relay)


def stop_when_delivered(receiver: Receiver, relay: RelayService) -> float:
    """Wait until all events have arrived, stop the relay, and return how long that took."""
    until(lambda: len(receiver.requests) == EVENTS, seconds=30, what="every event arrives")
    began = time.monotonic()
    assert relay.stop() == 0
    return time.monotonic() - began


@pytest.mark.slow  # starts a relay process
def test_a_collector_that_is_down_is_one_line_and_stops_nothing(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}/canary-path"
    with a_relay(database, receiver, tmp_path, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint) as relay:
        assert deliver_and_stop(database, receiver, relay) < STOP_SECONDS
        text = relay.log.read_text()
        assert len(events_of(relay, "traces.lost")) <= 1
        [line] = events_of(relay, "traces.lost_at_stop")
        assert line["lost"] == EVENTS
    assert "canary" not in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_a_collector_that_refuses_is_one_line_with_its_status(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    with Collector(status=401) as collector:
        variables = {**collector.variables, "OTEL_EXPORTER_OTLP_HEADERS": "api-key=hunter2"}
        with a_relay(database, receiver, tmp_path, **variables) as relay:
            emit_some(database)
            until(lambda: events_of(relay, "traces.lost"), seconds=30, what="lost spans are logged")
            assert stop_when_delivered(receiver, relay) < STOP_SECONDS
            [line] = events_of(relay, "traces.lost")
            assert "401" in line["reason"]
            assert line["lost"] > 0
            assert "hunter2" not in relay.log.read_text()
    assert all(headers["api-key"] == "hunter2" for headers in collector.headers)


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
            assert deliver_and_stop(database, receiver, relay) < STOP_SECONDS
            [dropped] = events_of(relay, "traces.lost")
            [lost] = events_of(relay, "traces.lost_at_stop")
        assert "queue" in dropped["reason"]
        assert lost["lost"] == EVENTS


@pytest.mark.slow
def test_without_the_extra_the_log_names_it_and_events_are_delivered(
    database: Database, receiver: Receiver, tmp_path: Path
) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text("import sys\nsys.modules['opentelemetry'] = None\n")
    endpoint = f"http://127.0.0.1:{free_port()}"
    path = {"PYTHONPATH": str(blocked), "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    with a_relay(database, receiver, tmp_path, **path) as relay:
        deliver_and_stop(database, receiver, relay)
        [line] = events_of(relay, "traces.not_recorded")
        assert (line["level"], line["reason"]) == ("error", MISSING)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER: no exporter named zipkin is installed"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL: no exporter for grpc is installed; the extra otel has http/protobuf",
        ),
    ],
)
@pytest.mark.slow
def test_variables_that_cannot_be_followed_are_named(
    database: Database, receiver: Receiver, tmp_path: Path, variables: dict[str, str], reason: str
) -> None:
    with a_relay(database, receiver, tmp_path, **variables) as relay:
        [line] = events_of(relay, "traces.not_recorded")
        assert line["reason"] == reason
        assert relay.stop() == 0


PROGRAM = """
import sys
from outbox_relay.service import process, tracing

assert tracing.start({}, "relay", None) is None
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""


def test_a_relay_without_these_variables_imports_nothing_of_opentelemetry() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
