"""Delivery straight from the log: the interface of the two dispatchers, and which of them a sink gets."""

from __future__ import annotations

from typing import Protocol

from outbox_relay.domain.in_flight import Chunk
from outbox_relay.relay.context import DeliveryContext
from outbox_relay.relay.dispatch_batches import BatchDispatcher
from outbox_relay.relay.dispatch_requests import RequestDispatcher


class Dispatcher(Protocol):
    """A way of delivering chunks. ``put`` hands one over; ``run`` works until cancelled."""

    @property
    def under_way(self) -> int:
        """Calls that the sink has not answered."""
        ...

    @property
    def saturated(self) -> bool:
        """Whether so much waits for the sink that what comes meanwhile is better read together, later."""
        ...

    def put(self, chunk: Chunk) -> None:
        """Deliver ``chunk`` after everything that was put before it."""
        ...

    async def run(self) -> None:
        """Deliver what is put, until cancelled."""
        ...


def dispatcher_for(context: DeliveryContext) -> Dispatcher:
    """The way of delivering that fits the sink."""
    return BatchDispatcher(context) if context.sink.keeps_order else RequestDispatcher(context)
