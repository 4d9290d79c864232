"""The limit of concurrent requests, and how the destination changes it."""

from __future__ import annotations

import asyncio

import pytest

from outbox_relay.relay.limiter import ConcurrencyLimiter


async def test_no_more_than_fit_are_under_way_and_each_that_ends_lets_one_in() -> None:
    limiter = ConcurrencyLimiter(2, asyncio.Event())
    await limiter.acquire()
    await limiter.acquire()
    third = asyncio.create_task(limiter.acquire())
    await asyncio.sleep(0)
    assert limiter.full()
    assert not third.done()
    limiter.release()
    await asyncio.wait_for(third, 5)


async def test_a_destination_that_asks_for_less_gets_half_and_at_least_one() -> None:
    limiter = ConcurrencyLimiter(64, asyncio.Event())
    seen: list[int] = []
    for _ in range(8):
        limiter.decrease()
        seen.append(limiter.limit)
    assert seen == [32, 16, 8, 4, 2, 1, 1, 1]


async def test_deliveries_bring_it_back_by_one_for_as_many_as_fit_and_never_beyond_its_bound() -> None:
    limiter = ConcurrencyLimiter(8, asyncio.Event())
    limiter.decrease()
    for limit in (4, 5, 6, 7):
        assert limiter.limit == limit
        for _ in range(limit + 1):
            limiter.increase()
    for _ in range(100):
        limiter.increase()
    assert limiter.limit == 8


async def test_what_is_under_way_when_it_shrinks_ends_before_anything_begins() -> None:
    limiter = ConcurrencyLimiter(4, asyncio.Event())
    for _ in range(4):
        await limiter.acquire()
    limiter.decrease()
    waiting = asyncio.create_task(limiter.acquire())
    for _ in range(2):
        limiter.release()
        await asyncio.sleep(0)
        assert not waiting.done()
    limiter.release()
    await asyncio.wait_for(waiting, 5)


async def test_one_that_stops_waiting_takes_nobodys_place() -> None:
    limiter = ConcurrencyLimiter(1, asyncio.Event())
    await limiter.acquire()
    first, second = (asyncio.create_task(limiter.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    limiter.release()
    first.cancel()
    await asyncio.wait_for(second, 5)
    assert first.cancelled()


class Limits(asyncio.Event):
    """Notes the reduced limit whenever it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int | None] = []
        self.limiter = ConcurrencyLimiter(4, self)

    def set(self) -> None:
        self.seen.append(self.limiter.reduced_limit)
        super().set()


async def test_every_change_of_the_limit_is_seen_once_and_there_is_none_at_the_maximum() -> None:
    limits = Limits()
    for _ in range(3):
        limits.limiter.decrease()
    for _ in range(20):
        limits.limiter.increase()
    assert limits.seen == [2, 1, 2, 3, None]


async def test_one_that_has_not_begun_gives_its_place_back_only_while_there_are_too_many() -> None:
    limiter = ConcurrencyLimiter(4, asyncio.Event())
    for _ in range(4):
        await limiter.acquire()
    assert not limiter.over_limit()
    limiter.decrease()
    for _ in range(2):
        assert limiter.over_limit()
        limiter.release()
    assert limiter.full()
    assert not limiter.over_limit()


async def test_the_session_that_follows_shares_the_slots_and_has_a_limit_of_its_own() -> None:
    """Goes red when the newest limit does not decide who is woken, or when another destination throttles it."""
    before = ConcurrencyLimiter(3, asyncio.Event())
    for _ in range(3):
        await before.acquire()
    after = ConcurrencyLimiter(2, changed := asyncio.Event(), before)
    assert (after.taken, after.free, after.full(), after.shared) == (3, 0, True, True)
    waiting = asyncio.create_task(after.acquire())
    before.decrease()
    assert (after.limit, after.reduced_limit, changed.is_set()) == (2, None, False)
    before.release()
    await asyncio.wait([waiting], timeout=0.01)
    assert not waiting.done(), "two slots are taken"
    before.release()
    await asyncio.wait_for(waiting, 5)
    before.release()
    before.leave()
    assert (after.taken, after.shared) == (1, False)


async def test_parked_deliveries_take_a_part_of_the_slots_while_the_log_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("outbox_relay.relay.limiter.time.monotonic", lambda: now[0])
    limiter = ConcurrencyLimiter(64, asyncio.Event())
    assert limiter.parked_share() == 64
    limiter.log_flows()
    assert limiter.parked_share() == 16
    for _ in range(6):
        limiter.decrease()
    assert limiter.parked_share() == 1
    now[0] += 1.0
    assert limiter.parked_share() == limiter.limit == 1
