"""The schedules of one relay process: it registers those of its file, and fires all that the database has.

The relay that started or was reloaded last decides what a schedule is, as for the routes of a sink. A relay whose
definition was replaced so waits until no live relay has the one in force, and then registers its own again: the relays
that stay win.

Every relay looks at every schedule. The database compares and emits in one transaction, so each time is emitted once,
whichever relay comes first. This process's own clock decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from prometheus_client import Counter
from structlog.stdlib import BoundLogger

from outbox_relay.domain.cron import LATE, firing, next_time
from outbox_relay.domain.errors import DatabaseUnavailable, RelayError, SessionReset
from outbox_relay.domain.log_events import RateLimitedLog
from outbox_relay.postgres.schedules import OtherGeneration, ScheduleRow
from outbox_relay.postgres.store import Store

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

HOLD_SECONDS = 5.0
"""Interval at which the generations in the database are compared with those that this relay knows."""
UNHELD_LOOKS = 3
"""Number of consecutive comparisons that must find no relay with the definition in force."""
MOST_NAMED = 20
"""Maximum number of schedules that a line of the log names."""

Definition = Mapping[str, Any]
"""A schedule, as ``register_schedules`` takes it."""


class ScheduleDefinitions:
    """The definitions of one relay's file, of which ``wanted`` are the first."""

    def __init__(self, store: Store, relay: UUID, wanted: Sequence[Definition], log: BoundLogger) -> None:
        self._store = store
        self._relay = relay
        self._wanted = wanted
        self._log = log
        self._known: dict[str, int] = {}
        """The generation under which this relay has registered, or found, its own definition of each schedule."""
        self._others: dict[str, tuple[int, int]] = {}
        """Generations of other definitions in force, each with the number of looks at which no relay had it."""
        self._held_at = float("-inf")
        self._known_in: str | None = None
        """The server's incarnation at the last look."""
        self._present: set[str] = set()
        """The schedules of the file that the database had then."""
        self.registered = False
        """True once the database has the schedules of the file."""

    def use(self, wanted: Sequence[Definition]) -> None:
        """Register the definitions of a reload at the next call of ``keep``, also those that are as before."""
        self._wanted = wanted
        self.registered = False

    def keep(self) -> None:
        """Register the schedules of the file, or compare them with those in force. Raises as ``Store``."""
        wanted = self._wanted
        if not self.registered:
            self._known = self._store.register_schedules(wanted) if wanted else {}
            self._others, self._held_at = {}, float("-inf")
            self.registered = wanted is self._wanted
            self._known_in = None
        if (wanted or self._held_at == float("-inf")) and time.monotonic() - self._held_at >= HOLD_SECONDS:
            self._compare(self._store.hold_schedules(self._relay, self._known))
            self._look_for_missing()
            self._held_at = time.monotonic()

    def _look_for_missing(self) -> None:
        """Register the schedules that the database had under the previous server: its state may be an earlier one.

        Those that it has are left alone. Other relays may have changed them since. What is missing although the server
        is the same was removed by a person.
        """
        server, present = self._store.known_schedules([each["name"] for each in self._wanted])
        if self._known_in not in (None, server):
            missing = [each for each in self._wanted if each["name"] in self._present - present]
            if missing:
                self._known |= self._store.register_schedules(missing)
                names = [each["name"] for each in missing]
                self._log.warning("schedules.registered_again", schedules=names[:MOST_NAMED], count=len(names))
                present |= set(names)
        self._known_in, self._present = server, present

    def _compare(self, found: Iterable[OtherGeneration]) -> None:
        """Adopt the generations of definitions that are ours, and replace those that no live relay has."""
        own = {each["name"]: each for each in self._wanted}
        others: dict[str, tuple[int, int]] = {}
        asked: list[dict[str, Any]] = []
        new: list[str] = []
        for other in (each for each in found if each.name in own):
            generation, unheld = self._others.get(other.name, (None, 0))
            is_new = generation != other.generation
            unheld = 0 if other.held else 1 if is_new else unheld + 1
            others[other.name] = other.generation, unheld
            if is_new or unheld >= UNHELD_LOOKS:
                asked.append({**own[other.name], "seen": other.generation, "over": unheld >= UNHELD_LOOKS})
            if is_new:
                new.append(other.name)
        taken = self._store.take_schedules(asked) if asked else {}
        self._others = {name: other for name, other in others.items() if name not in taken}
        self._known.update(taken)
        if superseded := [name for name in new if name not in taken]:
            self._log.warning("schedules.superseded", schedules=superseded[:MOST_NAMED], count=len(superseded))
        if back := [name for name in taken if taken[name] != others[name][0]]:
            self._log.warning("schedules.taken_back", schedules=back[:MOST_NAMED], count=len(back))


class Schedules:
    """The schedules of one relay, named ``relay``, whose file is ``definitions``. ``fired`` counts by outcome."""

    def __init__(
        self,
        store: Store,
        definitions: ScheduleDefinitions,
        relay: str,
        log: BoundLogger,
        fired: Counter,
    ) -> None:
        self._store = store
        self.definitions = definitions
        self._relay = relay
        self._log = log
        self._seldom = RateLimitedLog(log)
        self._fired = fired
        self._failed: dict[ScheduleRow, float] = {}
        """Schedules that failed, without what changes at each look, and ``time.monotonic()`` of the next try."""

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
            self._fired.labels("failed").inc()
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
                self._fired.labels("emitted").inc(count)
            case "passed over":
                self._log.warning("schedule.passed_over", schedule=row.name, since=due.isoformat())
                self._fired.labels("passed_over").inc()
            case "refused":
                self._log.warning("schedule.refused", schedule=row.name)
                self._fired.labels("refused").inc()
            case _:
                pass
        return outcome in SOON


def _lasting(row: ScheduleRow) -> ScheduleRow:
    """Return a schedule without what changes at each look."""
    return row._replace(now=row.after_at, seconds=0.0)
