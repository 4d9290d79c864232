"""The ticks of one relay, shared by its sinks: taken while somebody wants one, at a pace that follows the flow.

While events flow the log is looked at every millisecond or so. When nothing new has come for a moment, the
relay lies down (see ``wakeup``), looks once more and sleeps until an emit wakes it or 250 ms have passed.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import DatabaseUnavailable, IncarnationChanged, RelayError, StatementFailed
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.domain.window import Tick, nothing_new
from outbox_relay.postgres.listener import CommitListener
from outbox_relay.postgres.rows import TickResult
from outbox_relay.postgres.store import Store

PACE_SECONDS = 0.001
"""Between two looks while events flow."""
AWAKE_SECONDS = 0.02
"""How long nothing new must come before the relay lies down."""
SLEEP_SECONDS = 0.25
"""Longest sleep: a wake-up that was missed costs no more than this."""
POLL_FIRST_SECONDS = 0.005
"""First sleep where no wake-up can come; then doubling up to ``SLEEP_SECONDS``."""
AGAIN_SECONDS = 0.1
"""Pause after a tick whose statement failed."""


class Ticking:
    """The newest tick, and who waits for a newer one.

    ``era`` counts how often what was read may have become wrong: another incarnation of the server, a number
    that went back, a lost connection, a tick so slow that a pooling proxy may have hidden any of these. Who
    holds anything read in an earlier era drops it.
    """

    def __init__(self, store: Store, wakeup: CommitListener, lease_seconds: float, log: BoundLogger) -> None:
        self._store = store
        self._wakeup = wakeup
        self._slow_seconds = lease_seconds / 3
        self._log = RateLimitedLog(log)
        self._waiting: set[asyncio.Event] = set()
        self._wanted = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._look: TickResult | None = None
        self._losses = 0
        self._empty_since = time.monotonic()
        self._poll_seconds = POLL_FIRST_SECONDS
        self._clock = datetime.min.replace(tzinfo=UTC)
        self.taken = 0
        """Ticks taken so far."""
        self.era = 0
        self.seen_at = time.monotonic()
        """``time.monotonic()`` of the last tick."""

    @property
    def latest(self) -> Tick | None:
        """The newest tick of this era."""
        return self._look.tick if self._look else None

    @property
    def generations(self) -> int:
        """The sum of the generations of all sinks, as the newest tick saw it."""
        return self._look.config_versions if self._look else 0

    def now(self) -> datetime:
        """The database's time, as far as is known: that of the last tick and what has passed since here."""
        return self._clock + timedelta(seconds=time.monotonic() - self.seen_at)

    def since(self, era: int) -> Tick | None:
        """The newest tick. Raises ``IncarnationChanged`` if it is not of ``era``, or a connection was lost since."""
        if self._look is not None and self._store.connection_losses != self._losses:
            self._new_era("a connection was lost", None)
        if era != self.era:
            raise IncarnationChanged("the server may not be the one that was read from")
        return self.latest

    def want(self, event: asyncio.Event) -> None:
        """Set ``event`` once there is a tick that may show more than the latest one."""
        self._waiting.add(event)
        self._wanted.set()

    async def run(self) -> None:
        """Tick while wanted, until cancelled. Raises ``DatabaseUnavailable``.

        A tick whose statement fails is taken again.
        """
        try:
            while True:
                await self._wanted.wait()
                try:
                    await self._tick()
                    if self._waiting:
                        await self._rest()
                except StatementFailed as error:
                    self._log.warning("a tick failed", reason=str(error))
                    await asyncio.sleep(AGAIN_SECONDS)
        finally:
            await self._wakeup.close()

    async def refresh(self) -> TickResult:
        """Look now. The tick returned is the newest one of the era, and from the server that it names."""
        await self._tick()
        if self._look is None:
            raise DatabaseUnavailable("no tick could be taken")
        return self._look

    async def _tick(self) -> None:
        """Look once. One look at a time: their answers are compared in the order in which they were asked for."""
        async with self._one_at_a_time:
            await self._compare()

    async def _compare(self) -> None:
        before = self._look
        asked = time.monotonic()
        try:
            look = await self._ask(marked=before is not None)
            if before is not None and look.incarnation != before.incarnation:
                look = await self._ask(marked=False)
        except RelayError as error:
            if not isinstance(error, StatementFailed) or time.monotonic() - asked > self._slow_seconds:
                self._new_era(str(error), None)
            raise
        self.seen_at, self._clock = time.monotonic(), look.now
        reason = self._doubt(before, look, self.seen_at - asked)
        if reason:
            self._new_era(reason, look)
        elif (
            before is None or look.config_versions != before.config_versions or not nothing_new(before.tick, look.tick)
        ):
            self._publish(look)

    async def _ask(self, *, marked: bool) -> TickResult:
        """Take a tick, from a server that is marked: a mark that came later would be another incarnation."""
        if not marked:
            await self._store.arm()
        look = await self._store.tick()
        self.taken += 1
        return look

    def _doubt(self, before: TickResult | None, look: TickResult, took: float) -> str | None:
        if before is None:
            self._losses = self._store.connection_losses
            return None
        if self._store.connection_losses != self._losses:
            return "a connection was lost"
        if took > self._slow_seconds:
            return f"a tick took {took:.1f} s"
        if look.incarnation != before.incarnation:
            return "the server is another incarnation"
        if look.tick.seq < before.tick.seq or look.tick.next_xid < before.tick.next_xid or look.wal < before.wal:
            return "the server's numbers went back"
        return None

    def _new_era(self, reason: str, look: TickResult | None) -> None:
        self.era += 1
        self._losses = self._store.connection_losses
        self._log.warning("starting again from the ledger", reason=reason)
        self._publish(look)

    def _publish(self, look: TickResult | None) -> None:
        self._look = look
        self._empty_since = time.monotonic()
        self._poll_seconds = POLL_FIRST_SECONDS
        for event in self._waiting:
            event.set()
        self._waiting.clear()
        self._wanted.clear()

    async def _rest(self) -> None:
        """Wait before the next look, while nothing new comes."""
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
