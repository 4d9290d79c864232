"""The Python sink under the contract, with a handler that writes to a file."""

import base64
import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from outbox_relay.domain.event import StoredEvent
from outbox_relay.sinks.contract import Received, SinkHarness
from outbox_relay.sinks.python import PythonSink, WorkerTask
from tests.support.handlers import POISON


def ignore(_text: str, _number: float, /) -> None:
    """Ignore what a worker prints, and its end."""


class PythonHarness(SinkHarness):
    """An application that goes down: its workers are killed, and cannot import it again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sinks: list[PythonSink] = []

    def make_sink(self) -> PythonSink:
        environment = {**os.environ, "HANDLERS_DIRECTORY": str(self._directory)}
        task = WorkerTask("tests.support.handlers:contract", "contract", 8, environment=environment)
        sink = PythonSink("contract", task, report=ignore, on_end=ignore, max_in_flight=8)
        self._sinks.append(sink)
        return sink

    async def received(self) -> Sequence[Received]:
        file = self._directory / "received"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [
            Received(
                *(found["key"], found["uid"], base64.b64decode(found["payload"]), found["type"]),
                *(found["content_type"], found["headers"]),
            )
            for found in lines
        ]

    async def break_destination(self) -> None:
        (self._directory / "down").touch()
        for sink in self._sinks:
            for process in sink.processes:
                if process.pid is not None:
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)

    async def mend_destination(self) -> None:
        (self._directory / "down").unlink(missing_ok=True)

    def poison(self, event: StoredEvent) -> StoredEvent:
        return event._replace(payload=POISON)
