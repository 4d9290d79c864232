"""The ticks of one relay, taken while one of its sinks wants one.

While events flow, a tick is taken every two milliseconds. After a moment without new events the relay announces that it
will sleep, takes one more tick, and sleeps until an emit wakes it or 250 ms have passed.

A tick of which a single session is waiting comes with the window that this session reads next, in one round trip.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from functools import partial

from structlog.stdlib import BoundLogger

from outbox_relay.domain.errors import (
    DatabaseUnavailable,
    DatabaseUnusable,
    IncarnationChanged,
    RelayError,
    StatementFailed,
)
from outbox_relay.domain.measures import RelayMeasures
from outbox_relay.domain.rate_limited_log import RateLimitedLog
from outbox_relay.domain.window import Tick, nothing_new
from outbox_relay.postgres.listener import CommitListener
from outbox_relay.postgres.rows import Look, TickResult, WindowRead, WindowRequest
from outbox_relay.postgres.store import Store
from outbox_relay.relay.look_limits import LookLimits

AWAKE_SECONDS = 0.02
"""Time without new events after which the relay sleeps until a wake-up."""
SLEEP_SECONDS = 0.25
"""Maximum sleep, and so the cost of a wake-up that was missed."""
POLL_FIRST_SECONDS = 0.005
"""First sleep where no wake-up can come. It is doubled each time, up to ``SLEEP_SECONDS``."""
AGAIN_SECONDS = 0.1
"""Pause after a tick whose statement failed."""
ALONE_SECONDS = 1.0
"""Time for which a session must have been the only one that wants ticks before they come with windows."""


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
        self._waiting: dict[asyncio.Event, WindowRequest | None] = {}
        self._wanted = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._result: TickResult | None = None
        self._window: WindowRead | None = None
        self._limits = LookLimits(self._slow_seconds)
        self._losses = 0
        self._awake_until = time.monotonic() + AWAKE_SECONDS
        self._last: asyncio.Event | None = None
        self._alone_since = float("-inf")
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

    def want(self, event: asyncio.Event, request: WindowRequest | None = None) -> None:
        """Set ``event`` once a tick may show more than the newest one.

        If no other session waits then, the tick may come with the window of ``request``: see ``window``.
        """
        if event is not self._last:
            self._alone_since = float("-inf") if self._last is None else time.monotonic()
            self._last = event
        self._waiting[event] = request
        self._wanted.set()

    def window(self, request: WindowRequest | None) -> WindowRead | None:
        """Return the window of ``request`` if it came with the newest tick, and forget it; otherwise None."""
        found = self._window
        if request is None or found is None or found.request is not request:
            return None
        self._window = None
        return found

    async def run(self) -> None:
        """Take ticks while they are wanted, until cancelled.

        Raises ``DatabaseUnavailable``.

        A tick whose statement fails is repeated.
        """
        try:
            while True:
                await self._wanted.wait()
                try:
                    await self._tick(self._awake_until - time.monotonic())
                    if not self._awake:
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

    async def _tick(self, patience: float = 0.0) -> None:
        """Take one tick at a time, or several until one shows more: answers are compared in the order of questions."""
        async with self._one_at_a_time:
            while not await self._compare(patience):
                pass

    async def _compare(self, patience: float) -> bool:
        """Take a tick. Return False if a new session epoch began meanwhile: the tick may be from before."""
        before, session_epoch = self._result, self.session_epoch
        asked = time.monotonic()
        try:
            look = await self._look(before, patience)
            if before is not None and look.result.incarnation != before.incarnation:
                look = await self._look(None, 0.0)
        except RelayError as error:
            took = time.monotonic() - asked
            self._measures.tick.observe(took)
            if not isinstance(error, StatementFailed) or took > self._slow_seconds:
                self._new_session_epoch(str(error), None)
            raise
        if session_epoch != self.session_epoch:
            return False
        self.seen_at, self._clock = look.at, look.result.now
        reason = self._reason_to_restart(before, look)
        if reason:
            self._new_session_epoch(reason, look.result)
        elif before is None or _shows_more(before, look.result):
            self._publish(look.result, look.window)
        return True

    async def _look(self, before: TickResult | None, patience: float) -> Look:
        """Look at a marked server. Without ``before`` it is marked first, since a later mark looks like a restart."""
        in_thread = self._may_look()
        if before is None:
            await self._store.arm(to_look=in_thread)
        look = await self._look_in_thread(before, patience) if in_thread else None
        look = look or await self._look_through_pool(patience)
        self.taken += len(look.seconds)
        for took in look.seconds:
            self._measures.tick.observe(took)
        return look

    def _may_look(self) -> bool:
        """Return True if a look can be taken in the thread. Without its connection, ticks come through the pool."""
        if self._store.prepare_look():
            return self._limits.allow_look
        if (trouble := self._store.look_trouble) is not None:
            self._log.warning("database.look_failed", reason=trouble)
        return False

    async def _look_in_thread(self, before: TickResult | None, patience: float) -> Look | None:
        """Return a look, or None if it failed: the reason may be an event of one sink, which is that sink's trouble."""
        asked, request = time.monotonic(), self._request()
        try:
            look = await self._store.look(request, patience, partial(_is_news, before, self._slow_seconds))
        except RelayError as error:
            self._limits.failed(request)
            if request is None:  # the connection may be the reason, as that to a server that became a standby
                self._store.give_up_looks()
            is_slow = time.monotonic() - asked > self._slow_seconds
            if is_slow or not isinstance(error, StatementFailed | DatabaseUnusable):
                raise
            self._log.warning("database.look_failed", reason=str(error))
            return None
        self._limits.answered(look)
        return look

    async def _look_through_pool(self, patience: float) -> Look:
        """Take a tick on a connection of the pool. Only a tick without ``patience`` comes at once."""
        if patience > 0:
            await self._limits.wait_for_pool()
        asked = time.monotonic()
        result = await self._store.tick()
        at = time.monotonic()
        return Look(result, None, at, (at - asked,))

    def _request(self) -> WindowRequest | None:
        """Return the request of the only session that waits, or None.

        The others would have to wait for its events.
        """
        if not self._limits.allow_window or time.monotonic() < self._alone_since + ALONE_SECONDS:
            return None
        return next(iter(self._waiting.values())) if len(self._waiting) == 1 else None

    def _reason_to_restart(self, before: TickResult | None, look: Look) -> str | None:
        """Return why anything read before may be wrong, or None."""
        if before is None:
            self._losses = self._store.connection_losses
            return None
        if self._store.connection_losses != self._losses:
            return "a connection was lost"
        return _doubt(before, look.result, look.seconds[-1], self._slow_seconds)

    def _new_session_epoch(self, reason: str, result: TickResult | None) -> None:
        self.session_epoch += 1
        self._losses = self._store.connection_losses
        self._log.warning("sessions.restarted", reason=reason)
        self._publish(result)

    def _publish(self, result: TickResult | None, window: WindowRead | None = None) -> None:
        """Wake the sessions. Only transactions without events let the relay go to sleep.

        Events of other sinks or of other relays' shards keep it awake: while it sleeps, each emit sends a notification.
        """
        no_ids = self._result is not None and result is not None and result.tick.seq == self._result.tick.seq
        self._result, self._window = result, window
        if window is None or not window.empty or not no_ids:
            self._awake_until = time.monotonic() + AWAKE_SECONDS
            self._poll_seconds = POLL_FIRST_SECONDS
        for event in self._waiting:
            event.set()
        self._waiting.clear()
        self._wanted.clear()

    @property
    def _awake(self) -> bool:
        return time.monotonic() < self._awake_until

    async def _rest(self) -> None:
        """Take ticks seldom, until one shows more."""
        if not await self._wakeup.begin_listening():
            await asyncio.sleep(self._poll_seconds)
            self._poll_seconds = min(self._poll_seconds * 2, SLEEP_SECONDS)
            return
        await self._tick()
        while not self._awake:
            await self._wakeup.sleep(SLEEP_SECONDS)
            if not self._wanted.is_set():  # with the lock kept, every emit would send a notification
                break
            await self._tick()
        await self._wakeup.stop_listening()


def _is_news(before: TickResult | None, slow_seconds: float, result: TickResult, took: float) -> bool:
    """Return True if a tick shows more than the published one, or casts doubt on it."""
    return before is None or _doubt(before, result, took, slow_seconds) is not None or _shows_more(before, result)


def _doubt(before: TickResult, result: TickResult, took: float, slow_seconds: float) -> str | None:
    """Return why a tick casts doubt on the one before, or None. It ``took`` this long, in seconds."""
    if took > slow_seconds:
        return f"a tick took {took:.1f} s"
    if result.incarnation != before.incarnation:
        return "the server is another incarnation"
    if result.tick.seq < before.tick.seq or result.tick.next_xid < before.tick.next_xid:
        return "the server's numbers went back"
    return None


def _shows_more(before: TickResult, result: TickResult) -> bool:
    return result.config_versions != before.config_versions or not nothing_new(before.tick, result.tick)
