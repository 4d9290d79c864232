"""Records of attempts, which are dropped rather than allowed to hold up the settlements that carry them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import DatabaseUnusable, StatementFailed
from outbox_relay.relay.portions import MOST_TRIES, NOT_FOR_ITS_SIZE

T = TypeVar("T")

SUSPEND_SECONDS = 5.0
"""Time for which no attempt is recorded after records were dropped, so that few settlements are written twice."""
MOST_CAUSES = 10
"""Maximum number of causes that are logged before attempts are recorded again."""
PASSING = (*NOT_FOR_ITS_SIZE, "57014")
"""SQLSTATEs of failures that may pass without a fix. Records are dropped only before they would end the session."""


class AttemptRecorder:
    """The records of one sink, which the settlements of its events and rows carry, under the name of ``relay``."""

    def __init__(self, relay: str, log: BoundLogger) -> None:
        self.dropped = 0
        """The number of records that were dropped since the start of the relay."""
        self._log = log
        self._relay = relay
        self._failures = 0
        self._suspended_until = float("-inf")
        self._causes = set[str]()
        self._dropped_before = 0

    async def settle(self, records: int, write: Callable[[str | None], Awaitable[T]]) -> T:
        """Call ``write`` with the name under which the attempts are recorded.

        If it fails with the records, call it again with None, which records none.

        Raises as ``write``.
        """
        if not records:
            return await write(None)
        if time.monotonic() < self._suspended_until:
            return await self._write_without(records, write)
        try:
            written = await write(self._relay)
        except (StatementFailed, DatabaseUnusable) as error:
            self._failures += 1
            if self._may_pass(error):
                raise
            written = await self._write_without(records, write)
            self._suspend(error, records)
            return written
        self._failures = 0
        self._resume()
        return written

    def _may_pass(self, error: StatementFailed | DatabaseUnusable) -> bool:
        passing = isinstance(error, StatementFailed) and (error.sqlstate or "").startswith(PASSING)
        return passing and self._failures < MOST_TRIES - 1

    async def _write_without(self, records: int, write: Callable[[str | None], Awaitable[T]]) -> T:
        written = await write(None)
        self.dropped += records
        return written

    def _suspend(self, error: StatementFailed | DatabaseUnusable, records: int) -> None:
        """Drop records for a while. Each cause is logged once until attempts are recorded again."""
        self._suspended_until = time.monotonic() + SUSPEND_SECONDS
        if not self._causes:
            self._dropped_before = self.dropped - records
        cause = (error.sqlstate if isinstance(error, StatementFailed) else None) or str(error)
        if cause not in self._causes and len(self._causes) < MOST_CAUSES:
            self._causes.add(cause)
            dropped = self.dropped - self._dropped_before
            self._log.warning("attempts.dropped", reason=str(error), dropped=dropped)

    def _resume(self) -> None:
        if self._causes:
            self._log.info("attempts.recorded", dropped=self.dropped - self._dropped_before)
            self._causes.clear()
