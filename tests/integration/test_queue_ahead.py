"""Relays that claim the next rows of a queue while they deliver others: no row is kept, and no limit is passed by."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from outbox_relay.domain.errors import DatabaseUnavailable
from outbox_relay.domain.event import StoredEvent
from outbox_relay.domain.outcomes import DELIVERED, Verdict
from outbox_relay.domain.sink_limits import NO_LIMITS, SinkLimits
from outbox_relay.domain.sink_spec import SinkSpec
from tests.support.database import Database, query
from tests.support.deliveries import emit, has, ids
from tests.support.memory_sink import MemorySink
from tests.support.rates import flow
from tests.support.relay_harness import RelayHarness, running, spec
from tests.support.wait import auntil

SLOTS = 4
LIMIT = 2


def queued(**changes: Any) -> SinkSpec:
    """Return the sink ``s`` with ``claim = "rows"``."""
    return spec("s", claim="rows", ordered=False, **changes)


class Handler:
    """Handles events in a few milliseconds until it hangs. ``free`` ends all calls."""

    def __init__(self) -> None:
        self.hangs = False
        self.free = asyncio.Event()
        self.under_limit = self.most_under_limit = 0
        """The number of calls that began while there was a limit across relays, now and at most."""
        self.harness: RelayHarness | None = None

    def sink(self) -> MemorySink:
        return MemorySink(self._handle, keeps_order=False, max_in_flight=SLOTS)

    async def _handle(self, _event: StoredEvent, _attempt: int) -> Verdict:
        limited = self.harness is not None and self.harness.relays[0].limits.active
        self.under_limit += limited
        self.most_under_limit = max(self.most_under_limit, self.under_limit)
        if self.hangs:
            await self.free.wait()
        else:
            await asyncio.sleep(0.002)
        self.under_limit -= limited
        return DELIVERED


async def _until_paused(harness: RelayHarness) -> None:
    """Wait until the relay knows that its sink is paused."""

    async def fact() -> bool:
        return not harness.leases("s").serving

    await auntil(fact, seconds=20, what="the relay knows that the sink is paused")


async def _all(database: Database) -> None:
    """Wait until no row is left."""
    await has(database, "select where not exists (select from outbox.delivery)", seconds=60)


async def test_every_row_that_is_claimed_ahead_is_delivered_once(database: Database) -> None:
    sink = Handler().sink()
    wanted = emit(database, [None] * 1000)
    async with running(database.dsn, (queued(), sink)) as harness:
        await has(database, f"select from outbox.delivery where lease is not null having count(*) > {SLOTS}")
        await _all(database)
        assert harness.store.calls["update_rows"] == 0
    assert Counter(ids(sink)) == Counter(wanted)


async def test_rows_in_hand_go_back_while_every_call_hangs(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes red when rows wait in memory for slots, until their leases lapse, while another relay could deliver them."""
    monkeypatch.setattr("outbox_relay.relay.parked.START_SECONDS", 0.1)
    handler = Handler()
    sink, other = handler.sink(), Handler().sink()
    wanted = emit(database, [None] * 1000)
    async with running(database.dsn, (queued(), sink)):
        await flow(lambda: len(sink.delivered), 300)
        handler.hangs = True
        await has(database, f"select from outbox.delivery where lease is not null having count(*) = {SLOTS}")
        assert query(database, "select max(attempts), max(claims) from outbox.delivery where lease is null") == [(0, 0)]
        async with running(database.dsn, (queued(), other)):
            await has(database, f"select from outbox.delivery having count(*) = {SLOTS}", seconds=60)
            handler.free.set()
            await _all(database)
    assert Counter(ids(sink) + ids(other)) == Counter(wanted)


async def test_rows_in_hand_go_back_when_the_sink_is_paused(database: Database) -> None:
    handler = Handler()
    sink = handler.sink()
    wanted = emit(database, [None] * 3000)
    async with running(database.dsn, (queued(), sink), lease_seconds=3.0) as harness:
        await flow(lambda: len(sink.delivered), 300)
        query(database, "update outbox.sink set paused = true returning 1")
        await _until_paused(harness)  # before, there may be a moment without a lease between two claims
        await has(database, "select from outbox.delivery having count(*) > 0 and count(lease) = 0", seconds=20)
        assert query(database, "select max(attempts), max(claims) from outbox.delivery") == [(0, 0)]
        query(database, "update outbox.sink set paused = false returning 1")
        await _all(database)
    assert Counter(ids(sink)) == Counter(wanted)


async def test_a_relay_that_stops_leaves_no_row_leased(database: Database) -> None:
    sink = Handler().sink()
    wanted = emit(database, [None] * 1000)
    async with running(database.dsn, (queued(), sink)) as harness:
        await flow(lambda: len(sink.delivered), 300)
        await harness.stop()
        rows = query(database, "select id, attempts, claims, lease is null from outbox.delivery")
        assert {tuple(row[1:]) for row in rows} == {(0, 0, True)}
    assert Counter([row[0] for row in rows] + ids(sink)) == Counter(wanted)


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "not answered"])
async def test_rows_of_a_claim_ahead_that_fails_are_claimed_again(
    database: Database, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    """Goes red when rows of a claim without an answer wait for the end of their leases."""
    sink, failed = Handler().sink(), 0
    wanted = emit(database, [None] * 500)
    async with running(database.dsn, (queued(), sink), expects={"connection_lost"}) as harness:
        claim = harness.store.claim_queued

        async def fail_ahead(*parts: Any, **options: Any) -> Any:
            nonlocal failed
            task = asyncio.current_task()
            ahead = task is not None and "_claim_ahead" in repr(task.get_coro())
            if not ahead or failed:
                return await claim(*parts, **options)
            if answered and not (found := await claim(*parts, **options)).rows:
                return found
            failed += 1
            raise DatabaseUnavailable("lost")

        monkeypatch.setattr(harness.store, "claim_queued", fail_ahead)
        await flow(lambda: failed, 0)
        await has(database, "select where not exists (select from outbox.delivery)", seconds=12)  # leases last longer
    assert set(ids(sink)) == set(wanted)


async def test_a_limit_counts_from_the_moment_at_which_it_is_known(database: Database) -> None:
    """Goes red when slots that were kept, or rows that were claimed ahead, pass by the limit."""
    handler = Handler()
    sink = handler.sink()
    wanted = emit(database, [None] * 3000)
    async with running(database.dsn, (queued(), sink), lease_seconds=3.0) as harness:
        handler.harness = harness
        limits = harness.relays[0].limits
        await flow(lambda: len(sink.delivered), 300)
        for _ in range(2):
            await harness.store.state_limits({"s": SinkLimits(max_in_flight_total=LIMIT)})
            await auntil(lambda: _is(limits.active), seconds=20, what="the limit is known")
            await flow(lambda: len(sink.delivered), len(sink.delivered) + 50)
            await harness.store.state_limits({"s": NO_LIMITS})
            await auntil(lambda: _is(not limits.active), seconds=20, what="the limit is gone")
            await flow(lambda: len(sink.delivered), len(sink.delivered) + 50)
        await _all(database)
    assert handler.most_under_limit == LIMIT
    assert Counter(ids(sink)) == Counter(wanted)


async def _is(fact: bool) -> bool:
    return fact
