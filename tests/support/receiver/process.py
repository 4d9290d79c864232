"""The receiver as a process of its own, and what its log says."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from tests.support.ports import LOOPBACK, free_port, is_listening
from tests.support.wait import until


class Arrival(NamedTuple):
    """A line of the log: a request, and how it was answered (`hang` where it was not)."""

    seconds: float
    target: str
    uid: str
    attempt: str
    answer: str
    problem: str
    payload: bytes


class ReceiverProcess:
    """A receiver on a free port, for use with `with`; `arrivals` reads its log."""

    def __init__(self, directory: Path, *arguments: str, name: str = "receiver") -> None:
        self.port = free_port()
        self.log = directory / f"{name}.log"
        self._output = directory / f"{name}.out"
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address at which it listens."""
        return f"http://{LOOPBACK}:{self.port}/hooks"

    def start(self) -> Self:
        """Start the process, or start it again on the same port and log."""
        command = [sys.executable, "-m", "tests.support.receiver", "--port", str(self.port), "--log", str(self.log)]
        with self._output.open("ab") as output:
            self._process = subprocess.Popen([*command, *self._arguments], stdout=output, stderr=output)
        until(lambda: is_listening(self.port) or self._ended(), seconds=20, what="the receiver listens")
        return self

    def _ended(self) -> bool:
        if self._process is not None and self._process.poll() is not None:
            raise AssertionError(f"the receiver ended: {self._output.read_text()[-3000:]}")
        return False

    def stop(self) -> None:
        """Stop it; its log stays. Raises AssertionError when something went wrong inside it."""
        if self._process is not None:
            self._process.terminate()
            code = self._process.wait(20)
            self._process = None
            assert code == 0, self._output.read_text()[-3000:]

    def arrivals(self) -> Iterator[Arrival]:
        """Yield every request so far, in order of arrival; the last 50 ms may be missing."""
        if not self.log.exists():
            return
        with self.log.open() as lines:
            for line in lines:
                if not line.endswith("\n"):
                    return
                seconds, target, uid, attempt, answer, problem, body = line[:-1].split("\t")
                yield Arrival(float(seconds), target, uid, attempt, answer, problem, base64.b64decode(body))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
        elif self._process is not None:
            self._process.kill()
            self._process.wait(20)
