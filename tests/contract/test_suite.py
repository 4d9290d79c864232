"""The suite of the contract itself, run as authors of plug-ins run it: it passes what is right, and finds faults."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.plugin_package import GOOD, write_plugin

EXAMPLE = Path(__file__).parents[2] / "examples" / "nats-sink"
SECONDS = 170
MEMORY = """
STORED, LATER, STATE = [], [], {"up": True}


class Right(Good):
    keeps_order, max_batch, max_in_flight = True, 50, 2

    def deliver(self, events, deadline):
        if lease_clock() >= deadline or not STATE["up"]:
            return [Unavailable("down") for _ in events]
        return [self.store(event) for event in events]

    def store(self, event):
        if event.payload == b"poison":
            return Refused("poison")
        STORED.append((event, self.context.replay))
        return DELIVERED


class Loses(Right):
    def store(self, event):
        return DELIVERED if event.payload == b"7" else super().store(event)


class Reverses(Right):
    def deliver(self, events, deadline):
        return super().deliver(events[::-1], deadline)[::-1]


class Alters(Right):
    def store(self, event):
        return super().store(event._replace(payload=event.payload.replace(b"\\xff", b"?")))


class Accepts(Right):
    def store(self, event):
        super().store(event)
        return DELIVERED


class Pretends(Right):
    def deliver(self, events, deadline):
        return super().deliver(events, deadline) if STATE["up"] else [DELIVERED for _ in events]


class Remembers(Right):
    def deliver(self, events, deadline):
        if not STATE["up"]:
            LATER.extend(events)
        elif LATER:
            super().deliver([LATER.pop() for _ in LATER], deadline)
        return super().deliver(events, deadline)
"""
TESTS = """
import pytest
import plugin_memory as memory
from outbox_relay.sinks import own_headers
from outbox_relay.sinks.contract import PluginContract, PluginHarness, Received
from tests.support.plugin_package import forget_plugins


class MemoryHarness(PluginHarness):
    type = "memory"

    def settings(self):
        return {}

    def received(self):
        return [
            Received(e.key, e.uid, e.payload, e.type, e.content_type, dict(own_headers(e.headers)))
            for e, _ in memory.STORED
        ]

    def break_destination(self):
        memory.STATE["up"] = False

    def mend_destination(self):
        memory.STATE["up"] = True

    def poison(self, event):
        return event._replace(payload=b"poison")


@pytest.fixture
def sink_harness(request, monkeypatch):
    forget_plugins()
    monkeypatch.setattr(memory, "Chosen", getattr(memory, request.cls.__name__.removeprefix("Test")))
    memory.STORED.clear()
    memory.LATER.clear()
    memory.STATE["up"] = True
    return MemoryHarness()
"""
WRONG = {
    "Loses": "test_when_the_destination_comes_back_nothing_is_lost",
    "Reverses": "test_events_of_a_key_arrive_in_order",
    "Alters": "test_a_payload_arrives_byte_for_byte",
    "Accepts": "test_what_is_refused_says_why",
    "Pretends": "test_while_the_destination_is_down_events_are_unavailable",
    "Remembers": "test_what_was_unavailable_is_not_sent_after_a_withdrawal",
}
"""Wrong plug-ins, and the scenario that finds each."""


def run(directory: Path, path: str, *arguments: str) -> str:
    """Run pytest in `directory`, and return what it prints. `CI` makes it show every difference in full length."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", *arguments],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
        env={**os.environ, "CI": "true", "PYTHONPATH": os.pathsep.join((path, os.environ.get("PYTHONPATH", "")))},
    )
    return done.stdout + done.stderr


@pytest.mark.slow  # runs pytest
@pytest.mark.processes
def test_the_suite_passes_a_right_plugin_and_finds_wrong_ones(tmp_path: Path) -> None:
    write_plugin(tmp_path, "memory", MEMORY, "Chosen", good=GOOD + "\nChosen = None\n")
    classes = "".join(f"\n\nclass Test{name}(PluginContract):\n    pass\n" for name in ("Right", *WRONG))
    (tmp_path / "test_plugin.py").write_text(TESTS + classes)
    chosen = " or ".join(["TestRight", *(f"(Test{name} and {scenario})" for name, scenario in WRONG.items())])
    printed = run(tmp_path, str(tmp_path), "-p", "outbox_relay.sinks.contract", "-k", chosen)
    passed = set(re.findall(r"^PASSED \S+::Test(\w+)::", printed, re.MULTILINE))
    failed = set(re.findall(r"^FAILED \S+::Test(\w+)::", printed, re.MULTILINE))
    assert "Right" in passed, printed
    assert "Right" not in failed, printed
    assert failed == set(WRONG), printed


@pytest.mark.processes
@pytest.mark.slow
def test_the_example_passes_the_suite_as_an_installed_package(tmp_path: Path) -> None:
    """Takes many seconds, since a wheel is made and a server is killed in half of the scenarios."""
    source = tmp_path / "nats-sink"
    shutil.copytree(EXAMPLE, source, ignore=shutil.ignore_patterns("__pycache__"))
    command = ("pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target")
    subprocess.run([sys.executable, "-m", *command, tmp_path / "site", source], check=True, timeout=SECONDS)
    printed = run(source, str(tmp_path / "site"))
    assert re.search(r"^(2[5-9]|[3-9]\d) passed in", printed, re.MULTILINE) or "SKIPPED" in printed, printed
    assert "failed" not in printed
