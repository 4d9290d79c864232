"""The ticks of one relay, taken while one of its sinks wants one.

While events flow, a tick is taken about every millisecond. After a moment without new events the relay announces that
it will sleep, takes one more tick, and sleeps until an emit wakes it or 250 ms have passed.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import DatabaseUnavailable, IncarnationChanged, RelayError, StatementFailed
from outbox_relay.domain.measures import RelayMeasures
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.domain.window import Tick, nothing_new
from outbox_relay.postgres.listener import CommitListener
from outbox_relay.postgres.rows import TickResult
from outbox_relay.postgres.store import Store

PACE_SECONDS = 0.001
"""Pause between two ticks while events flow."""
AWAKE_SECONDS = 0.02
"""Time without new events after which the relay sleeps until a wake-up."""
SLEEP_SECONDS = 0.25
"""Maximum sleep, and so the cost of a wake-up that was missed."""
POLL_FIRST_SECONDS = 0.005
"""First sleep where no wake-up can come. It is doubled each time, up to ``SLEEP_SECONDS``."""
AGAIN_SECONDS = 0.1
"""Pause after a tick whose statement failed."""


class Ticker:
    """Takes ticks, and wakes the sinks that wait for one.

    ``session_epoch`` counts how often anything read before may have become wrong: the server is another incarnation,
    its numbers went back, a connection was lost, or a tick was so slow that a pooling proxy may have hidden any of
    these. A session drops what it read in an earlier epoch.
    """

    def __init__(
        self,
        store: Store,
        wakeup: CommitListener,
        lease_seconds: float,
        log: BoundLogger,
        measures: RelayMeasures | None = None,
    ) -> None:
        self._store = store
        self._wakeup = wakeup
        self._slow_seconds = lease_seconds / 3
        self._log = RateLimitedLog(log)
        self._waiting: set[asyncio.Event] = set()
        self._wanted = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._result: TickResult | None = None
        self._losses = 0
        self._empty_since = time.monotonic()
        self._poll_seconds = POLL_FIRST_SECONDS
        self._clock = datetime.min.replace(tzinfo=UTC)
        self._measures = measures or RelayMeasures()
        self.taken = 0
        """The number of ticks taken."""
        self.session_epoch = 0
        self.seen_at = time.monotonic()
        """The ``time.monotonic()`` value of the last tick."""

    @property
    def latest(self) -> Tick | None:
        """The newest tick of this session epoch; None before the first."""
        return self._result.tick if self._result else None

    @property
    def config_versions(self) -> int:
        """The sum of the generations of all sinks at the newest tick."""
        return self._result.config_versions if self._result else 0

    def now(self) -> datetime:
        """Return the time of the last tick, plus the time that has passed here since."""
        return self._clock + timedelta(seconds=time.monotonic() - self.seen_at)

    def since(self, session_epoch: int) -> Tick | None:
        """Return the newest tick.

        Raises ``IncarnationChanged`` if its epoch is not ``session_epoch``, or a connection was lost since.
        """
        if self._result is not None and self._store.connection_losses != self._losses:
            self._new_session_epoch("a connection was lost", None)
        if session_epoch != self.session_epoch:
            raise IncarnationChanged("the server may not be the one that was read from")
        return self.latest

    def want(self, event: asyncio.Event) -> None:
        """Set ``event`` once a tick may show more than the newest one."""
        self._waiting.add(event)
        self._wanted.set()

    async def run(self) -> None:
        """Take ticks while they are wanted, until cancelled.

        Raises ``DatabaseUnavailable``.

        A tick whose statement fails is repeated.
        """
        try:
            while True:
                await self._wanted.wait()
                try:
                    await self._tick()
                    if self._waiting:
                        await self._rest()
                except StatementFailed as error:
                    self._log.warning("database.tick_failed", reason=str(error))
                    await asyncio.sleep(AGAIN_SECONDS)
        finally:
            await self._wakeup.close()

    async def refresh(self) -> TickResult:
        """Take a tick now.

        Return the newest one of the epoch, which names the server that it came from.
        """
        await self._tick()
        if self._result is None:
            raise DatabaseUnavailable("no tick could be taken")
        return self._result

    async def _tick(self) -> None:
        """Take one tick at a time: answers are compared in the order of questions."""
        async with self._one_at_a_time:
            await self._compare()

    async def _compare(self) -> None:
        before = self._result
        asked = time.monotonic()
        try:
            result = await self._ask(marked=before is not None)
            if before is not None and result.incarnation != before.incarnation:
                result = await self._ask(marked=False)
        except RelayError as error:
            self._measures.tick.observe(time.monotonic() - asked)
            if not isinstance(error, StatementFailed) or time.monotonic() - asked > self._slow_seconds:
                self._new_session_epoch(str(error), None)
            raise
        self.seen_at, self._clock = time.monotonic(), result.now
        took = self.seen_at - asked
        self._measures.tick.observe(took)
        reason = self._doubt(before, result, took)
        if reason:
            self._new_session_epoch(reason, result)
        elif before is None or _shows_more(before, result):
            self._publish(result)

    async def _ask(self, *, marked: bool) -> TickResult:
        """Take a tick from a marked server.

        A mark that was made later would look like another incarnation.
        """
        if not marked:
            await self._store.arm()
        result = await self._store.tick()
        self.taken += 1
        return result

    def _doubt(self, before: TickResult | None, result: TickResult, took: float) -> str | None:
        """Return why anything read before may be wrong, or None."""
        if before is None:
            self._losses = self._store.connection_losses
            return None
        if self._store.connection_losses != self._losses:
            return "a connection was lost"
        if took > self._slow_seconds:
            return f"a tick took {took:.1f} s"
        if result.incarnation != before.incarnation:
            return "the server is another incarnation"
        if result.tick.seq < before.tick.seq or result.tick.next_xid < before.tick.next_xid or result.wal < before.wal:
            return "the server's numbers went back"
        return None

    def _new_session_epoch(self, reason: str, result: TickResult | None) -> None:
        self.session_epoch += 1
        self._losses = self._store.connection_losses
        self._log.warning("sessions.restarted", reason=reason)
        self._publish(result)

    def _publish(self, result: TickResult | None) -> None:
        self._result = result
        self._empty_since = time.monotonic()
        self._poll_seconds = POLL_FIRST_SECONDS
        for event in self._waiting:
            event.set()
        self._waiting.clear()
        self._wanted.clear()

    async def _rest(self) -> None:
        """Pause before the next tick, longer while no new events come."""
        if time.monotonic() - self._empty_since < AWAKE_SECONDS:
            await asyncio.sleep(PACE_SECONDS)
        elif await self._wakeup.begin_listening():
            await self._tick()
            while self._waiting:
                await self._wakeup.sleep(SLEEP_SECONDS)
                await self._tick()
            await self._wakeup.stop_listening()
        else:
            await asyncio.sleep(self._poll_seconds)
            self._poll_seconds = min(self._poll_seconds * 2, SLEEP_SECONDS)


def _shows_more(before: TickResult, result: TickResult) -> bool:
    return result.config_versions != before.config_versions or not nothing_new(before.tick, result.tick)
