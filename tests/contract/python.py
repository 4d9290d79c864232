"""The Python sink under the contract, with a handler that writes to a file."""

import base64
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from outbox_relay.domain.event import StoredEvent
from outbox_relay.sinks.contract import Received, SinkHarness
from outbox_relay.sinks.python import PythonSink
from outbox_relay.sinks.python import sink as module

POISON = b"poison"
MODULE = "tests.support.handlers"


class PythonHarness(SinkHarness):
    """An application that goes down: it is forgotten, and cannot be imported again."""

    def __init__(self, directory: Path, handler: str, patch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._handler = handler
        self._sinks: list[PythonSink] = []
        patch.setenv("HANDLERS_DIRECTORY", str(directory))
        patch.setattr(module, "IMPORT_SECONDS", 0.1)
        sys.modules.pop(MODULE, None)

    def make_sink(self) -> PythonSink:
        sink = PythonSink("contract", f"{MODULE}:{self._handler}", max_in_flight=8)
        self._sinks.append(sink)
        return sink

    def received(self) -> Sequence[Received]:
        file = self._directory / "received"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [
            Received(
                *(found["key"], found["uid"], base64.b64decode(found["payload"]), found["type"]),
                *(found["content_type"], found["headers"]),
            )
            for found in lines
        ]

    def break_destination(self) -> None:
        (self._directory / "down").touch()
        sys.modules.pop(MODULE, None)
        for sink in self._sinks:
            sink._import.handler = None  # pyright: ignore[reportPrivateUsage]

    def mend_destination(self) -> None:
        (self._directory / "down").unlink(missing_ok=True)

    def poison(self, event: StoredEvent) -> StoredEvent:
        return event._replace(payload=POISON)
