"""The entry of scheduled events into the log.

Every relay looks for events that are due, and the database lets one session at a time move them. A look begins where
the one before ended: rows that were moved stay in the index for as long as some snapshot may see them, and are not
visited again. Now and then a look begins at the first row, because one may have become due behind the place: its
transaction committed late, or a change of it was rolled back.
"""

from __future__ import annotations

import time

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.postgres.schedules import ScheduledPlace
from outbox_relay.postgres.store import Store

LOOK_SECONDS = 0.25
"""Longest pause between two looks. A sooner one follows when the next event is known to be due."""
WHOLE_SECONDS = 1.0
"""Interval between looks that begin at the first row."""
LEISURE = 20
"""Shortest interval between these, as a multiple of the time that one took."""
PAUSE_SECONDS = 0.005
"""Shortest pause after a look that did not find more events than one entry takes."""
MOST_EVENTS, FEWEST_EVENTS = 2000, 10
"""Number of events that enter in one transaction, and after failures."""
SLOW_SECONDS = 0.5
"""Duration of an entry after which fewer events enter at a time, as they are large."""


class ScheduledEvents:
    """Lets scheduled events enter the log when they are due."""

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
            return LOOK_SECONDS
        if whole:
            self._whole_at = began + max(WHOLE_SECONDS, LEISURE * took)
        self._place = found.last or self._place
        full = found.entered >= self._most
        self._most = max(FEWEST_EVENTS, self._most // 2) if took > SLOW_SECONDS else min(MOST_EVENTS, 2 * self._most)
        if full:
            return 0.0
        return max(PAUSE_SECONDS, took, min(LOOK_SECONDS, LOOK_SECONDS if found.due_in is None else found.due_in))
