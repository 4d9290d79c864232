"""Files that do not answer: pipes without a writer, and a file that the kernel keeps from being opened."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from outbox_relay.domain import file_reading
from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.file_reading import BUSY_TIMES, FileReader, probe, read_file, sink_files, while_reading
from tests.support.blocking_files import held, reading_threads
from tests.support.wait import auntil, becomes, until

LIMIT = 1000


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("text", encoding="ascii")
    return path


def computes(seconds: float) -> int:
    """Use processor time, as an import of many modules does."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        sum(range(1000))
    return 1


async def test_a_function_that_computes_may_take_longer_than_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with little processor time an import takes minutes. Goes red when all time counts."""
    reader = FileReader(0.1)
    with monkeypatch.context() as patched:
        patched.setattr(file_reading, "BUSY_TIMES", 300)  # this machine may have little processor time, too
        assert reader.call(lambda: computes(0.3)) == 1
        assert await reader.acall(lambda: computes(0.3)) == 1
    with pytest.raises(ConfigurationError, match="could not be read"):
        reader.call(lambda: computes(0.1 * BUSY_TIMES + 0.5))
    await becomes(lambda: reading_threads() == 0, "it has ended")


def test_a_pipe_without_a_writer_is_given_up(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox_relay.domain.file_reading.READ_SECONDS", 0.1)
    with pytest.raises(OSError, match=r"not a regular file, and its contents did not arrive within 0\.1 s"):
        read_file(pipe, LIMIT)


def test_a_pipe_is_read_to_its_end(pipe: Path) -> None:
    def write() -> None:
        with pipe.open("wb", buffering=0) as writer:
            for piece in (b"a", b"b", b"c" * 70_000):
                writer.write(piece)

    thread = threading.Thread(target=write)
    thread.start()
    assert read_file(pipe, 100_000) == b"ab" + b"c" * 70_000
    thread.join()


def test_no_more_is_read_than_a_byte_above_the_limit(file: Path) -> None:
    assert read_file(file, 2) == b"tex"
    assert read_file(Path("/dev/zero"), LIMIT) == bytes(LIMIT + 1)


def test_a_file_that_blocks_is_named_and_keeps_one_thread_busy(file: Path, tmp_path: Path) -> None:
    reader, other = FileReader(0.1), tmp_path / "other"
    other.write_text("other", encoding="ascii")
    with held(file):
        for _ in range(20):
            with pytest.raises(ConfigurationError, match=f"{file}: could not be read within"):
                reader.call(lambda: read_file(file if reading_threads() < 2 else other, LIMIT))
        assert reading_threads() == 1
    until(lambda: reading_threads() == 0, seconds=10, what="the file was read")
    assert reader.call(lambda: read_file(other, LIMIT)) == b"other"


async def test_the_event_loop_goes_on_while_a_file_blocks(file: Path) -> None:
    reader = FileReader(0.1)
    with held(file):
        with pytest.raises(ConfigurationError, match="could not be read"):
            await reader.acall(lambda: read_file(file, LIMIT))
        waiting = asyncio.create_task(FileReader(60).acall(lambda: read_file(file, LIMIT)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_errors_of_the_function_are_raised_and_the_next_call_works(file: Path) -> None:
    reader = FileReader(5)
    with pytest.raises(ZeroDivisionError):
        await reader.acall(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        reader.call(lambda: 1 // 0)
    assert await reader.acall(lambda: read_file(file, LIMIT)) == reader.call(lambda: b"text")


def test_a_file_of_one_sink_that_blocks_refuses_no_read_of_another(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox_relay.domain.file_reading.READ_SECONDS", -0.9)
    with held(file):
        for _ in range(3):
            with pytest.raises(ConfigurationError, match=f"{file}: could not be read"):
                sink_files("first").call(lambda: read_file(file, LIMIT))
        assert sink_files("second").call(lambda: b"read") == b"read"
        assert reading_threads() == 1
    until(lambda: reading_threads() == 0, seconds=10, what="the file was read")
    assert sink_files("first").call(lambda: read_file(file, LIMIT)) == b"text"


def test_a_function_that_a_reader_runs_may_call_it_again(file: Path) -> None:
    reader = FileReader(5)
    assert reader.call(lambda: reader.call(lambda: read_file(file, LIMIT))) == b"text"


def test_a_file_that_blocks_is_named_with_its_setting_and_none_that_was_read_before(file: Path, tmp_path: Path) -> None:
    def read() -> None:
        probe(tmp_path / "missing")
        with while_reading("producer"):
            probe(file)

    with held(file), pytest.raises(ConfigurationError, match=f"^producer: {file}: could not be read"):
        FileReader(0.1).call(read)


def test_calls_that_wait_too_long_for_their_turn_are_refused(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads a pipe in vain, which takes less than the limit. Goes red when only the call in turn has a limit."""
    monkeypatch.setattr("outbox_relay.domain.file_reading.READ_SECONDS", 0.2)
    reader, answers = FileReader(0.5), list[type[Exception]]()

    def call() -> None:
        try:
            reader.call(lambda: read_file(pipe, LIMIT))
        except (OSError, ConfigurationError) as error:
            answers.append(type(error))

    callers = [threading.Thread(target=call) for _ in range(20)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert answers[0] is OSError
    assert answers.count(ConfigurationError) >= 10
    until(lambda: reading_threads() == 0, seconds=10, what="all threads have ended")


async def reads(threads: int) -> bool:
    return reading_threads() == threads


async def test_a_function_whose_caller_has_left_is_not_run() -> None:
    reader, may_end, ran = FileReader(30), threading.Event(), list[int]()
    first = asyncio.create_task(reader.acall(may_end.wait))
    await auntil(lambda: reads(1), seconds=10, what="the first one runs")
    others = [asyncio.create_task(reader.acall(partial(ran.append, n))) for n in range(5)]
    await auntil(lambda: reads(6), seconds=10, what="the others wait")
    for other in others[:4]:
        other.cancel()
    await asyncio.wait(others[:4])
    may_end.set()
    assert await first
    await others[4]
    assert ran == [4]


FROZEN = """
import asyncio, sys, threading, time
from outbox_relay.domain.file_reading import FileReader
reader, found = FileReader(4), []
def read():
    for each in others:
        each.start()
    while sum(thread.name == "files" for thread in threading.enumerate()) < 3:
        time.sleep(0.001)
    print("reading", flush=True)
    return sys.stdin.read()
others = [
    threading.Thread(target=lambda: found.append(reader.call(lambda: "by call"))),
    threading.Thread(target=lambda: found.append(asyncio.run(reader.acall(lambda: "by acall")))),
]
found.append(reader.call(read))
for each in others:
    each.join()
print(*sorted(found), sep=", ")
"""


def test_a_process_that_is_frozen_while_it_reads_does_not_blame_the_file() -> None:
    frozen = subprocess.Popen([sys.executable, "-c", FROZEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert frozen.stdout
    assert frozen.stdin
    assert frozen.stdout.readline() == "reading\n"
    frozen.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    until(lambda: time.monotonic() > began + 5, seconds=20, what="it was frozen longer than a file may block")
    frozen.send_signal(signal.SIGCONT)
    assert frozen.communicate("text", timeout=30)[0] == "by acall, by call, text\n"
