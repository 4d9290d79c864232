"""Shards are known to be ours in the order in which they became it.

The store is a stand-in: two answers of a database cannot be made to arrive in a chosen order.
"""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import structlog

from outbox_relay.domain.event import SHARDS
from outbox_relay.postgres.rows import Claimed
from outbox_relay.relay.leases import Ownership


class Answers:
    """A store in which every shard is free; the answer to ``reclaim_shards`` comes when ``late`` is set."""

    def __init__(self) -> None:
        self.asked, self.late = asyncio.Event(), asyncio.Event()
        self.owned: list[Claimed] = []

    async def reclaim_shards(self, _sink: str, _owner: object, _lease: float) -> list[Claimed]:
        """What was owned when this was asked."""
        owned = [claimed._replace(epoch=claimed.epoch + 1) for claimed in self.owned]
        self.asked.set()
        await self.late.wait()
        return owned

    async def claim_shards(self, *_: object) -> list[Claimed]:
        """All that are free."""
        owned = {claimed.shard for claimed in self.owned}
        claimed = [Claimed(shard, 1, 0) for shard in range(SHARDS) if shard not in owned]
        self.owned += claimed
        return claimed


async def test_what_is_claimed_while_a_session_begins_is_not_forgotten() -> None:
    """Without the lock shards are owned that this relay knows nothing of: for a lease nobody delivers them."""
    answers: Any = Answers()
    ownership = Ownership(answers, uuid4(), "test", "1", 15.0, structlog.get_logger())
    holding = ownership.add("s", 1)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ownership.reclaim(holding))
        await answers.asked.wait()
        tasks.create_task(ownership._claim(holding))  # pyright: ignore[reportPrivateUsage]
        for _ in range(10):  # The claim waits for nothing outside: by then it has come as far as it can.
            await asyncio.sleep(0)
        answers.late.set()
    assert len(holding.held) == SHARDS == len(answers.owned)
