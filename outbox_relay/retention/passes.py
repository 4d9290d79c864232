"""One pass: each day that is past keep_days is checked, archived if required, and emptied."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from outbox_relay.domain.errors import ArchiveFailed, RelayError, StatementFailed
from outbox_relay.postgres.retention import FIRST, DayCheck, Pass, Person
from outbox_relay.postgres.store import Store
from outbox_relay.retention.archiver import Archiver
from outbox_relay.retention.wording import CHANGED, LOCKED, day_name, keepers_text, locked_text

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

LEASE_SECONDS = 120.0
"""Time for which a pass has the lease of the retention without renewing it."""
TOO_LONG = frozenset({"57014", "55P03"})
"""SQLSTATEs of a statement that ran out of time or did not get a lock."""
PARTITIONS = "empty partitions"
"""Name of the step that removes one of them, which few passes have."""
COUNT_EVENTS = 100_000
"""Number of events that one statement counts."""
STEP_ROWS = 1_000
"""Number of uids, marks or dead rows that one statement examines."""
LEFT = "retention.left"
LOGGED_AT = 2
"""Number of passes in a row that leave a day for one reason of which the last has a line in the log."""
STEPS = 100
"""Limit of the steps over uids, over marks, over dead rows and over attempts, in one pass."""


class Stopped(RelayError):
    """The end of a pass in the middle, because the process stops."""


@dataclass(slots=True)
class Outcome:
    """The result of a pass: its days, and the numbers of uids, marks, dead rows and attempts that it removed."""

    emptied: list[str] = field(default_factory=list[str])
    left: dict[str, str] = field(default_factory=dict[str, str])
    """Days that are left, with the reason."""
    dropped: list[str] = field(default_factory=list[str])
    uids: int = 0
    marks: int = 0
    """Marks of the inbox."""
    dead: int = 0
    attempts: int = 0
    """Partitions and rows of recorded attempts."""
    failed: bool = False
    """True if an archive could not be written."""
    locked: bool = False
    """True if a lock was not granted. No other one is then asked for in this pass."""


class RetentionPass:
    """The steps of one pass, under one lease. ``progress`` is called before each day; a command has no log.

    ``notes`` are the reasons for which the pass before left days and steps, by name, with the number of passes in a row
    that did. The pass replaces them by its own. A reason has one line in the log.
    """

    def __init__(
        self,
        store: Store,
        granted: Pass,
        archiver: Archiver | None,
        log: BoundLogger | None,
        progress: Callable[[str], None] = lambda _: None,
        notes: dict[str, tuple[str, int]] | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        self._store = store
        self._notes = {} if notes is None else notes
        self._before = dict(self._notes)
        self._granted = granted
        self._lease = granted.lease
        self._archiver = archiver
        self._log = log
        self._progress = progress
        self._stopping = stopping
        self._renewed_at = time.monotonic()
        self.outcome = Outcome()

    def run(self, *, drop: bool = True) -> Outcome:
        """Do all steps, and return the outcome. ``drop`` removes one empty partition too.

        Raises ``StatementFailed`` if another process has the lease by now, ``Stopped``, and as the store.
        """
        self._notes.clear()
        if not drop and PARTITIONS in self._before:
            self._notes[PARTITIONS] = self._before[PARTITIONS]
        if self._granted.hold_until is None:
            self._try("the list of days", self._do_days)
            if drop:
                self._try(PARTITIONS, self._drop)
            store = self._store
            for name, counted, trim in (
                ("uids", "uids", store.trim_uids),
                ("inbox", "marks", store.trim_inbox),
                ("dead letters", "dead", store.discard_expired),
                ("attempts", "attempts", store.trim_attempts),
            ):
                self._try(name, partial(self._trim, counted, trim))
        return self.outcome

    def _do_days(self) -> None:
        for day in self._store.due_days():
            self._progress(day_name(day))
            if failure := self._try(day_name(day), partial(self._do, day)):
                self._leave(day, failure)

    def _try(self, name: str, work: Callable[[], None]) -> str | None:
        """Do a day or a step. One whose statements fail is left, and does not stop the others.

        Return why it was left, or None. Raises ``StatementFailed`` if another process has the lease by now.
        """
        self._keep_on()
        try:
            work()
        except StatementFailed as error:
            if error.sqlstate in TOO_LONG:
                self._note(name, str(error))
            else:
                self._store.renew_retention(self._lease)
                self.outcome.failed = True
                self._note(name, str(error), "retention.failed")
            self.outcome.left[name] = str(error)
            return str(error)
        return None

    def _keep_on(self) -> None:
        """Renew the lease from time to time. Raises ``Stopped`` if the process stops."""
        if self._stopping is not None and self._stopping.is_set():
            raise Stopped("the process stops")
        if time.monotonic() - self._renewed_at >= LEASE_SECONDS / 4:
            self._renewed_at = time.monotonic()
            with suppress(RelayError):
                self._store.renew_retention(self._lease)

    def _note(self, name: str, reason: str, event: str = LEFT, text: str | None = None) -> None:
        """Log once why a day or a step is left: most reasons for ``LEFT`` end by themselves before ``LOGGED_AT``."""
        before, passes = self._before.get(name, ("", 0))
        passes = passes + 1 if before == reason else 1
        self._notes[name] = reason, passes
        if self._log and passes == (LOGGED_AT if event == LEFT else 1):
            self._log.warning(event, day=name, reason=text or reason)

    def _do(self, day: str) -> None:
        """Empty a day, or record the reason for which it is left."""
        check = self._store.check_day(day, self._lease)
        if check.kept_by:
            reason = self.outcome.left[day_name(day)] = keepers_text(check.kept_by)
            if check.changed and self._log:
                self._log.warning("retention.blocked", day=day_name(day), reason=reason)
            return
        try:
            events = self._prepare(day, check)
        except ArchiveFailed as error:
            self.outcome.failed = True
            self._note(day_name(day), error.cause, "retention.archive_failed", str(error))
            self._leave(day, str(error))
            return
        if events is None:
            self._leave_for(day, "it must be archived first, and no archive is configured here")
        elif self.outcome.locked:
            self._leave_for(day, LOCKED)
        else:
            self._empty(day, events)

    def _prepare(self, day: str, check: DayCheck) -> int | None:
        """Return the number of events of a day, after archiving it if required; None if that is impossible here."""
        if not self._granted.archive or check.archived:
            return self._count(day)
        if self._archiver is None:
            return None
        return self._archiver.archive(self._store, day, self._lease, self._keep_on)

    def _count(self, day: str) -> int:
        events, after = 0, FIRST
        while True:
            counted, last_id, last_uid = self._store.count_day(day, self._lease, after, COUNT_EVENTS)
            events += counted
            if counted < COUNT_EVENTS:
                return events
            after = (last_id, last_uid)
            self._keep_on()

    def _empty(self, day: str, events: int) -> None:
        while (answer := self._store.empty_day(day, self._lease, events)) == "more":
            pass
        if answer == "emptied":
            self.outcome.emptied.append(day_name(day))
            if self._log:
                self._log.info("retention.emptied", day=day_name(day), events=events, archived=self._granted.archive)
            return
        if answer == "locked":
            self.outcome.locked = True
            self._leave_for(day, LOCKED, locked_text(self._holders(day)))
        else:
            self._leave_for(day, "it must be archived first" if answer == "archive" else CHANGED)

    def _holders(self, day: str) -> list[dict[str, Any]]:
        """Return the transactions that held the lock of a day when it was not granted; none if that takes too long."""
        try:
            found = self._store.retention_status(live=False)
        except StatementFailed as error:
            if error.sqlstate not in TOO_LONG:
                raise
            return []
        here = [each["kept_by"] for each in found["days"] if each["due"] and each["day"] == day_name(day)]
        return here[0] if here else []

    def _leave_for(self, day: str, reason: str, text: str | None = None) -> None:
        """Leave a day for a ``reason`` that a later pass may not meet; ``text`` tells more of it."""
        self._note(day_name(day), reason, text=text)
        self._leave(day, text or reason)

    def _leave(self, day: str, reason: str) -> None:
        """Record why a day is left. If that takes too long, continue the pass without the record."""
        self.outcome.left[day_name(day)] = reason
        try:
            self._store.leave_day(day, self._lease, reason)
        except StatementFailed as error:
            if error.sqlstate not in TOO_LONG:
                raise

    def _drop(self) -> None:
        """Remove one empty partition."""
        if (day := self._store.drop_day(self._lease)) is not None:
            self.outcome.dropped.append(day)
            if self._log:
                self._log.info("retention.dropped", day=day)

    def _trim(self, counted: str, trim: Callable[[int, int], tuple[int, bool]]) -> None:
        """Remove what is old in steps, and set its number in the outcome."""
        count = 0
        for _ in range(STEPS):
            self._keep_on()
            removed, left_over = trim(self._lease, STEP_ROWS)
            count += removed
            setattr(self.outcome, counted, count)
            if not left_over:
                return


def run_pass(
    store: Store,
    owner: UUID,
    by: Person,
    do: Callable[[Pass], Outcome],
    *,
    at_once: bool = False,
    works: bool = True,
) -> tuple[Pass, Outcome] | None:
    """Begin a pass, call ``do`` with it, and release the lease; return None while another process does a pass.

    One without ``works`` does no steps, and does not count as a pass for ``retention status``.
    """
    granted = store.begin_retention(owner, by, LEASE_SECONDS, at_once=at_once, works=works)
    if granted is None:
        return None
    try:
        return granted, do(granted)
    finally:
        with suppress(RelayError):  # then it ends by itself
            store.end_retention(granted.lease)
