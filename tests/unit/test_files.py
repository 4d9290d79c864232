"""Files that do not answer: pipes without a writer."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from outbox_relay.domain.files import read_file

LIMIT = 1000


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_a_pipe_without_a_writer_is_given_up(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox_relay.domain.files.READ_SECONDS", 0.1)
    with pytest.raises(OSError, match=r"its contents did not arrive within 0\.1 s"):
        read_file(pipe, LIMIT)


def test_a_file_in_the_place_of_a_pipe_is_read(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("outbox_relay.domain.files.READ_SECONDS", 0.1)
        with pytest.raises(OSError, match="did not arrive"):
            read_file(pipe, LIMIT)
    pipe.unlink()
    pipe.write_bytes(b"a")
    for thread in threading.enumerate():
        if thread.name == "read":
            thread.join(5)
    assert read_file(pipe, LIMIT) == b"a"


def test_a_pipe_is_read_to_its_end(pipe: Path) -> None:
    def write() -> None:
        with pipe.open("wb", buffering=0) as writer:
            for piece in (b"a", b"b", b"c" * 70_000):
                writer.write(piece)

    thread = threading.Thread(target=write)
    thread.start()
    assert read_file(pipe, 100_000) == b"ab" + b"c" * 70_000
    thread.join()


def test_no_more_is_read_than_a_byte_above_the_limit() -> None:
    assert read_file(Path("/dev/zero"), LIMIT) == bytes(LIMIT + 1)
