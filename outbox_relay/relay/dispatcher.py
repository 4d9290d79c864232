"""The interface of the dispatchers, which deliver straight from the log."""

from __future__ import annotations

import asyncio
from typing import Protocol

from outbox_relay.domain.in_flight import Chunk
from outbox_relay.relay.context import DeliveryContext
from outbox_relay.relay.dispatch_batches import BatchDispatcher
from outbox_relay.relay.dispatch_requests import RequestDispatcher
from outbox_relay.relay.slow_requests import SlowRequests


class Dispatcher(Protocol):
    """Delivers chunks in order, and parks the events that need individual care."""

    @property
    def under_way(self) -> int:
        """The number of calls that the sink has not answered."""
        ...

    @property
    def saturated(self) -> bool:
        """True while enough events wait for the sink.

        Events that are emitted meanwhile are better read together, later.
        """
        ...

    def put(self, chunk: Chunk) -> None:
        """Deliver ``chunk`` after all chunks that were put before it."""
        ...

    async def run(self) -> None:
        """Deliver chunks until cancelled."""
        ...


def dispatcher_for(context: DeliveryContext, want_more: asyncio.Event, slow_requests: SlowRequests) -> Dispatcher:
    """Return the dispatcher that fits the sink.

    It sets ``want_more`` when it stops being saturated.
    """
    if context.sink.keeps_order:
        return BatchDispatcher(context, want_more)
    return RequestDispatcher(context, want_more, slow_requests)
