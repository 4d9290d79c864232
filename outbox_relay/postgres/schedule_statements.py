"""Statements on schedules: registration, and the times that are due."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from outbox_relay.postgres.database import Database

DUE_MAX = 1000
"""Most schedules that are read at once, the next ones first."""


class ScheduleRow(NamedTuple):
    """A schedule that is not paused, and ``now``, the time of the database at which it fires in ``seconds``.

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


class ScheduleStatements(Database):
    """Schedules. Only the clock of the database says whether a time has come."""

    async def register_schedules(self, wanted: Iterable[Mapping[str, Any]]) -> dict[str, int]:
        """Register the schedules of a file, or change them; return their generations."""
        return dict(await self._rows("register_schedules", {"wanted": json.dumps(list(wanted))}))

    async def due_schedules(self) -> list[ScheduleRow]:
        """Return the schedules in the order in which they fire, first those without a next time."""
        return [ScheduleRow(*row) for row in await self._rows("due_schedules", {"most": DUE_MAX})]

    async def place_schedule(self, row: ScheduleRow, following: datetime) -> bool:
        """Write the first time of a schedule after ``after_at``. Return False if it was changed meanwhile."""
        place = {"name": row.name, "seen": row.after_at, "next": following, "generation": row.generation}
        [(placed,)] = await self._rows("place_schedule", place)
        return placed

    async def fire_schedule(self, row: ScheduleRow, following: datetime, times: Sequence[datetime] | None) -> str:
        """Emit ``times`` of a schedule, None for ``next_at``, and move it to ``following``.

        Return the outcome, as ``outbox.fire_schedule`` names it.
        """
        place = {"name": row.name, "seen": row.next_at, "next": following, "generation": row.generation}
        [(outcome,)] = await self._rows("fire_schedule", {**place, "times": None if times is None else list(times)})
        return outcome
