"""The limits of one sink across all relays, of which each relay has the share of the shards that it owns.

Nothing is asked of the database. A shard has one owner, which drains before it gives the shard up, so the shares of all
relays together are never more than the limit. An owner may lose a shard while requests are in flight, if it crashes or
its lease ends: these are counted by no one.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.sink_limits import TokenBucket, in_flight_share
from outbox_relay.relay.sink_leases import SinkLeases
from outbox_relay.relay.turns import Source, Turns

DRAIN_SECONDS = 1.0
"""Time for the events in flight from which on shards are handed over with them."""
EVENTS_PER_REQUEST = 10
"""Events in flight for each request of this relay from which on shards are handed over with them."""
SOON_SECONDS = 0.5
"""Time for which rows are claimed at once."""
STARVED_SECONDS = 1.0
"""Time without a request after which shards are handed over with events in flight."""
LOOK_SECONDS = 0.02
"""Interval between two looks at the limits while requests wait for them."""
NO_LIMIT = 1 << 31


class Admission:
    """The admission of a request with at most ``events`` events.

    ``end`` is called when the request has ended or will not begin.
    """

    __slots__ = ("_limits", "events")

    def __init__(self, events: int, limits: SharedLimits | None = None) -> None:
        self.events = events
        self._limits = limits

    def end(self, _: Any = None) -> None:
        """Count the request no more, once."""
        limits, self._limits = self._limits, None
        if limits is not None:
            limits.ended()


UNLIMITED = Admission(NO_LIMIT)
"""The admission to a sink without limits."""


class SharedLimits:
    """The share of this relay in the limits of one sink, for its log, its parked deliveries and its replays."""

    def __init__(self, leases: SinkLeases) -> None:
        self._leases = leases
        self._bucket = TokenBucket(time.monotonic())
        self._turns = Turns()
        self._in_flight = 0
        self._served_at = self._over_since = float("inf")
        self._looks = False

    @property
    def active(self) -> bool:
        """True if the sink has a limit."""
        limits = self._leases.limits
        return limits.rate_per_second is not None or limits.max_in_flight_total is not None

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a limit. The next call of a sink that takes batches is one."""
        return len(self._turns)

    @property
    def rate(self) -> float | None:
        """The events per second of this relay, or None."""
        total = self._leases.limits.rate_per_second
        return None if total is None else total * self._leases.sharing / SHARDS

    @property
    def free(self) -> int:
        """The number of requests that may begin beside those in flight."""
        return max(0, self._most_in_flight(self._leases.sharing) - self._in_flight)

    def _most_in_flight(self, shards: int) -> int:
        total = self._leases.limits.max_in_flight_total
        return NO_LIMIT if total is None else in_flight_share(total, shards, self._leases.relays)

    # -- admissions -------------------------------------------------------------------------------------------

    async def admit(self, source: Source, most: int = 1) -> Admission:
        """Wait until a request may begin, with one event or more, up to ``most``."""
        if not self._turns:
            if room := self._room():
                return Admission(self._begin(min(most, room)), self)
            self._served_at = time.monotonic()
        turn = self._turns.add(source, most)
        self._look_soon()
        try:
            return Admission(await turn.granted, self)
        except asyncio.CancelledError:
            self._turns.remove(source, turn)
            if turn.granted.done() and not turn.granted.cancelled():
                self.withdraw(Admission(turn.granted.result(), self))
            raise

    def _room(self) -> int:
        """Return the number of events with which a request may begin now."""
        rate = self.rate
        tokens = NO_LIMIT if rate is None else self._bucket.fill(rate, time.monotonic())
        return tokens if self.free else 0

    def _begin(self, events: int) -> int:
        """Count a request with that many events; return their number."""
        self._in_flight += 1
        self._served_at, self._over_since = time.monotonic(), float("inf")
        if self.rate is not None:
            self._bucket.add(-events)
        return events

    def _serve(self) -> None:
        """Let requests begin, in turn."""
        while self._turns and (room := self._room()):
            turn = self._turns.next()
            if not turn.granted.done():
                turn.granted.set_result(self._begin(min(turn.most, room)))
        if self._turns:
            self._look_soon()

    def _look_soon(self) -> None:
        if not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._looks = False
        self._serve()

    def refund(self, admission: Admission, sent: int) -> None:
        """Give back what an admission has beyond the ``sent`` events of its request."""
        if admission is not UNLIMITED and self.rate is not None:
            self._bucket.add(admission.events - sent)

    def withdraw(self, admission: Admission) -> None:
        """Give back an admission whose request does not begin."""
        self.refund(admission, 0)
        admission.end()

    def ended(self) -> None:
        """Count a request in flight less."""
        self._in_flight -= 1
        self._serve()

    # -- what follows from them -------------------------------------------------------------------------------

    def soon(self, most: int) -> int:
        """Return how many rows, of at most ``most``, can be delivered soon after they are claimed."""
        rate = self.rate
        most = min(most, 1 + self.free)
        return max(1, most if rate is None else min(most, int(rate * SOON_SECONDS)))

    def stall(self, events: int) -> bool:
        """Return True if ``events`` in flight would take long, so that shards are handed over with them."""
        if not self.active:
            return False
        rate = self.rate
        if rate is not None and events > rate * DRAIN_SECONDS:
            return True
        if events > self._most_in_flight(self._leases.sharing) * EVENTS_PER_REQUEST:
            return True
        return bool(self._turns) and not self._in_flight and time.monotonic() - self._served_at > STARVED_SECONDS

    def may_release(self, patience: float) -> bool:
        """Return True if drained shards may be released, whose next owner has their share at once.

        The requests in flight must fit the shards that stay. After ``patience`` seconds only those are left that last
        longer than the time limit of the sink.
        """
        now = time.monotonic()
        self._over_since = min(self._over_since, now)
        if self._in_flight > self._most_in_flight(self._leases.staying) and now - self._over_since < patience:
            return False
        self._over_since = float("inf")
        return True
