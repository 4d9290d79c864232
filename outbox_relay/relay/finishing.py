"""The end of the claims of a session that another one follows."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class Finishing:
    """The order to one session to finish, which ends waits that hold no row at once. One task waits."""

    def __init__(self) -> None:
        self.begun = False
        """True if no row may be claimed any more."""
        self._wait: asyncio.Timeout | None = None
        self._claims_ended = asyncio.Event()

    async def unless_begun(self, wait: Awaitable[T]) -> T | None:
        """Return what ``wait`` returns; None if the session finishes before."""
        try:
            async with asyncio.timeout(0.0 if self.begun else None) as self._wait:
                return await wait
        except TimeoutError:
            return None
        finally:
            self._wait = None

    async def begin(self) -> None:
        """Let the session finish, and wait for the end of its claims."""
        self.begun = True
        if self._wait is not None:
            self._wait.reschedule(asyncio.get_running_loop().time())
        await self._claims_ended.wait()

    def claims_ended(self) -> None:
        """Record that no claim is under way, and that none follows."""
        self._claims_ended.set()
