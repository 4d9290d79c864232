"""The demo as people run it: what it promises, and that nothing of it is left however it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.wait import until

pytestmark = [pytest.mark.postgres, pytest.mark.kafka]

RUN_SECONDS = 150
START_SECONDS = 90
END_SECONDS = 40
GONE_SECONDS = 15


class Demo:
    """One `outbox-relay demo` in a process of its own, whose descendants can be told from all others."""

    def __init__(self, place: Path, *arguments: str) -> None:
        self._mark = f"OUTBOX_TEST_MARK={uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self._place = place
        self._files = [(place / stream).open("w+b") for stream in ("out", "err")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "outbox_relay", "demo", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            env={**os.environ, name: value, "TMPDIR": str(self.temporary)},
            start_new_session=True,
        )

    @property
    def temporary(self) -> Path:
        """Where it makes its directories."""
        return self._place / "temporary"

    @property
    def out(self) -> str:
        return (self._place / "out").read_text()

    @property
    def err(self) -> str:
        return (self._place / "err").read_text()

    def says(self, words: str) -> None:
        """Wait until it says so; it must be running still."""

        def said() -> bool:
            assert self.process.poll() is None, self.err
            return words in self.err

        until(said, seconds=START_SECONDS, what=f"the demo says {words!r}")

    def descendants(self, words: str = "") -> list[int]:
        """The living processes that it has started, and itself, whose command lines hold `words`."""
        processes = [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [int(entry.name) for entry in processes if self._is_ours(entry, words.encode())]

    def _is_ours(self, entry: Path, words: bytes) -> bool:
        try:
            return self._mark.encode() in (entry / "environ").read_bytes() and words in (entry / "cmdline").read_bytes()
        except OSError:
            return False

    def left(self) -> list[str]:
        """What is left of it: processes and files."""
        return [*map(str, self.descendants()), *(str(path) for path in self.temporary.iterdir())]

    def close(self) -> None:
        """End what a failed test has left."""
        for number in self.descendants():
            os.kill(number, signal.SIGKILL)
        self.process.wait(END_SECONDS)
        for file in self._files:
            file.close()


@pytest.fixture
def place() -> Generator[Path]:
    """A directory that every user can reach, since root lends PostgreSQL to another."""
    directory = Path(tempfile.mkdtemp(prefix="outbox-test-demo-", dir="/tmp"))
    directory.chmod(0o755)
    (directory / "temporary").mkdir()
    (directory / "temporary").chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def demo(place: Path) -> Generator[Demo]:
    """A demo that would work for longer than the test takes."""
    demo = Demo(place, "--seconds", "120")
    yield demo
    demo.close()


def test_demo_delivers_everything_to_both_destinations(place: Path) -> None:
    demo = Demo(place, "--seconds", "4", "--json")
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


@pytest.mark.parametrize(
    ("words", "number", "code"),
    [
        ("the shop opens", signal.SIGINT, 130),
        ("starting a broker", signal.SIGTERM, 143),
    ],
)
def test_signal_leaves_nothing_behind(demo: Demo, words: str, number: signal.Signals, code: int) -> None:
    demo.says(words)
    demo.process.send_signal(number)
    assert demo.process.wait(END_SECONDS) == code
    assert demo.left() == []
    assert demo.err.rstrip().endswith("stopped, nothing is left running")
    assert "Traceback" not in demo.err


def test_everything_ends_when_the_demo_itself_is_killed(demo: Demo) -> None:
    demo.says("the shop opens")
    demo.process.kill()
    demo.process.wait(END_SECONDS)
    until(lambda: not demo.left(), seconds=GONE_SECONDS, what="processes and directories are gone")


def test_relay_that_ends_by_itself_ends_the_demo_with_its_log(demo: Demo) -> None:
    demo.says("the shop opens")
    for relay in demo.descendants("relay-2.toml"):
        os.kill(relay, signal.SIGKILL)
    assert demo.process.wait(END_SECONDS) == 1
    assert "relay-2 ended by itself with -9; the end of its log:\n" in demo.err
    assert "started" in demo.err.partition("the end of its log:")[2]
    assert demo.left() == []
