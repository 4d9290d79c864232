"""The settlement of requests that outlast ``park_after_seconds``, whose events become rows."""

from __future__ import annotations

import asyncio

from outbox_relay.relay.context import DeliveryContext
from outbox_relay.relay.lease_extensions import LeaseExtensions
from outbox_relay.relay.parked_settler import ParkedSettler
from outbox_relay.relay.slow_requests import SlowRequest, SlowRequests


class SlowDeliveries:
    """Waits for the verdicts of slow requests, which were begun for events of the log."""

    def __init__(
        self,
        context: DeliveryContext,
        slow_requests: SlowRequests,
        settler: ParkedSettler,
        extensions: LeaseExtensions,
    ) -> None:
        self._context = context
        self._slow_requests = slow_requests
        self._settler = settler
        self._extensions = extensions

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Settle slow requests, each in a task of its own, until cancelled.

        This must not wait for a slot or for the circuit, since slow requests keep theirs until they are settled.
        """
        try:
            while True:
                slow = await self._slow_requests.take()
                tasks.create_task(self._settle(slow))
        finally:
            self._slow_requests.close()

    async def _settle(self, slow: SlowRequest) -> None:
        """Settle the row by the verdict, once the row is in the database."""
        try:
            self._extensions.watch([slow.row])
            [verdict], seconds = await slow.request
        finally:
            self._extensions.forget([slow.row])
            self._context.limiter.release()
        await self._context.settler.committed(slow.settlement)
        self._settler.decide(slow.row, verdict, slow.permit, seconds)
        self._slow_requests.decided(slow)
