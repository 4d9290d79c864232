"""The connections of one sink: at most so many in use, kept for a while between requests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from functools import partial

from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.sinks.webhook.dial import Dialler
from outbox_relay.sinks.webhook.trip import Trip, Withdrawn
from outbox_relay.sinks.webhook.wire import Wire

KEPT_SECONDS = 4.0
"""How long a connection is kept without a request: many servers close theirs after 5 s."""


class Pool:
    """At most ``limit`` connections in use, made by ``dialler``; who asks for one more waits. As many may be kept."""

    def __init__(self, dialler: Dialler, limit: int) -> None:
        self._dialler = dialler
        self._free = asyncio.Semaphore(limit)
        self._wires: set[Wire] = set()
        self._kept: deque[Wire] = deque()
        self._sweep: asyncio.TimerHandle | None = None

    async def acquire(self, trip: Trip) -> Wire:
        """A connection for ``trip``, to be given back with ``release``.

        Raises NotConnected, or Withdrawn when the trip was called back meanwhile.
        """
        await self._free.acquire()
        try:
            wire = await self._one(trip)
        except BaseException:
            self._free.release()
            raise
        trip.wire = wire
        return wire

    def release(self, wire: Wire) -> None:
        """Keep ``wire`` for the next request, or end it when it cannot carry another."""
        self._free.release()
        wire.put_down()
        if not wire.reusable:
            wire.abort()
            return
        self._kept.append(wire)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEPT_SECONDS, self._drop_old)

    def drop_kept(self) -> None:
        """End every connection that carries nothing."""
        while self._kept:
            self._kept.pop().abort()

    def drop(self) -> None:
        """End every connection, at once."""
        self._kept.clear()
        for wire in list(self._wires):
            wire.abort()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def _kept_one(self) -> Wire | None:
        """The connection used last: the others may grow old and be dropped."""
        while self._kept:
            wire = self._kept.pop()
            if wire.reusable and time.monotonic() - wire.kept_since < KEPT_SECONDS:
                return wire
            wire.abort()
        return None

    async def _one(self, trip: Trip) -> Wire:
        if trip.fresh:
            self.drop_kept()
        wire = self._kept_one()
        if wire is None:
            trip.dialled = True
            wire = await self._dialler.connect(partial(Wire, asyncio.get_running_loop(), self._wires), trip)
        trip.withdrawn = trip.withdrawn or lease_clock() >= trip.until
        if trip.withdrawn:
            wire.abort()
            raise Withdrawn("called back")
        return wire

    def _drop_old(self) -> None:
        self._sweep = None
        now = time.monotonic()
        while self._kept and (not self._kept[0].is_connected() or now - self._kept[0].kept_since >= KEPT_SECONDS):
            self._kept.popleft().abort()
        if self._kept:
            left = self._kept[0].kept_since + KEPT_SECONDS - now
            self._sweep = asyncio.get_running_loop().call_later(left, self._drop_old)
