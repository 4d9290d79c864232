"""The retention of one relay process: passes over the days of the log, one relay at a time."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from uuid import UUID

from structlog.stdlib import BoundLogger

from outbox_relay.postgres.retention import Pass, Person
from outbox_relay.postgres.store import Store
from outbox_relay.retention.archiver import Archiver
from outbox_relay.retention.passes import Outcome, RetentionPass, Stopped, run_pass

PASS_SECONDS = 60.0
"""Interval between two passes."""
SOON_SECONDS = 1.0
"""Time after which a pass that could not begin is tried again, before the first one."""
PAUSES_MAX = 8
"""Longest interval between two passes while a lock is not granted or an archive fails, as a multiple. It doubles."""
DROP_EVERY = 10
"""Number of passes of which one removes an empty partition: emits wait up to 50 ms behind each attempt."""


class Retention:
    """The passes of one relay. ``stated`` is the table ``[retention]`` of its file, None without one.

    Unless ``enabled``, a pass only weighs the policy and marks the clock, on which ``retention run`` depends.
    ``pass_seconds`` is the interval between two passes, which tests shorten. A pass ends early once ``stopping`` is
    set.
    """

    def __init__(
        self,
        store: Store,
        relay: UUID,
        name: str,
        stated: Mapping[str, Any] | None,
        archiver: Archiver | None,
        log: BoundLogger,
        *,
        enabled: bool = True,
        pass_seconds: float = PASS_SECONDS,
        stopping: threading.Event | None = None,
    ) -> None:
        self._store = store
        self._relay = relay
        self._person = Person(f"relay {name}")
        self._stated = stated
        self._archiver = archiver
        self._log = log
        self._enabled = enabled
        self._pass_seconds = pass_seconds
        self._stopping = stopping
        self._held = False
        self._notes: dict[str, tuple[str, int]] = {}
        self._passes = 0
        self._pauses = 1

    def step(self) -> float:
        """Do a pass, or only look if another relay does one; return the seconds until the next."""
        if not self._store.state_retention(self._relay, self._stated):
            return SOON_SECONDS
        with suppress(Stopped):
            run_pass(self._store, self._relay, self._person, self._pass, works=self._enabled)
        return self._pass_seconds * self._pauses

    def _pass(self, granted: Pass) -> Outcome:
        if not self._enabled:
            return Outcome()
        if granted.hold_until is not None and not self._held:
            self._log.warning("retention.clock_jumped", until=granted.hold_until.isoformat())
        self._held = granted.hold_until is not None
        self._passes += 1
        retention = RetentionPass(
            self._store,
            granted,
            self._archiver,
            self._log,
            notes=self._notes,
            stopping=self._stopping,
        )
        outcome = retention.run(drop=self._passes % DROP_EVERY == 1)
        self._pauses = min(PAUSES_MAX, 2 * self._pauses) if outcome.locked or outcome.failed else 1
        return outcome
