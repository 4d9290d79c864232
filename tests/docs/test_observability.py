"""The page about logs and traces: its events and the version of the conventions are those of the code."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from outbox_relay.domain.log_events import KAFKA_CLIENT, LIBRARY, LOG_EVENTS
from outbox_relay.emit_spans import CONVENTIONS
from tests.docs.pages import ROOT, blocks, text

PAGE = "docs/observability.md"
LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}
LOGS = re.compile(r"(\w+\.)*_?(log|seldom|rate_limited_log|logger)|.*[lL]ogger\(.*\)")
"""Expressions that are loggers."""
PASSED_ON = {"domain/rate_limited_log.py", "service/supervisor.py"}
"""Modules in which a call gets its event as a value, from a call that names it."""
NO_SERVICE = {"workbench", "outbox.py", "emit_spans.py"}
"""Modules that are not part of the service. Those of `emit` log in the application, by its rules."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules of the service with their paths."""
    package = ROOT / "outbox_relay"
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] not in NO_SERVICE:
            yield str(name), ast.parse(path.read_text())


def log_calls() -> Iterator[tuple[str, ast.expr]]:
    """Yield the first argument of each call that logs, with its place."""
    for name, module in modules():
        for node in ast.walk(module):
            match node:
                case ast.Call(func=ast.Attribute(value=logger, attr=level), args=[event, *_]) if level in LEVELS:
                    if LOGS.fullmatch(ast.unparse(logger)):
                        yield f"{name}:{node.lineno}", event
                case _:
                    pass


def named_events() -> set[str]:
    """Return every event that a string of the service names, outside the table."""
    return {
        str(node.value)
        for name, module in modules()
        if name != str(Path("domain/log_events.py"))
        for node in ast.walk(module)
        if isinstance(node, ast.Constant) and node.value in LOG_EVENTS
    }


def test_every_line_of_the_service_has_an_event_of_the_table() -> None:
    calls = list(log_calls())
    assert len(calls) > 40
    unnamed = [
        place
        for place, event in calls
        if not (isinstance(event, ast.Constant) and event.value in LOG_EVENTS)
        and place.rpartition(":")[0] not in PASSED_ON
    ]
    assert unnamed == []


def test_every_event_of_the_table_is_logged() -> None:
    assert set(LOG_EVENTS) - named_events() == {KAFKA_CLIENT, LIBRARY}, "these two are named by constants"


def test_names_are_of_one_form() -> None:
    assert [name for name in LOG_EVENTS if not re.fullmatch(r"[a-z]+\.[a-z_]+|library", name)] == []
    assert len(set(LOG_EVENTS.values())) == len(LOG_EVENTS)


def test_the_page_lists_every_event() -> None:
    rows = re.findall(r"^\| [a-z, ]+ \| (`[^|]*) \|", text(PAGE), re.MULTILINE)
    listed = [name for cell in rows for name in re.findall(r"`([^`]+)`", cell)]
    assert sorted(listed) == sorted(LOG_EVENTS)


def test_the_examples_of_the_log_are_lines_as_they_are_written() -> None:
    [block] = [block for block in blocks(PAGE) if block.language == "json"]
    for line in map(json.loads, block.text.splitlines()):
        assert {"level", "time", "logger"} <= line.keys()
        assert line["message"] == LOG_EVENTS[line["event"]]


def test_the_page_names_the_version_of_the_conventions_that_spans_follow() -> None:
    """The tests of traces compare the schema URL of real spans with the version."""
    named = re.findall(r"version (\S+) of OpenTelemetry's\s+semantic conventions", text(PAGE))
    assert [f"https://opentelemetry.io/schemas/{version}" for version in named] == [CONVENTIONS]
