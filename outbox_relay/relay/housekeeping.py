"""The chores of a relay process: work on a timer, such as making partitions in advance.

Every relay does all of them, whichever relay comes first. A thread does them one after another, the most overdue one
first, and shares nothing with the leases: a chore may take long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import RelayError, StatementFailed
from outbox_relay.domain.log_events import RateLimitedLog
from outbox_relay.postgres.store import Store
from outbox_relay.relay.scheduled_events import ScheduledEvents
from outbox_relay.relay.schedules import Schedules

TRIM_ROWS, TRIM_LEAST = 1000, 200
"""Rows of each sink that one trim examines, and fewer after a trim that failed. At most 64 of them are kept."""
MOST_LEASE_SECONDS = 600.0
"""The largest ``lease_seconds`` of a relay."""
KEYS = 500
"""Unique keys to look at, at a time."""
DUE_ROWS = 500
"""Rows of a sink with ``claim = "rows"`` that are put into its queue at a time when their time has come."""


@dataclass(slots=True)
class Chore:
    """Work that is done every ``every_seconds``, and again ``retry_seconds`` after a failure.

    The pause is at least ``leisure`` times as long as the work took. ``again`` returns the seconds after which a result
    asks for the next time, with no more leisure than the work took, or None for the usual pause. Each statement of the
    work has ``limit_seconds``.
    """

    name: str
    work: Callable[[], Any]
    every_seconds: float
    retry_seconds: float
    again: Callable[[Any], float | None] = lambda _: None
    leisure: float = 50.0
    limit_seconds: float = 5.0
    due_at: float = 0.0


def at_once_from(count: int) -> Callable[[int], float | None]:
    """Return the ``again`` of a chore that has more to do if it has done ``count`` steps."""
    return lambda done: 0.0 if done >= count else None


class Chores:
    """Does chores when they are due. One that fails is logged, and stops no other."""

    def __init__(self, store: Store, log: BoundLogger, chores: Sequence[Chore]) -> None:
        self._store = store
        self._log = RateLimitedLog(log)
        self._chores = chores

    def run(self, stopping: threading.Event) -> None:
        """Do chores until ``stopping`` is set."""
        while True:
            chore = min(self._chores, key=lambda chore: chore.due_at)
            if stopping.wait(max(0.0, chore.due_at - time.monotonic())):
                return
            self.do(chore)

    def do(self, chore: Chore) -> None:
        """Do a chore, and set its next time."""
        began = time.monotonic()
        self._store.limit_calls(chore.limit_seconds)
        try:
            again = chore.again(chore.work())
            failed = False
        except Exception as error:  # the fault of a chore must neither end the process nor pass unseen
            again, failed = None, True
            # The text of another error may quote a value.
            reason = str(error) if isinstance(error, RelayError) else type(error).__name__
            self._log.warning("housekeeping.failed", chore=chore.name, reason=reason)
        now = time.monotonic()
        usual = chore.retry_seconds if failed else chore.every_seconds
        leisure = chore.leisure if again is None else min(chore.leisure, 1.0)
        pause = max(usual if again is None else again, leisure * (now - began))
        chore.due_at = now + pause


class LedgerTrim:
    """Removes outranked positions in bounded steps, which are smaller after one that failed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows = TRIM_ROWS

    def trim(self) -> int:
        """Remove outranked positions of every sink, and return their number."""
        try:
            count = self._store.value("trim_progress", {"most": self._rows})
        except StatementFailed:
            self._rows = TRIM_LEAST
            raise
        self._rows = min(TRIM_ROWS, self._rows + TRIM_LEAST)
        return count


def schedule_chores(schedules: Schedules) -> list[Chore]:
    """Return the chores that register the schedules of the file, and fire those of the database."""
    return [
        Chore("registration of schedules", schedules.register, 1.0, 1.0, leisure=1.0),
        Chore("schedules", schedules.look, 1.0, 1.0, float, leisure=1.0),
    ]


def due_things(scheduled: ScheduledEvents, schedules: Schedules) -> list[Chore]:
    """Return the chores that let events enter the log at their time."""
    return [
        Chore("scheduled events", scheduled.look, 0.25, 1.0, float, leisure=1.0),
        *schedule_chores(schedules),
    ]


def housekeeping(store: Store) -> list[Chore]:
    """Return the chores that keep the tables small and mend what is left behind. Each is a statement."""

    def chore(name: str, every: float, retry: float, again_from: int | None = None, **parameters: float) -> Chore:
        chore = Chore(name, partial(store.value, name, parameters), every, retry)
        return replace(chore, again=at_once_from(again_from)) if again_from else chore

    return [
        chore("make_partitions", 60.0, 2.0),
        chore("make_attempt_partitions", 60.0, 2.0),
        Chore("trim_progress", LedgerTrim(store).trim, 5.0, 15.0, at_once_from(TRIM_LEAST // 2)),
        chore("raise_ledger_starts", 60.0, 60.0, 1),
        chore("trim_former_positions", 600.0, 60.0, 1, most=TRIM_ROWS),
        chore("trim_relays", 600.0, 60.0),
        chore("cap_times", 60.0, 60.0, most=MOST_LEASE_SECONDS),
        chore("trim_routes", 60.0, 60.0, 1),
        chore("trim_discarded", 600.0, 60.0, 1, most=TRIM_ROWS),
        chore("trim_history", 600.0, 60.0, 1, most=TRIM_ROWS),
        chore("finish_unique_keys", 1.0, 2.0, KEYS // 2, most=KEYS),
        chore("queue_due_rows", 2.0, 5.0, DUE_ROWS, most=DUE_ROWS),
    ]
