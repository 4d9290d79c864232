"""Log lines of a client that cannot connect."""

import json
import logging
import subprocess
import sys

import pytest

from outbox_relay.sinks.kafka.client import ClientLog, ClientSettings
from outbox_relay.sinks.kafka.repeat_filter import EVERY_SECONDS, MAX_KINDS, MAX_LINES, RepeatFilter

REFUSED = "FAIL [rdkafka#producer-1] localhost:9092/bootstrap: Connection refused (after {}ms in state CONNECT)"


def test_a_repeated_line_is_written_once_per_period_with_the_number_of_suppressed_ones() -> None:
    repeats = RepeatFilter()
    assert repeats.filter(REFUSED.format(0), 100.0) == REFUSED.format(0)
    assert [repeats.filter(REFUSED.format(n), 100.0 + n) for n in range(1, 60)] == [None] * 59
    later = repeats.filter(REFUSED.format(7), 100.0 + EVERY_SECONDS)
    assert later == f"{REFUSED.format(7)} (59 similar lines suppressed before it)"


def test_different_lines_are_bounded_too() -> None:
    repeats = RepeatFilter()
    written = [line for n in range(1000) if (line := repeats.filter("x" * n, 5.0)) is not None]
    assert len(written) == MAX_LINES
    assert (
        repeats.filter("another", 5.0 + EVERY_SECONDS)
        == f"another ({1000 - MAX_LINES} other lines suppressed before it)"
    )
    assert len(repeats) <= MAX_KINDS


def test_an_outage_of_an_hour_writes_few_lines_and_each_has_the_sinks_name(caplog: pytest.LogCaptureFixture) -> None:
    log = ClientLog(ClientSettings({"bootstrap.servers": "a:1"}), "events")
    with caplog.at_level(logging.INFO, "outbox_relay.kafka"):
        for n in range(3 * 3600):
            log.log(logging.ERROR, "%s", REFUSED.format(n))
    assert 1 <= len(caplog.records) <= MAX_LINES
    assert {getattr(record, "sink", None) for record in caplog.records} == {"events"}


@pytest.mark.processes
def test_log_lines_have_the_sinks_name() -> None:
    code = (
        "import logging; from outbox_relay.service import logs; logs.configure('info', 'json');"
        "from outbox_relay.sinks.kafka.client import ClientLog, ClientSettings;"
        "ClientLog(ClientSettings({'bootstrap.servers': 'a:1'}), 'events').log(logging.ERROR, '%s', 'refused')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    line = json.loads(ended.stderr)
    assert (line["event"], line["message"], line["sink"]) == ("kafka.client", "refused", "events")
    assert line["level"] == "error"
