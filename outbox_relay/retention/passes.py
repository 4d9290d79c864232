"""One pass: each day that is past keep_days is checked, archived if required, and emptied."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from outbox_relay.domain.errors import ArchiveFailed, RelayError, StatementFailed
from outbox_relay.postgres.retention import FIRST, DayCheck, Pass, Person
from outbox_relay.postgres.store import Store
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
LOGGED_AT = 2
"""Number of passes in a row that leave a day for one reason of which the last has a line in the log."""
STEPS = 100
"""Limit of the steps over uids, over marks, over dead rows and over attempts, in one pass."""


class Archiver(Protocol):
    """Writes the archive of a checked day, and verifies it."""

    def archive(self, store: Store, day: str, lease: int, waiting: Callable[[], None]) -> int:
        """Return the number of events in the archive, which is recorded in the database.

        The objects of earlier archives of the day that are not verified are removed. ``waiting`` is called several
        times a second meanwhile. Whatever it raises ends the archiving.

        Raises ``ArchiveFailed``, and as the store.
        """
        ...


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

    ``failures`` are the causes for which archives failed in the pass before, by day, which are logged once. ``left``
    are the other reasons for which days were left, with the number of passes in a row that left them. The pass replaces
    both by its own.
    """

    def __init__(
        self,
        store: Store,
        granted: Pass,
        archiver: Archiver | None,
        log: BoundLogger | None,
        progress: Callable[[str], None] = lambda _: None,
        failures: dict[str, str] | None = None,
        left: dict[str, tuple[str, int]] | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        self._store = store
        self._failures = {} if failures is None else failures
        self._failed_before = dict(self._failures)
        self._left = {} if left is None else left
        self._left_before = dict(self._left)
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
        self._failures.clear()
        self._left.clear()
        if not drop and (failure := self._failed_before.get(PARTITIONS)) is not None:
            self._failures[PARTITIONS] = failure
        if self._granted.hold_until is None:
            self._try("the list of days", self._do_days)
            if drop:
                self._try(PARTITIONS, self._drop)
            self._try("uids", self._trim_uids)
            self._try("inbox", self._trim_inbox)
            self._try("dead letters", self._discard_dead)
            self._try("attempts", self._trim_attempts)
        return self.outcome

    def _do_days(self) -> None:
        for day in self._store.due_days():
            self._progress(day_name(day))
            if late := self._try(day_name(day), partial(self._do, day)):
                self._leave(day, late)

    def _try(self, name: str, work: Callable[[], None]) -> str | None:
        """Do a day or a step. One whose statements fail is left, and does not stop the others.

        Return why it was left, or None. Raises ``StatementFailed`` if another process has the lease by now.
        """
        self._keep_on()
        try:
            work()
        except StatementFailed as error:
            if error.sqlstate not in TOO_LONG:
                self._store.renew_retention(self._lease)
                self._note_error(name, error)
            self.outcome.left[name] = str(error)
            self._note_left(name, str(error))
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

    def _note_error(self, name: str, error: StatementFailed) -> None:
        """Log an error of a day or a step, unless it failed with the same SQLSTATE before."""
        self.outcome.failed = True
        self._failures[name] = error.sqlstate or ""
        if self._log and self._failed_before.get(name) != error.sqlstate:
            self._log.warning("retention.failed", reason=f"{name}: {error}")

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
            self._note_failure(day, error)
            self._leave(day, str(error))
            return
        if events is None:
            self._leave(day, self._noted(day, "it must be archived first, and no archive is configured here"))
        elif self.outcome.locked:
            self._leave(day, self._noted(day, LOCKED))
        else:
            self._empty(day, events)

    def _note_failure(self, day: str, error: ArchiveFailed) -> None:
        """Log an archive that was not written, unless it failed for the same cause in the pass before."""
        self.outcome.failed = True
        self._failures[day] = error.cause
        if self._log and self._failed_before.get(day) != error.cause:
            self._log.warning("retention.archive_failed", day=day_name(day), reason=str(error))

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
            holders = self._holders(day)
            self._leave(day, self._noted(day, LOCKED, locked_text(holders)))
        else:
            self._leave(day, self._noted(day, "it must be archived first" if answer == "archive" else CHANGED))

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

    def _noted(self, day: str, reason: str, text: str | None = None) -> str:
        """Note that a day is left, and return the reason, or the text that tells more of it."""
        self._note_left(day_name(day), reason, text)
        return text or reason

    def _note_left(self, name: str, reason: str, text: str | None = None) -> None:
        """Log a day or a step once, when ``LOGGED_AT`` passes in a row have left it: most reasons end by themselves."""
        before, passes = self._left_before.get(name, ("", 0))
        passes = passes + 1 if before == reason else 1
        self._left[name] = reason, passes
        if self._log and passes == LOGGED_AT:
            self._log.warning("retention.left", day=name, reason=text or reason)

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

    def _trim_uids(self) -> None:
        self.outcome.uids = self._trim(self._store.trim_uids)

    def _trim_inbox(self) -> None:
        self.outcome.marks = self._trim(self._store.trim_inbox)

    def _discard_dead(self) -> None:
        self.outcome.dead = self._trim(self._store.discard_expired)

    def _trim_attempts(self) -> None:
        for _ in range(STEPS):
            self._keep_on()
            removed = self._store.trim_attempts(self._lease)
            self.outcome.attempts += removed
            if not removed:
                return

    def _trim(self, trim: Callable[[int, int], tuple[int, bool]]) -> int:
        """Remove what is old, and return its number."""
        count = 0
        for _ in range(STEPS):
            self._keep_on()
            removed, left_over = trim(self._lease, STEP_ROWS)
            count += removed
            if not left_over:
                break
        return count


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
