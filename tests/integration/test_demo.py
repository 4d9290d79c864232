"""The demo as a command: its report after each fault, and that no process or file is left however it ends."""

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

pytestmark = [pytest.mark.postgres, pytest.mark.kafka, pytest.mark.slow]

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


@pytest.mark.parametrize("fault", ["relay", "database", "broker", "poison"])
def test_every_guarantee_holds_after_a_fault(directory: Path, fault: str) -> None:
    demo = ChildProcess(directory, "demo", "--seconds", "4", "--fault", fault, "--json")
    try:
        assert demo.process.wait(RUN_SECONDS) == 0, demo.err
        report = json.loads(demo.out)
        assert demo.left() == []
    finally:
        demo.close()
    assert (report["sound"], report["fault"]) == (True, fault)
    assert report["destinations"].keys() == {"events", "crm"}
    for found in report["destinations"].values():
        assert found["check"]["committed"] > 100
        assert found["check"]["arrived"] == found["check"]["committed"] + found["check"]["duplicates"]
    assert (report["dead"] > 0) == (fault == "poison")


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
    finally:
        demo.close()


def test_signal_leaves_nothing_behind(demo: ChildProcess) -> None:
    demo.says("the shop opens")
    demo.process.send_signal(signal.SIGTERM)
    assert demo.process.wait(END_SECONDS) == 143
    assert demo.left() == []
    assert demo.err.rstrip().endswith("nothing is left running")
    assert "Traceback" not in demo.err


def test_everything_ends_when_the_demo_itself_is_killed(demo: ChildProcess) -> None:
    demo.says("the shop opens")
    demo.process.kill()
    demo.process.wait(END_SECONDS)
    until(lambda: not demo.left(), seconds=GONE_SECONDS, what="processes and directories are gone")


def test_relay_that_ends_by_itself_ends_the_demo_with_its_log(demo: ChildProcess) -> None:
    demo.says("the shop opens")
    for relay in demo.descendants("relay-2.toml"):
        os.kill(relay, signal.SIGKILL)
    assert demo.process.wait(END_SECONDS) == 1
    assert "relay-2 ended by itself with -9; the end of its log:\n" in demo.err
    assert demo.left() == []
