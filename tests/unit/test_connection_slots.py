"""The division of a relay's connections among its callers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from outbox_relay.domain.errors import StatementFailed
from outbox_relay.postgres.connection_slots import REPLAYS, ConnectionSlots, sink_caller


async def test_replays_have_one_connection_and_take_none_of_the_share_of_a_sink() -> None:
    """Goes red when replays count as a sink: the only sink would have one connection instead of three."""
    slots = ConnectionSlots(8)
    async with AsyncExitStack() as held:
        await held.enter_async_context(slots.taken(REPLAYS, "read", 1.0))
        with pytest.raises(StatementFailed):
            await held.enter_async_context(slots.taken(REPLAYS, "read", 0.01))
        async with asyncio.timeout(5):
            for _ in range(3):
                await held.enter_async_context(slots.taken(sink_caller("crm"), "read", 1.0))
