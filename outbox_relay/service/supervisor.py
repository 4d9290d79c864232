"""Run the parts of a process in threads, and start each again after errors that a service survives."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import (
    DatabaseUnavailable,
    DatabaseUnusable,
    RelayError,
    SessionReset,
    StatementFailed,
    is_thread_shortage,
)
from outbox_relay.domain.log_events import RateLimitedLog
from outbox_relay.service.logs import reason

TRANSIENT = (DatabaseUnavailable, StatementFailed, SessionReset)
"""Errors after which a starting service tries again."""
SURVIVED = (*TRANSIENT, DatabaseUnusable, MemoryError)
"""Errors after which a running service starts the part again."""
PAUSE_SECONDS, PAUSE_MAX_SECONDS = 0.1, 2.0
"""Longest pause after the first error, doubled after each further one, and its limit. The pause itself is random."""
HEALTHY_SECONDS = 10.0
"""Running time of a part after which its earlier errors no longer count."""
OUT_OF_MEMORY_MAX = 5
"""Consecutive out-of-memory errors of a part after which the process ends."""


class Supervisor:
    """Runs parts until ``stopping`` is set, which they look at themselves."""

    def __init__(self, log: BoundLogger) -> None:
        self._log = log
        self._seldom = RateLimitedLog(log)
        self.stopping = threading.Event()
        """Set once the process is to stop."""
        self.failure: Exception | None = None
        """The first error that the service does not survive, which ends the process."""

    def start(self, name: str, part: Callable[[], None], *, sink: str | None = None) -> threading.Thread:
        """Run ``part`` in a daemon thread, again after each of the errors ``SURVIVED``, until it returns.

        Any other error ends the process. ``sink`` is the sink that the part serves, if it is the loop of one.
        """
        event, values = ("part.restarted", {"part": name}) if sink is None else ("sink.restarted", {"sink": sink})

        def run() -> None:
            try:
                self.retry(event, part, SURVIVED, **values)
            except BaseException as error:  # such as SystemExit, raised by a function of the application
                failure = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
                self.failure = self.failure or failure
                self._log.error("relay.gave_up", reason=f"{name}: {reason(error)}")
                self.stopping.set()

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def retry(
        self,
        event: str,
        step: Callable[[], None],
        survived: tuple[type[Exception], ...] = TRANSIENT,
        **values: str,
    ) -> None:
        """Run ``step`` until it succeeds or the process stops, and log ``event`` after each error. Raise others.

        A step for which there was no thread is repeated too.
        """
        errors = out_of_memory = 0
        while True:
            began = time.monotonic()
            try:
                step()
            except Exception as error:
                if not isinstance(error, survived) and not is_thread_shortage(error):
                    raise
                if self.stopping.is_set():
                    return
                if time.monotonic() - began > HEALTHY_SECONDS:
                    errors = out_of_memory = 0
                errors += 1
                out_of_memory = out_of_memory + 1 if isinstance(error, MemoryError) else 0
                if out_of_memory == OUT_OF_MEMORY_MAX:
                    raise
                pause = random.uniform(0, min(PAUSE_MAX_SECONDS, PAUSE_SECONDS * 2 ** min(errors - 1, 10)))  # noqa: S311
                cause = error.reason if isinstance(error, RelayError) else None
                shown = {**values, "reason": reason(error), "cause": cause, "again_in_seconds": round(pause, 2)}
                self._seldom.warning(event, **shown)
                if self.stopping.wait(pause):
                    return
            else:
                return
