"""Schedules of the suite: their times are moved into the past, and each time must be emitted once for each move.

A move and its record are one transaction of the database, so crashes, promotions and restores keep both or neither.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import psycopg

from tests.chaos.days import KEPT
from tests.chaos.writer import AGAIN_SECONDS

YEARLY = tuple(f"yearly_{number}" for number in range(4))
"""Schedules whose times are moved. Their own next time is in the next year."""
MINUTELY = "minutely"
"""A schedule that is left alone."""
ROUTE = '"tick.*" = ["calls"]\n'
CONFIG = "".join(
    f'[schedules.{name}]\ncron = "{cron}"\ntype = "tick.{name}"\nmissed = "all"\n'
    for name, cron in (*((name, "0 0 1 1 *") for name in YEARLY), (MINUTELY, "* * * * *"))
)
PAUSE_SECONDS = 0.4
MOST_YEARS = 5
TABLE = "chaos_moved"
PREPARE = f"create table public.{TABLE} (name text not null, was timestamptz not null, put timestamptz not null)"
MOVE = f"""with found as (
    select name, next_at as was, next_at - make_interval(years => %(years)s) as put from outbox.schedule
     where name = %(name)s and next_at > clock_timestamp() for update
), moved as (
    update outbox.schedule s set next_at = f.put, after_at = f.put - interval '1 s' from found f where s.name = f.name
    returning s.name
)
insert into public.{TABLE} select f.name, f.was, f.put from found f join moved using (name)""".encode()
PLACE = "extract(year from {0} at time zone 'UTC')::int"
MINUTE = "(extract(epoch from {0}) / 60)::int"
FIRED = f"""select substr(type, 6) as name, (headers ->> 'outbox-scheduled-for')::timestamptz as at,
       uuid_send(uid) as uid
  from (select type, headers, uid from outbox.event union all select type, headers, uid from public.{KEPT}) e
 where type like 'tick.%'"""
UIDS = f"select uid from ({FIRED}) f".encode()


@dataclass
class Schedule:
    """One schedule as the database has it. Times are consecutive numbers: years, or minutes since 1970."""

    name: str
    following: int
    """The next time, not emitted yet."""
    moves: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """The times at which it stood and to which it was moved."""
    fired: Counter[int] = field(default_factory=Counter[int])
    """Time → events."""


def prepare(dsn: str) -> None:
    """Create the table of moves."""
    with psycopg.connect(dsn) as connection:
        connection.execute(PREPARE.encode())


class Moves:
    """A thread that moves the next time of a yearly schedule into the past, again and again."""

    def __init__(self, dsn: str, seed: str) -> None:
        self._dsn = dsn
        self._rng = random.Random(f"{seed}/ticks")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop after the current move. Raise AssertionError if it does not end."""
        self._stopping.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the thread that moves schedules did not end"

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with psycopg.connect(self._dsn, connect_timeout=5, autocommit=True) as connection:
                    while not self._stopping.wait(PAUSE_SECONDS):
                        wanted = {"name": self._rng.choice(YEARLY), "years": self._rng.randint(1, MOST_YEARS)}
                        connection.execute(MOVE, wanted)
            except psycopg.Error:
                self._stopping.wait(AGAIN_SECONDS)  # the server is restarting


def at_rest(dsn: str) -> bool:
    """Return True if no schedule is overdue by more than the time that a relay takes to fire it."""
    text = "select count(*) from outbox.schedule where next_at is null or next_at < clock_timestamp() - interval '5 s'"
    with psycopg.connect(dsn, connect_timeout=5) as connection:
        return connection.execute(text.encode()).fetchall() == [(0,)]


def uids(connection: psycopg.Connection[tuple[object, ...]]) -> frozenset[bytes]:
    """Return the uids of the events of schedules in the log of this server."""
    return frozenset(bytes(uid) for (uid,) in connection.execute(UIDS, binary=True) if isinstance(uid, bytes))


def read(dsn: str) -> tuple[list[Schedule], set[bytes]]:
    """Return the schedules with their moves and emitted times, and the uids of their events."""
    found: dict[str, Schedule] = {}
    came: set[bytes] = set()
    with psycopg.connect(dsn) as connection, connection.transaction():
        connection.execute("set transaction isolation level repeatable read")
        for unit, names in ((PLACE, YEARLY), (MINUTE, (MINUTELY,))):
            wanted = (list(names),)
            text = f"select name, {unit.format('next_at')} from outbox.schedule where name = any(%s)"
            for name, following in connection.execute(text.encode(), wanted):
                found[name] = Schedule(name, following)
            moves = f"select name, {unit.format('was')}, {unit.format('put')} from public.{TABLE} where name = any(%s)"
            for name, was, put in connection.execute(moves.encode(), wanted):
                found[name].moves.append((was, put))
            fired = FIRED.replace("%", "%%")
            text = f"select f.name, {unit.format('f.at')}, f.uid from ({fired}) f where f.name = any(%s)"
            for name, at, uid in connection.execute(text.encode(), wanted, binary=True):
                found[name].fired[at] += 1
                came.add(uid)
    return list(found.values()), came


def violations(
    schedules: Sequence[Schedule], emitted: Collection[bytes], arrived: Collection[bytes], lost: Collection[bytes]
) -> Iterator[str]:
    """Yield a line for each schedule with a missed or repeated time, and for events that are lost or phantom.

    `emitted` are the events of the surviving log, `lost` those that restores took back, and `arrived` those that the
    handler received.
    """
    for schedule in schedules:
        yield from _times(schedule)
    if missing := set(emitted) - set(arrived):
        yield f"{len(missing)} events of schedules never arrived, such as {next(iter(missing)).hex()}"
    if strangers := set(arrived) - set(emitted) - set(lost):
        yield f"{len(strangers)} events of schedules arrived that no log has, such as {next(iter(strangers)).hex()}"


def _times(schedule: Schedule) -> Iterator[str]:
    expected = Counter(due(schedule.following, schedule.moves, min(schedule.fired, default=schedule.following)))
    missed, repeated = expected - schedule.fired, schedule.fired - expected
    if missed:
        yield f"schedule {schedule.name}: {missed.total()} times were missed: {_some(missed)}"
    if repeated:
        yield f"schedule {schedule.name}: {repeated.total()} times were emitted too often: {_some(repeated)}"


def due(following: int, moves: Sequence[tuple[int, int]], first: int) -> Iterator[int]:
    """Yield the times that are due: those of each move, and of its own course since the first one.

    A schedule that was moved is on its own course from the latest time at which a move found it first.
    """
    for was, put in moves:
        yield from range(put, was)
    begun = min((was for was, _ in moves), default=first)
    yield from range(begun, following)


def _some(times: Mapping[int, int]) -> str:
    return ", ".join(f"{time} x {count}" for time, count in sorted(times.items())[:5])
