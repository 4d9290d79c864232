"""Large writes, repeated in smaller portions when the database fails with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from outbox_relay.domain.errors import StatementFailed

MOST_TRIES = 6
"""Number of tries before a statement ends its session. They take at least two seconds."""
FIRST_PAUSE_SECONDS = 0.05
"""Pause after the first failed try, doubled after each further one."""
SHRINK = 8
"""Factor by which the next portion is smaller."""
NOT_FOR_ITS_SIZE = ("40", "55P03", StatementFailed.NO_CONNECTION)
"""SQLSTATEs of failures that a smaller statement would meet as well: deadlocks, serialisation, locks, no connection."""


def is_for_its_size(error: StatementFailed) -> bool:
    """Return whether a smaller statement may succeed where this one failed."""
    return not (error.sqlstate or "").startswith(NOT_FOR_ITS_SIZE)


async def pause(failed: int) -> None:
    """Wait before a statement is repeated that failed ``failed`` times in a row."""
    await asyncio.sleep(FIRST_PAUSE_SECONDS * 2.0**failed)


async def write_in_portions(most: int, write: Callable[[int], Awaitable[bool]]) -> None:
    """Call ``write`` with the size of a portion until it returns False.

    It does so once everything is written.

    A portion that failed has no effect. It is repeated after a pause, and is smaller if its size may be the reason.

    Raises ``StatementFailed`` after ``MOST_TRIES`` failures in a row. If size may be the reason, a single row must have
    failed.
    """
    failed, left = 0, True
    while left:
        try:
            left = await write(most)
        except StatementFailed as error:
            failed += 1
            shrinks = is_for_its_size(error) and most > 1
            if failed >= MOST_TRIES and not shrinks:
                raise
            if shrinks:
                most = max(1, most // SHRINK)
            await pause(failed)
        else:
            failed = 0
