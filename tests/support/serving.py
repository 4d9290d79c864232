"""A relay in the test's own process, whose classes a test may replace."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from outbox_relay import settings
from outbox_relay.service.process import Service

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def serve_while(file: Path, script: Callable[[], None]) -> None:
    """Run the relay of a file in the main thread, as its signals need, while ``script`` runs in another.

    The relay is stopped at its end. Raises what ends the relay, and then what ``script`` raised.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            script()
        except BaseException as error:
            errors.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    thread = threading.Thread(target=run, daemon=True)
    try:
        service = Service(settings.load(file, {}), lambda: settings.load(file, {}))
        thread.start()
        try:
            service.serve()
        finally:
            thread.join(60)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if errors:
        raise errors[0]
