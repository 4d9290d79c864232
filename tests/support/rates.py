"""Counts of what relays send in a time of the database's clock."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.database import Database, query
from tests.support.wait import until

RATE = 60.0
SECONDS = 2.0
"""Time over which requests are counted. A sink without the limit would send ten times as many."""
BURST = 1 + RATE / 2
TRIES = 3
"""Number of counts of which one must find enough requests."""


def clock(database: Database) -> float:
    """Return the database's time in seconds."""
    [(seconds,)] = query(database, "select extract(epoch from clock_timestamp())::double precision")
    return seconds


def passes(database: Database, seconds: float) -> None:
    """Wait until the database's clock has gone on."""
    end = clock(database) + seconds

    def fact() -> bool:
        return clock(database) >= end

    until(fact, seconds=seconds + 60, what=f"{seconds} s pass")


def flow(sent: Callable[[], int], most: float = BURST) -> None:
    """Wait until more than ``most`` requests were sent, by default those of a burst."""

    def fact() -> bool:
        return sent() > most

    until(fact, seconds=60, what=f"more than {most} requests are sent")


def counted(database: Database, sent: Callable[[], int], seconds: float = SECONDS) -> tuple[int, float]:
    """Return how many requests were sent in some seconds, and the seconds.

    The clock is read outside of the counts, so that no request is counted in too short a time.
    """
    began, before = clock(database), sent()
    passes(database, seconds)
    after = sent()
    return after - before, clock(database) - began


def holds(database: Database, sent: Callable[[], int], rate: float = RATE, least: float = 0.5) -> None:
    """Raise AssertionError unless the requests of some seconds are as many as the rate says.

    A busy machine may send fewer: the share that must come, ``least``, is low, and is counted again if it did not come.
    More are never sent than the tokens of that time, and those of half a second that were left before. A request may be
    counted a tenth of a second after its token.
    """
    found = list[tuple[int, float]]()
    while len(found) < TRIES:
        count, seconds = counted(database, sent)
        found.append((count, seconds))
        assert count <= rate * (seconds + 0.6) + 2, found
        if count >= rate * seconds * least:
            return
    raise AssertionError(f"fewer were sent than the rate says: {found}")
