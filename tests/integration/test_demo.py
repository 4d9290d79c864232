"""The demo as a command: its report, and that no process or file is left however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Generator
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.support.child_processes import END_SECONDS, ChildProcess, reachable
from tests.support.wait import until

pytestmark = [pytest.mark.postgres, pytest.mark.kafka]

RUN_SECONDS = 150
GONE_SECONDS = 60


@pytest.fixture
def directory() -> Generator[Path]:
    """Yield a directory for the demo."""
    with reachable() as directory:
        yield directory


@pytest.fixture
def demo(directory: Path) -> Generator[ChildProcess]:
    """Provide a demo that runs longer than the test."""
    demo = ChildProcess(directory, "demo", "--seconds", "120")
    yield demo
    demo.close()


@pytest.mark.slow  # `make demo` itself
def test_demo_delivers_everything_to_both_destinations(directory: Path) -> None:
    demo = ChildProcess(directory, "demo", "--seconds", "4", "--json")
    try:
        assert demo.process.wait(RUN_SECONDS) == 0, demo.err
        report = json.loads(demo.out)
        left = demo.left()
        said = demo.err
    finally:
        demo.close()
    assert report["sound"]
    assert report["destinations"].keys() == {"events", "crm"}
    for found in report["destinations"].values():
        assert found["committed"] > 100
        assert [found[name] for name in ("lost", "made_up", "out_of_order", "refused_signatures")] == [0, 0, 0, 0]
        assert found["arrived"] == found["committed"] + found["duplicates"]
        assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["longest_ms"]
    assert "relay-1 was killed with SIGKILL" in said
    assert "relay-3 is ready" in said
    assert left == []


@pytest.mark.slow
def test_the_demo_serves_the_page_with_a_sink_in_trouble(directory: Path) -> None:
    demo = ChildProcess(directory, "demo", "--seconds", "20", "--ui", "--json")
    try:
        demo.says("the page is at ")
        [address] = re.findall(r"the page is at (http\S+/);", demo.err)

        def in_trouble() -> bool:
            with urlopen(f"{address}exceptions?sink=invoices") as answer:  # noqa: S310 - of the demo
                return answer.read().decode().count("404") >= 12

        until(in_trouble, seconds=60, what="dead letters are shown")
        assert demo.process.wait(RUN_SECONDS) == 0, demo.err
        assert json.loads(demo.out)["sound"]
        assert demo.left() == []
    finally:
        demo.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        ("the shop opens", signal.SIGINT, 130),
        ("starting a Kafka-compatible broker", signal.SIGTERM, 143),
    ],
)
def test_signal_leaves_nothing_behind(demo: ChildProcess, words: str, number: signal.Signals, code: int) -> None:
    demo.says(words)
    demo.process.send_signal(number)
    assert demo.process.wait(END_SECONDS) == code
    assert demo.left() == []
    assert demo.err.rstrip().endswith("nothing is left running")
    assert "Traceback" not in demo.err


@pytest.mark.thorough
def test_everything_ends_when_the_demo_itself_is_killed(demo: ChildProcess) -> None:
    demo.says("the shop opens")
    demo.process.kill()
    demo.process.wait(END_SECONDS)
    until(lambda: not demo.left(), seconds=GONE_SECONDS, what="processes and directories are gone")


@pytest.mark.slow
def test_relay_that_ends_by_itself_ends_the_demo_with_its_log(demo: ChildProcess) -> None:
    demo.says("the shop opens")
    for relay in demo.descendants("relay-2.toml"):
        os.kill(relay, signal.SIGKILL)
    assert demo.process.wait(END_SECONDS) == 1
    assert "relay-2 ended by itself with -9; the end of its log:\n" in demo.err
    assert "started" in demo.err.partition("the end of its log:")[2]
    assert demo.left() == []
