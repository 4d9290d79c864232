"""The log of a relay, whose reader may stand still, and lines of the package in the log of an application."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from contextlib import redirect_stderr

import pytest
import structlog
from structlog.typing import EventDict

from outbox_relay.service.logs import logger
from outbox_relay.ui.access import Failures
from tests.docs.pages import blocks

PAGE = "docs/observability.md"
ADDRESS = "192.0.2.7"


def fail_once() -> None:
    """Log the line about an address with too many wrong passwords."""
    Failures(1).add(ADDRESS)


def test_a_line_is_a_record_of_the_applications_log(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    fail_once()
    [record] = caplog.records
    assert (record.name, record.levelname) == ("outbox_relay", "WARNING")
    assert record.getMessage() == f"too many wrong passwords or tokens of={ADDRESS}"
    assert (vars(record)["event"], vars(record)["fields"]) == ("ui.too_many_failures", {"of": ADDRESS})
    assert capfd.readouterr() == ("", "")


def test_a_record_of_an_error_has_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError("100 % wrong")
    logger().error("ui.failed", path="/%s", exc_info=error)
    [record] = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error
    assert record.getMessage() == "request failed path=/%s"


def test_levels_are_those_of_the_application(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="outbox_relay"):
        fail_once()
    assert caplog.records == []


def test_structlog_of_the_application_gets_the_lines(caplog: pytest.LogCaptureFixture) -> None:
    lines: list[EventDict] = []

    def keep(_logger: object, _level: str, line: EventDict) -> EventDict:
        lines.append(dict(line))
        raise structlog.DropEvent

    structlog.configure(processors=[keep])
    fail_once()
    assert lines == [{"event": "ui.too_many_failures", "of": ADDRESS}]
    assert caplog.records == []


def test_the_page_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = [block.text for block in blocks(PAGE) if block.language == "python"]
    [line] = [block.text for block in blocks(PAGE) if block.language == "text"]
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger("outbox_relay"), "level", logging.NOTSET)
    with redirect_stderr(io.StringIO()) as shown:
        exec(compile(code, PAGE, "exec"), {})  # noqa: S102 - of the page
        fail_once()
    assert shown.getvalue().split(" ")[2:] == line.split(" ")[2:]


# -- the log of a relay -----------------------------------------------------------------------------------------------

LOGS = "import logging; from outbox_relay.service import logs; logs.configure('info', 'json'); log = logging.getLogger;"


@pytest.mark.processes
def test_a_process_that_ends_has_written_every_line_and_no_value_of_the_tracing_library() -> None:
    code = LOGS + "[log('a').warning('%s', n) for n in range(2000)]; log('a').warning('%d', 'canary'); "
    code += "log('opentelemetry.util.re').warning('Header format invalid: %s', 'canary')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    *lines, last = [json.loads(line)["message"] for line in ended.stderr.splitlines()]
    assert lines == [str(n) for n in range(2000)]
    assert last == "Header format invalid: %s"


@pytest.mark.processes
def test_a_reader_that_stands_still_blocks_nobody_and_lines_beyond_the_bound_are_counted() -> None:
    code = "from outbox_relay.service import logs; logs.MOST_LINES = 300; import sys;"
    code += LOGS + "[log('a').warning('x' * 999) for n in range(1000)]; print('done', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"done\n"
        written, dropped = 0, None
        for line in process.stderr:
            found = json.loads(line)
            if found["event"] == "log.dropped":
                dropped = found["lines"]
                process.stdin.close()
            else:
                written += 1
        assert process.wait(30) == 0
    assert 300 <= written < 1000
    assert dropped == 1000 - written
