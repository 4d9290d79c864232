"""Waiting for facts: a test names what must become true and by when, and never sleeps for a guessed time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

PAUSE_SECONDS = 0.01
BECOMES_SECONDS = 40.0
"""Time limit of ``becomes``."""


class NotInTime(AssertionError):
    """What a test waited for had not become true by its deadline."""


def until(fact: Callable[[], T], *, seconds: float, what: str) -> T:
    """Ask `fact` again and again until it answers something true; return that answer.

    An exception of `fact` goes through at once. Raises :class:`NotInTime`, naming `what` and the last answer, after
    `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not (answer := fact()):
        if time.monotonic() >= deadline:
            raise NotInTime(_message(what, seconds, answer))
        time.sleep(PAUSE_SECONDS)
    return answer


async def auntil(fact: Callable[[], Awaitable[T]], *, seconds: float, what: str) -> T:
    """Do what :func:`until` does for a coroutine function, without blocking the event loop."""
    deadline = time.monotonic() + seconds
    while not (answer := await fact()):
        if time.monotonic() >= deadline:
            raise NotInTime(_message(what, seconds, answer))
        await asyncio.sleep(PAUSE_SECONDS)
    return answer


async def becomes(fact: Callable[[], object], what: str) -> None:
    """Wait until ``fact``, which may block, returns a true value. It is called in a thread."""
    await auntil(lambda: asyncio.to_thread(fact), seconds=BECOMES_SECONDS, what=what)


def _message(what: str, seconds: float, answer: object) -> str:
    return f"{what}: not within {seconds:g} s; the last answer was {answer!r}"
