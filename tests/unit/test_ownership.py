"""Shards are known to be ours in the order in which they became it.

The store is a stand-in: two answers of a database cannot be made to arrive in a chosen order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import structlog

from outbox_relay.domain.event import SHARDS
from outbox_relay.postgres.rows import Claimed, SinkRow
from outbox_relay.relay.leases import LeaseManager
from outbox_relay.relay.sink_leases import Lease, SinkLeases


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
    lease_manager = LeaseManager(answers, uuid4(), "test", "1", 15.0, structlog.get_logger())
    leases = lease_manager.add("s", 1)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(lease_manager.reclaim(leases))
        await answers.asked.wait()
        tasks.create_task(lease_manager._claim(leases))  # pyright: ignore[reportPrivateUsage]
        for _ in range(10):  # The claim waits for nothing outside: by then it has come as far as it can.
            await asyncio.sleep(0)
        answers.late.set()
    assert len(leases.held) == SHARDS == len(answers.owned)


async def test_the_late_answer_to_a_renewal_changes_no_lease_of_a_later_epoch() -> None:
    """Goes red when answers are not compared with the epoch: a shard of ours is forgotten, or trusted for too long."""
    leases = SinkLeases("s", 1)
    leases.grant({7: Lease(5, 10.0, 0)})
    leases.replace({7: Lease(6, 20.0, 0)})
    leases.wake.clear()
    leases.confirm(7, 5, 99.0)
    assert not leases.lose(7, 5)
    assert leases.held == {7: Lease(6, 20.0, 0)}
    assert not leases.wake.is_set()


async def test_the_answer_to_a_renewal_keeps_no_crashes_that_were_forgotten_meanwhile() -> None:
    leases = SinkLeases("s", 1)
    leases.grant({7: Lease(5, 10.0, 3)})
    leases.forget_crashes([7])
    leases.confirm(7, 5, 20.0)
    assert leases.held == {7: Lease(5, 20.0, 0)}


async def test_the_loop_is_woken_by_what_changes_its_shards_and_by_nothing_else() -> None:
    leases = SinkLeases("s", 1)
    row = SinkRow("s", 1, paused=False, circuit="open", in_flight_limit=3, unowned=0, patterns=("*",))

    def wakes(change: Callable[[], object]) -> bool:
        leases.wake.clear()
        change()
        return leases.wake.is_set()

    assert wakes(lambda: leases.grant({shard: Lease(1, 10.0, 1) for shard in range(4)}))
    assert not wakes(lambda: leases.observe(row, stopping=False))
    assert not wakes(lambda: leases.confirm(0, 1, 20.0))
    assert not wakes(lambda: leases.forget_crashes([0]))
    assert not wakes(lambda: leases.record_report("closed", None))
    assert wakes(lambda: leases.set_quota(2))
    assert not wakes(lambda: leases.set_quota(2))
    assert not wakes(lambda: leases.drop([3]))
    assert wakes(lambda: leases.lose(0, 1))
    assert wakes(lambda: leases.observe(row._replace(paused=True), stopping=False))
    assert wakes(leases.remove)
    assert not wakes(leases.remove)
    assert wakes(leases.stop)
