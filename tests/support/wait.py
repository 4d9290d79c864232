"""Waiting for facts: a test names what must become true and by when, and never sleeps for a guessed time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

BECOMES_SECONDS = 40.0
"""Time limit of ``becomes``."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.01, 0.05
PAUSE_SHARE = 0.05
"""Length of a pause, as a share of the time waited so far: most facts cost a connection, which a long wait would make a
hundred times a second while other processes need the processor."""


class NotInTime(AssertionError):
    """A fact that had not become true by its deadline."""


def until(fact: Callable[[], T], *, seconds: float, what: str) -> T:
    """Ask `fact` again and again until it answers something true; return that answer.

    An exception of `fact` goes through at once. Raises :class:`NotInTime`, naming `what` and the last answer, after
    `seconds`.
    """
    began = time.monotonic()
    while not (answer := fact()):
        if (waited := time.monotonic() - began) >= seconds:
            raise NotInTime(_message(what, seconds, answer))
        time.sleep(_pause(waited))
    return answer


async def auntil(fact: Callable[[], Awaitable[T]], *, seconds: float, what: str) -> T:
    """Do what :func:`until` does for a coroutine function, without blocking the event loop."""
    began = time.monotonic()
    while not (answer := await fact()):
        if (waited := time.monotonic() - began) >= seconds:
            raise NotInTime(_message(what, seconds, answer))
        await asyncio.sleep(_pause(waited))
    return answer


def becomes(fact: Callable[[], object], what: str) -> None:
    """Wait until ``fact`` returns a true value."""
    until(fact, seconds=BECOMES_SECONDS, what=what)


def _pause(waited: float) -> float:
    return min(MAX_PAUSE_SECONDS, max(MIN_PAUSE_SECONDS, PAUSE_SHARE * waited))


def _message(what: str, seconds: float, answer: object) -> str:
    return f"{what}: not within {seconds:g} s; the last answer was {answer!r}"
