"""Schedules, and scheduled events that enter the log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from outbox_relay.postgres.database import Database

DUE_MAX = 1000
"""Most schedules that are read at once."""


class ScheduledPlace(NamedTuple):
    """A place in the order in which scheduled events enter the log: the text of a time of the database, and an id."""

    time: str
    id: int


class Entries(NamedTuple):
    """The entry of scheduled events into the log.

    ``entered`` is their number, or None while another session lets events enter. ``last`` is the place of the last one,
    and ``due_in`` the seconds until the next one is due; None if there is none.
    """

    entered: int | None
    last: ScheduledPlace | None
    due_in: float | None


class ScheduleRow(NamedTuple):
    """A schedule that is not paused, and ``now``, the time of the database. It fires in ``seconds``.

    ``next_at`` is None if the first time after ``after_at`` has yet to be found.
    """

    name: str
    cron: str
    timezone: str
    missed: str
    generation: int
    after_at: datetime
    next_at: datetime | None
    now: datetime
    seconds: float


class OtherGeneration(NamedTuple):
    """A schedule that has another generation than this relay knows. ``held``: another live relay knows this one."""

    name: str
    generation: int
    held: bool


class Fired(NamedTuple):
    """The outcome of a call, as ``outbox_internal.fire_schedule_times`` names it, and the number of events."""

    outcome: str
    emitted: int


class ScheduleStatements(Database):
    """Schedules. Only the clock of the database says whether a time has come."""

    def register_schedules(self, wanted: Iterable[Mapping[str, Any]]) -> dict[str, int]:
        """Register the schedules of a file, or change them; return their generations."""
        return dict(self.named("register_schedules", {"wanted": json.dumps(list(wanted))}))

    def known_schedules(self, names: Iterable[str]) -> tuple[str, set[str]]:
        """Return the incarnation of the server, and those of ``names`` that schedules have."""
        [(server, known)] = self.named("known_schedules", {"names": list(names)})
        return server, set(known)

    def hold_schedules(self, relay: UUID, known: Mapping[str, int]) -> list[OtherGeneration]:
        """Record which schedules the file of a relay has, and return those that have another generation."""
        parameters = {"relay": relay, "known": json.dumps(known)}
        return self.named("hold_schedules", parameters, row=OtherGeneration)

    def take_schedules(self, wanted: Iterable[Mapping[str, Any]]) -> dict[str, int]:
        """Return the generations of schedules that are as ``wanted``, after changing those that may be changed.

        Each has ``seen``, a generation, and ``over``, which is True if it may be changed while it has that generation.
        """
        return dict(self.named("take_schedules", {"wanted": json.dumps(list(wanted))}))

    def due_schedules(self, ahead: float, late: float) -> list[ScheduleRow]:
        """Return the schedules that fire within ``ahead`` seconds, in the order in which they are to be tried.

        A time that is late by ``late`` seconds comes after those that are not.
        """
        parameters = {"ahead": ahead, "late": late, "most": DUE_MAX}
        return self.named("due_schedules", parameters, row=ScheduleRow)

    def place_schedule(self, row: ScheduleRow, following: datetime) -> bool:
        """Write the first time of a schedule after ``after_at``. Return False if it was changed meanwhile."""
        place = {"name": row.name, "seen": row.after_at, "next": following, "generation": row.generation}
        return self._do("place_schedule", place) > 0

    def fire_schedule(self, row: ScheduleRow, following: datetime, times: Sequence[datetime] | None) -> Fired:
        """Emit ``times`` of a schedule, None for ``next_at``, and move it to ``following``.

        If the events are many, only the first of them are emitted, and the next time is the first one that is left.
        """
        place = {"name": row.name, "seen": row.next_at, "next": following, "generation": row.generation}
        return self.named("fire_schedule", {**place, "times": None if times is None else list(times)}, row=Fired)[0]

    def fail_schedule(self, row: ScheduleRow, reason: str) -> bool:
        """Record why this relay did not fire a schedule. Return False if it has fired, or the reason is recorded."""
        place = {"name": row.name, "generation": row.generation, "after": row.after_at, "next": row.next_at}
        return self._do("fail_schedule", {**place, "reason": reason}) > 0

    def enter_scheduled(self, most: int, after: ScheduledPlace | None) -> Entries:
        """Let up to ``most`` scheduled events that are due enter the log, of those behind ``after`` if it is given."""
        parameters = {"most": most, "after_time": after and after.time, "after_id": after and after.id}
        [row] = self.named("enter_scheduled", parameters)
        last = None if row.last_time is None else ScheduledPlace(row.last_time, row.last_id)
        return Entries(row.entered, last, row.due_in)
