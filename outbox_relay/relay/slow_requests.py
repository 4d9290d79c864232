"""Slow requests, on their way from the dispatcher to the parked deliveries.

A request is slow if it outlasts ``park_after_seconds``.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from outbox_relay.domain.errors import SessionReset
from outbox_relay.postgres.rows import ClaimedRow
from outbox_relay.relay.breaker import Permit
from outbox_relay.relay.context import CallResult


class SlowRequest(NamedTuple):
    """A request in flight and the leased row that its event became.

    ``permit`` admitted the request, and ``settlement`` is the number of the settlement that writes the row.
    """

    row: ClaimedRow
    permit: Permit
    settlement: int
    request: asyncio.Future[CallResult]


class SlowRequests:
    """The slow requests of one session that have no outcome yet.

    Every request keeps its slot of the limiter, so at most ``maximum`` of them wait in the queue. The session that ends
    closes the queue: requests without an outcome are cancelled, and the rows are claimed again later.
    """

    def __init__(self, sink: str, maximum: int) -> None:
        self._sink = sink
        self._queue = asyncio.Queue[SlowRequest](maximum)
        self._undecided: set[asyncio.Future[CallResult]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._undecided)

    def adopt_slow_request(self, slow: SlowRequest) -> None:
        """Hand over a request that is settled by its row from now on.

        Raises ``SessionReset``, and cancels the request, if the session is ending or the queue is full.
        """
        if self._closed or self._queue.full():
            _abandon(slow.request)
            reason = "the session is ending" if self._closed else "more slow requests than slots"
            raise SessionReset(f"sink {self._sink}: {reason}")
        self._queue.put_nowait(slow)
        self._undecided.add(slow.request)

    async def take(self) -> SlowRequest:
        """Wait for the next request."""
        return await self._queue.get()

    def decided(self, slow: SlowRequest) -> None:
        """Record that the outcome of the request is known."""
        self._undecided.discard(slow.request)

    def close(self) -> None:
        """Cancel every request without an outcome, and refuse later ones."""
        self._closed = True
        for request in self._undecided:
            _abandon(request)
        self._undecided.clear()


def _abandon(request: asyncio.Future[CallResult]) -> None:
    """Cancel a request whose verdict is not awaited, and retrieve its error, which would be logged otherwise."""
    request.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    request.cancel()
