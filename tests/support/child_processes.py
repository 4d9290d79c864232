"""A command as a child process whose descendants can be identified, to check that it leaves no process and no file."""

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
    """Create a directory that every user can reach, since PostgreSQL runs as another user if the tests run as root."""
    directory = Path(tempfile.mkdtemp(prefix="outbox-test-", dir="/tmp"))
    directory.chmod(0o755)
    (directory / "temporary").mkdir()
    (directory / "temporary").chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


class ChildProcess:
    """An `outbox-relay` with these arguments, in a directory `place` created by :func:`reachable`."""

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
        """Return the directory for its temporary files."""
        return self._place / "temporary"

    @property
    def out(self) -> str:
        """Return its stdout."""
        return (self._place / "out").read_text()

    @property
    def err(self) -> str:
        """Return its stderr."""
        return (self._place / "err").read_text()

    def says(self, words: str) -> None:
        """Wait until these words are in its stderr; fail if it ends before."""

        def said() -> bool:
            assert self.process.poll() is None, self.err
            return words in self.err

        until(said, seconds=START_SECONDS, what=f"it says {words!r}")

    def descendants(self, words: str = "") -> list[int]:
        """Return the ids of it and its living descendants whose command lines contain `words`."""
        processes = [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [int(entry.name) for entry in processes if self._is_ours(entry, words.encode())]

    def _is_ours(self, entry: Path, words: bytes) -> bool:
        try:
            return self._mark.encode() in (entry / "environ").read_bytes() and words in (entry / "cmdline").read_bytes()
        except OSError:
            return False

    def left(self) -> list[str]:
        """Return the remaining processes and files."""
        return [*map(str, self.descendants()), *(str(path) for path in self.temporary.iterdir())]

    def close(self) -> None:
        """Kill the remaining processes."""
        for number in self.descendants():
            os.kill(number, signal.SIGKILL)
        self.process.wait(END_SECONDS)
        for file in self._files:
            file.close()
