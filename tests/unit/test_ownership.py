"""Shards are known to be ours in the order in which they became it.

The store is a stand-in: two answers of a database cannot be made to arrive in a chosen order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast
from uuid import uuid4

import pytest
import structlog

from outbox_relay.domain.errors import LeaseLost, StatementFailed
from outbox_relay.domain.event import SHARDS
from outbox_relay.domain.in_flight import Chunk, InFlight
from outbox_relay.domain.lease_clock import lease_clock
from outbox_relay.domain.window import Position, Tick
from outbox_relay.postgres.rows import Claimed, NewRow, SinkRow
from outbox_relay.postgres.shard_statements import HeldShard
from outbox_relay.postgres.store import Store
from outbox_relay.relay.leases import LeaseManager
from outbox_relay.relay.settler import Settler
from outbox_relay.relay.sink_leases import Lease, SinkLeases
from outbox_relay.sinks.contract.handing import an_event
from tests.support.recording import a_recorder


class Answers:
    """A store in which every shard is free at first.

    The answers to ``reclaim_shards`` and ``release_shards`` come when ``late`` is set.
    """

    def __init__(self) -> None:
        self.asked, self.late = asyncio.Event(), asyncio.Event()
        self.owned: list[Claimed] = []
        self.epoch = 0
        self.left: float | None = None
        """The seconds that are left of renewed leases, if not those that were asked for."""

    async def reclaim_shards(self, _sink: str, _owner: object, _lease: float) -> list[Claimed]:
        """Return the shards that were owned at the time of the question."""
        owned = [claimed._replace(epoch=claimed.epoch + 1) for claimed in self.owned]
        self.asked.set()
        await self.late.wait()
        return owned

    async def claim_shards(self, *_: object, **_given: object) -> list[Claimed]:
        """Claim all free shards."""
        owned = {claimed.shard for claimed in self.owned}
        self.epoch += 1
        claimed = [Claimed(shard, self.epoch, 0) for shard in range(SHARDS) if shard not in owned]
        self.owned += claimed
        return claimed

    async def release_shards(self, _sink: str, _owner: object, epochs: Mapping[int, int]) -> None:
        """Free shards."""
        self.owned = [claimed for claimed in self.owned if claimed.epoch != epochs.get(claimed.shard)]
        self.asked.set()
        await self.late.wait()

    async def renew_shards(
        self, _owner: object, asked: Collection[HeldShard], lease_seconds: float, _deadline: float
    ) -> dict[HeldShard, float]:
        """Return those that are owned."""
        owned = {(claimed.shard, claimed.epoch) for claimed in self.owned}
        left = self.left or lease_seconds
        return {(sink, shard, epoch): left for sink, shard, epoch in asked if (shard, epoch) in owned}

    async def heartbeat(self, *_: object) -> bool:
        """Return True."""
        return True


async def test_what_is_claimed_while_a_session_begins_is_not_forgotten() -> None:
    """Without the lock this relay owns shards without knowing it: for a lease they are not delivered."""
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


@pytest.mark.parametrize(("left", "believed"), [(2.5, 2.5), (100.0, 15.0)])
async def test_a_relay_believes_in_no_more_than_is_left_of_a_lease_and_was_asked_for(
    left: float, believed: float
) -> None:
    """Goes red when the relay counts on what it asked for, or on more: a late renewal may take that away again."""
    answers: Any = Answers()
    lease_manager = LeaseManager(answers, uuid4(), "test", "1", 15.0, structlog.get_logger())
    leases = lease_manager.add("s", 1)
    await lease_manager._claim(leases)  # pyright: ignore[reportPrivateUsage]
    answers.left = left
    before = lease_clock()
    await lease_manager._renew()  # pyright: ignore[reportPrivateUsage]
    assert before + believed - 1 <= leases.until(range(SHARDS)) <= lease_clock() + believed - 1


class Register(Answers):
    """A store that writes down whether the relay's row is there; a heartbeat takes as long as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.registered = False
        self.beating, self.beaten = asyncio.Event(), asyncio.Event()

    async def heartbeat(self, *_: object) -> bool:
        """Write the row, late."""
        self.beating.set()
        await self.beaten.wait()
        self.registered = True
        return True

    async def forget_relay(self, _: object) -> None:
        """Remove the row."""
        self.registered = False


async def test_no_heartbeat_brings_back_the_row_of_a_relay_that_has_left() -> None:
    """Goes red without the lock, or if a relay that has left still sends heartbeats: rebase would refuse."""
    register: Any = Register()
    lease_manager = LeaseManager(register, uuid4(), "test", "1", 15.0, structlog.get_logger())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(lease_manager._renew())  # pyright: ignore[reportPrivateUsage]
        await register.beating.wait()
        tasks.create_task(lease_manager.leave())
        for _ in range(10):  # Leaving waits for nothing else: by then it has come as far as it can.
            await asyncio.sleep(0)
        register.beaten.set()
    assert not register.registered
    await lease_manager._renew()  # pyright: ignore[reportPrivateUsage]
    assert not register.registered


class Silent(Answers):
    """A store that takes no heartbeat."""

    async def heartbeat(self, *_: object) -> bool:
        """Refuse it."""
        raise StatementFailed("canceling statement due to lock timeout")


async def test_a_relay_that_cannot_tell_that_it_stops_drains_its_shards_all_the_same() -> None:
    answers: Any = Silent()
    lease_manager = LeaseManager(answers, uuid4(), "test", "1", 15.0, structlog.get_logger())
    leases = lease_manager.add("s", 1)
    with pytest.raises(StatementFailed):
        await lease_manager.stop()
    assert not leases.serving


@pytest.mark.parametrize("claimed_again", [False, True])
async def test_a_renewal_or_a_claim_during_a_release_loses_no_shard(claimed_again: bool) -> None:
    """Goes red when such a renewal counts as a loss, which ends the session, or the release forgets the new claim."""
    answers: Any = Answers()
    lease_manager = LeaseManager(answers, uuid4(), "test", "1", 15.0, structlog.get_logger())
    leases = lease_manager.add("s", 1)
    await lease_manager._claim(leases)  # pyright: ignore[reportPrivateUsage]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(lease_manager.release(leases, range(SHARDS)))
        await answers.asked.wait()
        await lease_manager._renew()  # pyright: ignore[reportPrivateUsage]
        if claimed_again:
            leases.grant({claimed.shard: Lease(claimed.epoch, 9e9, 0) for claimed in await answers.claim_shards()})
        answers.late.set()
    assert not leases.lost
    assert leases.epochs(range(SHARDS)) == {claimed.shard: claimed.epoch for claimed in answers.owned}
    assert len(answers.owned) == (SHARDS if claimed_again else 0)


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


async def test_a_shard_that_was_lost_and_claimed_again_is_not_delivered_for_before_the_next_session() -> None:
    """Another relay may have owned it in between: goes red when the new lease stands for the old one."""
    leases = SinkLeases("s", 1)
    leases.grant({7: Lease(5, 10.0, 0)})
    assert not leases.lost
    assert leases.lose(7, 5)
    leases.grant({7: Lease(9, 99.0, 0)})
    assert leases.lost
    assert leases.until([7]) == 0.0
    settling = Settler(cast("Store", None), leases, uuid4(), InFlight(), a_recorder())
    event = an_event()._replace(shard=7)
    start = Position(Tick(0, "3:3:", 3))
    settling.park(Chunk([event], start, start), 0, NewRow(event.id, 7, "waiting", True), blocks=True)
    with pytest.raises(LeaseLost):
        await settling.flush()
    leases.replace({7: Lease(10, 99.0, 0)})
    assert not leases.lost
    assert leases.until([7]) == 99.0


async def test_the_answer_to_a_renewal_keeps_no_crashes_that_were_forgotten_meanwhile() -> None:
    leases = SinkLeases("s", 1)
    leases.grant({7: Lease(5, 10.0, 3)})
    leases.forget_crashes([7])
    leases.confirm(7, 5, 20.0)
    assert leases.held == {7: Lease(5, 20.0, 0)}


async def test_requests_for_probes_from_before_the_relay_began_are_none() -> None:
    leases = SinkLeases("s", 1)
    row = SinkRow("s", 1, paused=False, circuit="open", in_flight_limit=3, unowned=0, patterns=("*",), probes=7)
    leases.observe(row, stopping=False)
    assert not leases.take_probe_request()
    leases.observe(row._replace(probes=8), stopping=False)
    assert leases.take_probe_request()


async def test_the_loop_is_woken_by_what_changes_its_shards_and_by_nothing_else() -> None:
    leases = SinkLeases("s", 1)
    row = SinkRow("s", 1, paused=False, circuit="open", in_flight_limit=3, unowned=0, patterns=("*",))

    def release() -> None:
        with leases.releasing([3]):
            pass

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
    assert not wakes(release)
    assert wakes(lambda: leases.lose(0, 1))
    assert wakes(lambda: leases.observe(row._replace(paused=True), stopping=False))
    row = row._replace(paused=True, probes=1)
    assert wakes(lambda: leases.observe(row, stopping=False))
    assert [leases.take_probe_request(), leases.take_probe_request()] == [True, False]
    assert not wakes(lambda: leases.observe(row, stopping=False))
    assert wakes(leases.remove)
    assert not wakes(leases.remove)
    assert wakes(leases.stop)
