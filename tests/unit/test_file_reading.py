"""Files that do not answer: pipes without a writer, and a file that the kernel keeps from being opened."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outbox_relay.domain.errors import ConfigurationError
from outbox_relay.domain.file_reading import FileReader, read_file
from tests.support.wait import until

LIMIT = 1000


@contextmanager
def held(path: Path) -> Generator[None]:
    """Keep every open of ``path`` waiting, as a file server that is gone does: a lease blocks it for 45 seconds."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    lease = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(lease)
        signal.signal(signal.SIGIO, before)


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


def threads() -> int:
    """Return the number of threads that read files."""
    return sum(thread.name == "files" for thread in threading.enumerate())


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
                reader.call(lambda: read_file(file if threads() < 2 else other, LIMIT))
        assert threads() == 1
    until(lambda: threads() == 0, seconds=10, what="the file was read")
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
