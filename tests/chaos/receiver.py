"""Program that receives webhooks: verifies and records each request before it answers, late or never if asked to."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from tests.support.ports import LOOPBACK, free_port, is_listening
from tests.support.receiver import Receiver, Request
from tests.support.receiver.answers import say
from tests.support.receiver.faults import hang
from tests.support.wait import until

Mode = Literal["well", "slow", "hanging"]
MODES: tuple[Mode, ...] = ("well", "slow", "hanging")
SLOW_SECONDS = 1.5
"""Delay of a slow answer, longer than a position waits for one event."""
START_SECONDS = 30


JOBS = "/jobs"
"""Target of the requests of the rows sink, which have a file of their own."""


def jobs_of(journal: Path) -> Path:
    """Return the file with the requests of the rows sink."""
    return journal.with_suffix(".jobs")


class Journal:
    """Writes a line for each request before the answer, which depends on the mode."""

    def __init__(self, path: Path) -> None:
        self._file, self._jobs = (
            os.open(one, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) for one in (path, jobs_of(path))
        )
        self.mode: Mode = "well"
        self.receiver: Receiver | None = None
        self._taken, self._refused = say(200), say(401)

    def answer(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Awaitable[None]:
        """Record a request, and refuse it if its signature is invalid."""
        if self.receiver is not None:
            self.receiver.requests.clear()
        problem = request.problem or ""
        number = request.header("outbox-replay") or ""
        line = f"{request.arrived:.4f}\t{request.uid}\t{self.mode}\t{problem}\t{number}\t".encode() + request.body
        line += b"\n"
        os.write(self._jobs if request.target == JOBS else self._file, line)
        return self._answer(problem, self.mode, request, reader, writer)

    async def _answer(
        self, problem: str, mode: Mode, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if mode == "hanging":
            await hang(request, reader, writer)
            return
        if mode == "slow":
            await asyncio.sleep(SLOW_SECONDS)
        await (self._refused if problem else self._taken)(request, reader, writer)


class ReceiverProcess:
    """The receiver as a child process, which can be killed and started again on the same port and journal."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.journal = directory / "receiver.journal"
        for file in (self.journal, jobs_of(self.journal)):
            file.touch()
        self._output = directory / "receiver.out"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Return the URL of the endpoint."""
        return f"http://{LOOPBACK}:{self.port}/hooks"

    @property
    def jobs_url(self) -> str:
        """Return the URL of the rows sink."""
        return f"http://{LOOPBACK}:{self.port}{JOBS}"

    def start(self) -> Self:
        """Start the process and wait until it listens."""
        command = [sys.executable, "-m", "tests.chaos.receiver", "--port", str(self.port), "--journal", self.journal]
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
        until(self._listens, seconds=START_SECONDS, what="the receiver listens")
        return self

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"the receiver ended: {self._output.read_text()[-3000:]}"
        return is_listening(self.port)

    def set_mode(self, mode: Mode) -> None:
        """Set the mode for later requests."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(bytes([MODES.index(mode)]))
        self._process.stdin.flush()

    def kill(self) -> float:
        """Send SIGKILL and wait until the process has ended. Return the time of the signal."""
        assert self._process is not None
        at = time.monotonic()
        self._process.kill()
        self._process.wait(10)
        return at

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


async def _receive(port: int, path: Path) -> None:
    journal = Journal(path)
    ended = asyncio.Event()

    def read_mode() -> None:
        byte = os.read(sys.stdin.fileno(), 1)
        if byte:
            journal.mode = MODES[byte[0]]
        else:
            ended.set()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), read_mode)
    with Receiver(journal.answer, port=port) as receiver:
        journal.receiver = receiver
        await ended.wait()


def main() -> None:
    """Receive until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    options = parser.parse_args()
    asyncio.run(_receive(options.port, options.journal))


if __name__ == "__main__":
    main()
