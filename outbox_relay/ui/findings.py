"""The findings of ``doctor``, examined in the background while the page is looked at."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from outbox_relay.admin.doctor import doctor
from outbox_relay.domain.errors import RelayError
from outbox_relay.postgres.store import Store
from outbox_relay.service.logs import logger

FRESH_SECONDS: Final = 30.0
"""Age of findings from which the next read begins to examine again."""
OLD_SECONDS: Final = 60.0
"""Age of findings from which a read waits for the examination that it begins."""


class CachedFindings:
    """The newest findings. Only one examination runs at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._newest: list[dict[str, Any]] | None = None
        self._newest_at = self._tried_at = float("-inf")
        self._error: str | None = None
        self._running: threading.Thread | None = None

    def read(self, store: Store, seconds: float) -> dict[str, Any]:
        """Return the newest findings, None before the first examination has ended.

        Begin to examine if they are no longer fresh, and wait for the end if they are old, for at most ``seconds``.
        """
        with self._lock:
            is_running = self._running is not None and self._running.is_alive()
            if not is_running and self._clock() - self._tried_at > FRESH_SECONDS:
                self._running = threading.Thread(target=self._examine, args=(store,), name="findings", daemon=True)
                self._running.start()
            running, is_old = self._running, self._clock() - self._newest_at > OLD_SECONDS
        if running is not None and is_old:
            running.join(seconds)
        with self._lock:
            age = None if self._newest is None else round(self._clock() - self._newest_at, 1)
            return {"findings": self._newest, "age_seconds": age, "error": self._error}

    def _examine(self, store: Store) -> None:
        newest, error = None, None
        try:
            newest = [each.as_dict() for each in doctor(store)]
        except RelayError as failure:
            error = str(failure)
        except Exception as failure:  # a fault of an examination must not show as a healthy system
            logger().error("ui.failed", path="findings", exc_info=failure)
            error = "the examination failed; the log of this process says why"
        with self._lock:
            self._tried_at, self._error = self._clock(), error
            if newest is not None:
                self._newest, self._newest_at = newest, self._tried_at
