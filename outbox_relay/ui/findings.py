"""The findings of ``doctor``, examined in the background while the page is looked at."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from outbox_relay.admin.doctor import doctor
from outbox_relay.domain.errors import RelayError
from outbox_relay.postgres.store import Store
from outbox_relay.service.logs import logger

FRESH_SECONDS = 30.0
"""Age of findings from which on the next look examines again."""
OLD_SECONDS = 60.0
"""Age of findings from which on a look waits for the examination that it begins."""
WAIT_SECONDS = 3.0
"""Maximum time of that wait."""


class CachedFindings:
    """The newest findings. Only one examination runs at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._found: list[dict[str, Any]] | None = None
        self._error: str | None = None
        self._at = self._found_at = 0.0
        self._running: threading.Thread | None = None

    def current(self, store: Store) -> dict[str, Any]:
        """Return the newest findings at once: None before the first examination has ended.

        Begin to examine again if they are old.
        """
        with self._lock:
            is_old = (self._found is None and self._error is None) or self._clock() - self._at > FRESH_SECONDS
            if is_old and (self._running is None or not self._running.is_alive()):
                self._running = threading.Thread(target=self._examine, args=(store,), name="findings", daemon=True)
                self._running.start()
            age = None if self._found is None else round(self._clock() - self._found_at, 1)
            return {"findings": self._found, "age_seconds": age, "error": self._error}

    def recent(self, store: Store) -> dict[str, Any]:
        """Return the newest findings. If they are old, wait for new ones for at most ``WAIT_SECONDS``."""
        found = self.current(store)
        if found["age_seconds"] is None or found["age_seconds"] > OLD_SECONDS:
            self.finish(WAIT_SECONDS)
        return self.current(store)

    def finish(self, seconds: float) -> None:
        """Wait until the present examination has ended, for at most ``seconds``."""
        if self._running is not None:
            self._running.join(seconds)

    def _examine(self, store: Store) -> None:
        found, error = None, None
        try:
            found = [each.as_dict() for each in doctor(store)]
        except RelayError as failure:
            error = str(failure)
        except Exception as failure:  # a fault of an examination must not show as a healthy system
            logger().error("ui.failed", path="findings", exc_info=failure)
            error = "the examination failed; the log of this process says why"
        with self._lock:
            self._at, self._error = self._clock(), error
            if found is not None:
                self._found, self._found_at = found, self._at
