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
from outbox_relay.postgres.schedules import ScheduledPlace
from outbox_relay.postgres.store import Store
from outbox_relay.relay.schedules import Schedules

LEDGER_ROWS = 500
"""Positions of each sink that one trim of the ledger compares. At most 64 of them are kept."""
TRIM_ROWS = 1000
"""Rows that any other trim deletes at a time."""
MOST_LEASE_SECONDS = 600.0
"""The largest ``lease_seconds`` of a relay."""
KEYS = 500
"""Unique keys to look at, at a time."""
DUE_ROWS = 500
"""Rows of a sink with ``claim = "rows"`` that are put into its queue at a time when their time has come."""

ENTRY_SECONDS = 0.25
"""Longest pause between two looks while events are scheduled. A sooner one follows when the next one is due."""
WHOLE_SECONDS = 1.0
"""Interval between looks while no event is scheduled, and between those that begin at the first row."""
LEISURE = 20
"""Shortest interval between these, as a multiple of the time that one took."""
PAUSE_SECONDS = 0.005
"""Shortest pause after a look that did not find more events than one entry takes."""
MOST_EVENTS, FEWEST_EVENTS = 2000, 10
"""Number of events that enter in one transaction, and after failures."""
SLOW_SECONDS = 0.5
"""Duration of an entry after which fewer events enter at a time, as they are large."""
LAG_SECONDS = 10.0
"""Interval at which the lag of sinks is looked at."""


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


class ScheduledEvents:
    """Lets scheduled events enter the log when they are due.

    Every relay looks for them, and the database lets one session at a time move them. A look begins where the one
    before ended: rows that were moved stay in the index for as long as some snapshot may see them, and are not visited
    again. Now and then a look begins at the first row, because one may have become due behind the place: its
    transaction committed late, or a change of it was rolled back.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._most = MOST_EVENTS
        self._place: ScheduledPlace | None = None
        self._whole_at = 0.0

    def look(self) -> float:
        """Let events that are due enter, as many as one transaction takes; return the seconds until the next look.

        Fewer enter at a time after a failure.
        """
        began = time.monotonic()
        whole = self._place is None or began >= self._whole_at
        try:
            found = self._store.enter_scheduled(self._most, None if whole else self._place)
        except StatementFailed:
            self._most = max(FEWEST_EVENTS, self._most // 10)
            raise
        took = time.monotonic() - began
        if found.entered is None:
            return ENTRY_SECONDS
        if whole:
            self._whole_at = began + max(WHOLE_SECONDS, LEISURE * took)
        self._place = found.last or self._place
        full = found.entered >= self._most
        self._most = max(FEWEST_EVENTS, self._most // 2) if took > SLOW_SECONDS else min(MOST_EVENTS, 2 * self._most)
        if full:
            return 0.0
        return max(PAUSE_SECONDS, took, WHOLE_SECONDS if found.due_in is None else min(ENTRY_SECONDS, found.due_in))


class LagWatch:
    """Has notices made of sinks that lag by ``lagging_seconds``; None means that no sink receives notices."""

    def __init__(self, store: Store, lagging_seconds: float | None, log: BoundLogger) -> None:
        self._store = store
        self._lagging_seconds = lagging_seconds
        self._log = log
        self._lagging = set[str]()

    def use(self, lagging_seconds: float | None) -> None:
        """Use the setting of a reload."""
        self._lagging_seconds = lagging_seconds

    def look(self) -> None:
        """Look at all sinks once. One that lags by less than half of the limit has recovered."""
        if (limit := self._lagging_seconds) is None:
            self._lagging.clear()
            return
        for sink, seconds, paused in self._store.notify_sinks(limit):
            if paused:
                continue
            if seconds >= limit and sink not in self._lagging:
                self._lagging.add(sink)
                self._log.warning("sink.lagging", sink=sink, lag_seconds=round(seconds, 1))
            elif seconds < limit / 2 and sink in self._lagging:
                self._lagging.remove(sink)
                self._log.info("sink.recovered", sink=sink)


def schedule_chores(schedules: Schedules) -> list[Chore]:
    """Return the chores that register the schedules of the file, and fire those of the database."""
    return [
        Chore("registration of schedules", schedules.definitions.keep, 1.0, 1.0, leisure=1.0),
        Chore("schedules", schedules.look, 1.0, 1.0, float, leisure=1.0),
    ]


def all_chores(store: Store, schedules: Schedules, lag_watch: LagWatch) -> list[Chore]:
    """Return the chores of a relay process, but those that have a thread of their own."""
    return [
        Chore("scheduled events", ScheduledEvents(store).look, ENTRY_SECONDS, 1.0, float, leisure=1.0),
        *schedule_chores(schedules),
        *housekeeping(store),
        Chore("look at lags", lag_watch.look, LAG_SECONDS, LAG_SECONDS),
    ]


def housekeeping(store: Store) -> list[Chore]:
    """Return the chores that keep the tables small and mend what is left behind. Each is a statement."""

    def chore(name: str, every: float, retry: float, again_from: int | None = None, **parameters: float) -> Chore:
        chore = Chore(name, partial(store.value, name, parameters), every, retry)
        return replace(chore, again=at_once_from(again_from)) if again_from else chore

    return [
        chore("make_partitions", 60.0, 2.0),
        chore("make_attempt_partitions", 60.0, 2.0),
        chore("trim_progress", 5.0, 15.0, LEDGER_ROWS // 2, most=LEDGER_ROWS),
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
