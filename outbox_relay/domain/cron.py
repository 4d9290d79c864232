"""Times of cron expressions in time zones. Pure: the caller passes the time; only the time zone database is read.

Times go forward only, by the library ``cronsim``, which treats changes of the clock as Debian's cron does. An
expression with a fixed hour and minute comes once a day: a time that is skipped in spring comes when the clock was set
forward, and one that is repeated in autumn comes the first time. An expression whose minute or hour begins with ``*``
comes at each time that matches, as the clock on the wall shows it: none of the skipped hour, and both of the repeated
hour.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from itertools import islice, takewhile
from typing import NamedTuple
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

CRON_CHARS = 255
"""Longest cron expression, in characters."""
ZONE_CHARS = 64
"""Longest name of a time zone, in characters."""
FIELDS = 5
LATE = timedelta(minutes=1)
"""A time that is late by more than this was missed."""
TIMES_MAX = 1000
"""Maximum number of missed times that one transaction emits."""
_OF_THE_MACHINE = re.compile(r"localtime|posixrules|Factory|(posix|right)/.*")
"""Names that are not the same everywhere, or whose times count leap seconds."""
_ANY = datetime(2024, 1, 1, tzinfo=UTC)


class Firing(NamedTuple):
    """The times of a schedule to emit now, and its next time after them. None: only the time that is due."""

    times: list[datetime] | None
    next: datetime


def cron_fault(cron: str) -> str | None:
    """Return why ``cron`` is not a usable expression, or None."""
    if len(cron) > CRON_CHARS:
        return f"is longer than {CRON_CHARS} characters"
    if len(cron.split()) != FIELDS:
        return 'should have five fields, "MINUTE HOUR DAY MONTH WEEKDAY", such as "30 3 * * *"'
    try:
        found = next(CronSim(cron, _ANY), None)
    except (CronSimError, ValueError, AssertionError, RecursionError) as error:
        field = str(error).removeprefix("Bad ") if isinstance(error, CronSimError) else "expression"
        return f"the {field} is not valid, or never comes"
    return "never comes" if found is None else None


def zone_fault(name: str) -> str | None:
    """Return why ``name`` is not the name of a time zone, or None. May read files of the time zone database."""
    if not name or len(name) > ZONE_CHARS or not name.isprintable():
        return f'should be the name of a time zone, such as "Europe/Berlin", of at most {ZONE_CHARS} characters'
    if _OF_THE_MACHINE.fullmatch(name):
        return 'is not the same on every machine: name a place, such as "Europe/Berlin", or UTC'
    if _zone(name) is not None:
        return None
    known = [zone for zone in available_timezones() if not _OF_THE_MACHINE.fullmatch(zone)]
    near = get_close_matches(name.title().replace(" ", "_"), known, 1)
    return f"there is no such time zone; {f'did you mean {near[0]}?' if near else 'for example: UTC, Europe/Berlin'}"


def next_time(cron: str, timezone: str, after: datetime) -> datetime | None:
    """Return the first time after ``after``, in UTC, or None if there is none in 50 years.

    Raises ValueError if the expression or the time zone cannot be used here.
    """
    return next(_times(cron, timezone, after), None)


def firing(cron: str, timezone: str, missed: str, due: datetime, now: datetime) -> Firing | None:
    """Return the times to emit of a schedule whose time ``due`` has come, or None if it has no later time.

    ``missed`` says what becomes of times that were missed: one event for the newest of them, none, or all.

    Raises as ``next_time``.
    """
    if missed == "all":
        times = [due, *takewhile(lambda time: time <= now, islice(_times(cron, timezone, due), TIMES_MAX - 1))]
        following = next_time(cron, timezone, times[-1])
        return None if following is None else Firing(times, following)
    horizon = now - LATE
    if due >= horizon:
        following = next_time(cron, timezone, due)
        return None if following is None else Firing(None, following)
    following = next_time(cron, timezone, horizon - timedelta(microseconds=1))
    if following is None:
        return None
    newest = max(due, next(_times(cron, timezone, horizon, back=True), due))
    return Firing([newest] if missed == "one" else [], following)


def _times(cron: str, timezone: str, after: datetime, *, back: bool = False) -> Iterator[datetime]:
    """Yield the times after ``after``, in UTC and in order; with ``back`` those before it, the last one first.

    cronsim compares wall clocks: in the hour that is repeated in autumn it may yield a time that has passed.
    """
    if (zone := _zone(timezone)) is None:
        raise ValueError(f"there is no time zone {timezone!r} on this machine")
    last = after
    with suppress(OverflowError):
        for time in _simulated(cron, after.astimezone(zone), back=back):
            current = time.astimezone(UTC)
            if current != last and (current < last) == back:
                last = current
                yield current


def _simulated(cron: str, after: datetime, *, back: bool) -> CronSim:
    try:
        return CronSim(cron, after, reverse=back)
    except (CronSimError, AssertionError, RecursionError) as error:
        raise ValueError(f"the cron expression cannot be used: {error}") from None


def _zone(name: str) -> ZoneInfo | None:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # OSError: the name of a folder
        return None
