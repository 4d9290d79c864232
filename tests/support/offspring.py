"""A command in a process of its own, whose descendants can be told from all others: nothing of it may be left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from tests.support.wait import until

START_SECONDS = 90
END_SECONDS = 40


@contextmanager
def reachable() -> Generator[Path]:
    """A directory that every user can reach, since root lends PostgreSQL to another."""
    directory = Path(tempfile.mkdtemp(prefix="outbox-test-", dir="/tmp"))
    directory.chmod(0o755)
    (directory / "temporary").mkdir()
    (directory / "temporary").chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


class Offspring:
    """One `outbox-relay` with these arguments, in a `place` that is :func:`reachable`."""

    def __init__(self, place: Path, *arguments: str) -> None:
        self._mark = f"OUTBOX_TEST_MARK={uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self._place = place
        self._files = [(place / stream).open("w+b") for stream in ("out", "err")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "outbox_relay", *arguments],
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

        until(said, seconds=START_SECONDS, what=f"it says {words!r}")

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
