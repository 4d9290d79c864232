"""The schedules of one relay process: it registers those of its file, and fires all that the database has.

Every relay looks at every schedule. The database compares and emits in one transaction, so each time is emitted once,
whichever relay comes first. This process's own clock decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime

from structlog.stdlib import BoundLogger

from outbox_relay.domain.cron import LATE, firing, next_time
from outbox_relay.domain.errors import DatabaseUnavailable, RelayError, SessionReset
from outbox_relay.domain.log_events import RateLimitedLog
from outbox_relay.domain.measures import ScheduleMeasures
from outbox_relay.postgres.schedules import ScheduleRow
from outbox_relay.postgres.store import Store
from outbox_relay.relay.schedule_definitions import Definition, ScheduleDefinitions

LOOK_SECONDS = 1.0
"""Longest pause between two looks at the schedules, and the time after which a look makes way for the next one."""
PAUSE_SECONDS = 0.05
"""Shortest pause: another relay may have a schedule locked, or a time may be a moment away."""
FAILED_SECONDS = 5.0
"""Time for which a schedule that this relay could not fire is left to the other relays."""
SOON = frozenset({"again", "early", "emitted", "passed over"})
"""Outcomes after which the schedule may have another time that is due."""
PASSED_ON = (DatabaseUnavailable, SessionReset, MemoryError)
"""Errors that concern more than one schedule, after which the look is given up."""


class Schedules:
    """The schedules of one relay, named ``relay``, whose file is ``definitions``."""

    def __init__(
        self,
        store: Store,
        definitions: ScheduleDefinitions,
        relay: str,
        log: BoundLogger,
        measures: ScheduleMeasures,
    ) -> None:
        self._store = store
        self._definitions = definitions
        self._relay = relay
        self._log = log
        self._seldom = RateLimitedLog(log)
        self._measures = measures
        self._failed: dict[ScheduleRow, float] = {}
        """Schedules that failed, without what changes at each look, and ``time.monotonic()`` of the next try."""

    def use(self, wanted: Sequence[Definition]) -> None:
        """Register the schedules of a reload, also those that are as before: one may be removed."""
        self._definitions.use(wanted)

    def register(self) -> None:
        """Register the schedules of the file, or compare them with those in force."""
        self._definitions.keep()

    def look(self) -> float:
        """Fire the schedules that are due, one event at a time, and return the seconds until the next look."""
        pause, began = LOOK_SECONDS, time.monotonic()
        rows = self._store.due_schedules(LOOK_SECONDS, LATE.total_seconds())
        self._failed = {row: until for row, until in self._failed.items() if until > began}
        for row in rows:
            if row.seconds > 0:
                pause = min(pause, row.seconds)
            elif _lasting(row) not in self._failed:
                if time.monotonic() - began > LOOK_SECONDS:
                    return PAUSE_SECONDS
                if self._try(row):
                    pause = PAUSE_SECONDS
        return max(PAUSE_SECONDS, pause)

    def _try(self, row: ScheduleRow) -> bool:
        """Find the first time of a schedule, or fire it; return True if it is to be looked at again soon.

        A failure is logged, recorded for people, and stops no other schedule.
        """
        try:
            return self._act(row)
        except PASSED_ON:
            raise
        except Exception as error:  # such as one that a cron expression of another version causes
            # The text of another error may quote a value.
            reason = str(error) if isinstance(error, RelayError | ValueError) else type(error).__name__
            self._failed[_lasting(row)] = time.monotonic() + FAILED_SECONDS
            self._measures.count("failed")
            self._seldom.warning("schedule.failed", schedule=row.name, reason=reason)
            self._store.fail_schedule(row, f"relay {self._relay}: {reason}")
            return False

    def _act(self, row: ScheduleRow) -> bool:
        """Do what ``_try`` does, and raise whatever fails."""
        if row.next_at is not None:
            return self._fire(row, row.next_at)
        following = next_time(row.cron, row.timezone, row.after_at)
        if following is None:
            raise ValueError("its cron expression never comes")
        return self._store.place_schedule(row, following)

    def _fire(self, row: ScheduleRow, due: datetime) -> bool:
        found = firing(row.cron, row.timezone, row.missed, due, row.now)
        if found is None:
            raise ValueError("its cron expression never comes again")
        outcome, count = self._store.fire_schedule(row, found.next, found.times)
        match outcome:
            case "emitted":
                self._log.info("schedule.emitted", schedule=row.name, due=due.isoformat(), count=count)
                self._measures.count("emitted", count)
            case "passed over":
                self._log.warning("schedule.passed_over", schedule=row.name, since=due.isoformat())
                self._measures.count("passed_over")
            case "refused":
                self._log.warning("schedule.refused", schedule=row.name)
                self._measures.count("refused")
            case _:
                pass
        return outcome in SOON


def _lasting(row: ScheduleRow) -> ScheduleRow:
    """Return a schedule without what changes at each look."""
    return row._replace(now=row.after_at, seconds=0.0)
