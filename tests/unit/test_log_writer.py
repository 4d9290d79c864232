"""The log when its reader reads, stands still and reads again."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from outbox_relay.service import log_writer
from outbox_relay.service.log_writer import LogWriter
from tests.support.wait import until

LOGS = "import logging, sys; from outbox_relay.service import logs; logs.configure('info', 'json');"


class Pipe:
    """A pipe, its writer, and the numbers of dropped lines that were reported."""

    def __init__(self, most: int = log_writer.MOST_LINES) -> None:
        self.reading, self.writing = os.pipe()
        self.dropped: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(log_writer, "MOST_LINES", most)
            self.writer = LogWriter(self.writing, self.dropped.append)

    def log(self, text: str, level: int = logging.INFO) -> None:
        """Log one line."""
        self.writer.handle(logging.makeLogRecord({"msg": text, "levelno": level}))

    def read(self, size: int) -> bytes:
        """Read exactly this number of bytes."""
        found = b""
        while len(found) < size:
            found += os.read(self.reading, size - len(found))
        return found

    def rest(self) -> bytes:
        """Read what there is."""
        os.set_blocking(self.reading, False)
        found = b""
        with contextlib.suppress(BlockingIOError):
            while block := os.read(self.reading, 1 << 20):
                found += block
        os.set_blocking(self.reading, True)
        return found

    def read_until(self, is_all: Callable[[bytes], bool]) -> bytes:
        """Read until what was read is all, and return it."""
        found = b""

        def is_read() -> bool:
            nonlocal found
            found += self.rest()
            return is_all(found)

        until(is_read, seconds=30, what="all lines are read")
        return found

    def close(self) -> None:
        """Let the thread end, whatever it waits for."""
        os.close(self.reading)
        self.writer.close()
        os.close(self.writing)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """Yield a pipe whose writer is ended."""
    made = Pipe()
    yield made
    made.close()


def test_lines_are_written_whole_and_in_order(pipe: Pipe) -> None:
    texts = [f"{n} ü " + "x" * (n * 7 % 9000) for n in range(300)]
    threading.Thread(target=lambda: [pipe.log(text) for text in texts], daemon=True).start()
    expected = "".join(f"{text}\n" for text in texts).encode()
    assert pipe.read(len(expected)) == expected
    assert pipe.dropped == []


def test_a_reader_that_stands_still_blocks_nobody_and_lines_beyond_the_bound_are_counted() -> None:
    pipe = Pipe(most=300)
    line = "x" * 999
    for _ in range(1000):
        pipe.log(line)
    found = pipe.read_until(lambda read: read.endswith(b"\n") and read.count(b"\n") + sum(pipe.dropped) == 1000)
    lines = found.splitlines()
    assert set(lines) == {line.encode()}
    assert len(lines) >= 300
    pipe.log("next")
    assert pipe.read(5) == b"next\n"
    pipe.close()


def test_lines_that_cannot_be_written_are_counted(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full, which only a mock makes at the right moment."""
    write, full = os.write, [True]

    def fail(descriptor: int, data: bytes) -> int:
        if not full[0]:
            return write(descriptor, data)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("outbox_relay.service.log_writer.os.write", fail)
    for _ in range(5):
        pipe.log("lost")
    pipe.writer.flush()
    full[0] = False
    pipe.log("kept")
    pipe.writer.flush()
    assert pipe.rest() == b"kept\n"
    assert sum(pipe.dropped) == 5


def test_a_descriptor_that_does_not_block_is_waited_for(pipe: Pipe) -> None:
    os.set_blocking(pipe.writing, False)
    for n in range(200):
        pipe.log(f"{n:0>998}")
    found = pipe.read(200 * 999)
    assert found.splitlines() == [f"{n:0>998}".encode() for n in range(200)]


def test_a_line_that_cannot_be_formatted_names_its_logger(pipe: Pipe) -> None:
    pipe.writer.handle(logging.makeLogRecord({"name": "some.library", "msg": "%d", "args": ("x",)}))
    line = b"a line of some.library cannot be formatted: TypeError\n"
    assert pipe.read(len(line)) == line


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
