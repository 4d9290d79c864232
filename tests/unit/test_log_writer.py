"""The log when its reader reads, stands still and reads again."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from outbox_relay.service import log_writer
from outbox_relay.service.log_writer import LogWriter
from tests.support.wait import until

LOGS = "import logging, sys; from outbox_relay.service import logs; logs.configure('info', 'json');"


class Pipe:
    """A pipe, its writer, and the numbers of dropped lines that were reported."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self.dropped: list[int] = []
        self.writer = LogWriter(self.writing, self.dropped.append)

    def log(self, text: str) -> None:
        """Log one line."""
        self.writer.handle(logging.makeLogRecord({"msg": text}))

    def read(self, size: int) -> bytes:
        """Read exactly this number of bytes."""
        found = b""
        while len(found) < size:
            found += os.read(self.reading, size - len(found))
        return found

    def close(self) -> None:
        """Let the thread end, whatever it waits for."""
        os.close(self.reading)
        self.writer.close()
        os.close(self.writing)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """A pipe whose writer is ended."""
    made = Pipe()
    yield made
    made.close()


def test_lines_are_written_whole_and_in_order(pipe: Pipe) -> None:
    texts = [f"{n} ü " + "x" * (n * 7 % 9000) for n in range(300)]
    threading.Thread(target=lambda: [pipe.log(text) for text in texts], daemon=True).start()
    expected = "".join(f"{text}\n" for text in texts).encode()
    assert pipe.read(len(expected)) == expected
    assert pipe.dropped == []


def test_a_reader_that_stands_still_blocks_nobody_and_lines_beyond_the_bound_are_counted(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer, "MOST_BYTES", 300_000)
    line = "x" * 999
    for _ in range(1000):
        pipe.log(line)
    found = pipe.read(1000)
    for _ in range(298):  # what waited: those that are in the pipe count until all lines of one write are taken
        found += pipe.read(1000)
    until(lambda: pipe.dropped != [], seconds=10, what="the dropped lines are reported")
    pipe.writer.flush()
    os.set_blocking(pipe.reading, False)
    rest = b""
    try:
        while block := os.read(pipe.reading, 1 << 20):
            rest += block
    except BlockingIOError:
        pass
    lines = (found + rest).splitlines()
    assert set(lines) == {line.encode()}
    assert len(lines) + sum(pipe.dropped) == 1000
    pipe.log("next")
    os.set_blocking(pipe.reading, True)
    assert pipe.read(5) == b"next\n"


def test_one_line_above_the_bound_is_written(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "MOST_BYTES", 10)
    pipe.log("x" * 99)
    assert pipe.read(100) == b"x" * 99 + b"\n"


def test_a_flush_waits_for_a_second_at_most(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "FLUSH_SECONDS", 0.05)
    for _ in range(300):
        pipe.log("x" * 999)
    began = time.monotonic()
    pipe.writer.flush()
    assert 0.05 <= time.monotonic() - began < 5


def test_after_its_reader_is_gone_lines_are_dropped_and_nothing_fails(pipe: Pipe) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), pipe.reading)
    pipe.log("x")
    pipe.writer.flush()
    pipe.log("y")
    pipe.writer.flush()


def test_a_line_whose_text_cannot_be_encoded_is_escaped(pipe: Pipe) -> None:
    pipe.log("\ud800")
    assert pipe.read(7) == b"\\ud800\n"


@pytest.mark.processes
def test_a_process_that_ends_has_written_every_line() -> None:
    code = LOGS + "[logging.getLogger('a').warning('%s', n) for n in range(2000)]"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert [json.loads(line)["message"] for line in ended.stderr.splitlines()] == [str(n) for n in range(2000)]


@pytest.mark.processes
def test_a_process_whose_log_nobody_reads_works_on_and_ends() -> None:
    code = LOGS + "[logging.getLogger('a').warning('x' * 999) for n in range(3000)]; print('done', flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        try:
            assert process.wait(30) == 0
        finally:
            process.send_signal(signal.SIGKILL)
