"""How many requests a sink may have under way, and how that follows what the destination says."""

from __future__ import annotations

import asyncio

from outbox_relay.relay.limiter import ConcurrencyLimiter


async def test_no_more_than_fit_are_under_way_and_each_that_ends_lets_one_in() -> None:
    limiter = ConcurrencyLimiter(2)
    await limiter.acquire()
    await limiter.acquire()
    third = asyncio.create_task(limiter.acquire())
    await asyncio.sleep(0)
    assert limiter.full()
    assert not third.done()
    limiter.release()
    await asyncio.wait_for(third, 5)


async def test_a_destination_that_asks_for_less_gets_half_and_at_least_one() -> None:
    limiter = ConcurrencyLimiter(64)
    seen: list[int] = []
    for _ in range(8):
        limiter.decrease()
        seen.append(limiter.limit)
    assert seen == [32, 16, 8, 4, 2, 1, 1, 1]


async def test_deliveries_bring_it_back_by_one_for_as_many_as_fit_and_never_beyond_its_bound() -> None:
    limiter = ConcurrencyLimiter(8)
    limiter.decrease()
    for limit in (4, 5, 6, 7):
        assert limiter.limit == limit
        for _ in range(limit + 1):
            limiter.increase()
    for _ in range(100):
        limiter.increase()
    assert limiter.limit == 8


async def test_what_is_under_way_when_it_shrinks_ends_before_anything_begins() -> None:
    limiter = ConcurrencyLimiter(4)
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
    limiter = ConcurrencyLimiter(1)
    await limiter.acquire()
    first, second = (asyncio.create_task(limiter.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    limiter.release()
    first.cancel()
    await asyncio.wait_for(second, 5)
    assert first.cancelled()


async def test_every_limit_is_told_once_and_nothing_when_there_is_none_any_more() -> None:
    told: list[int | None] = []
    limiter = ConcurrencyLimiter(4, told.append)
    limiter.decrease()
    limiter.decrease()
    limiter.decrease()
    for _ in range(20):
        limiter.increase()
    assert told == [2, 1, 2, 3, None]


async def test_one_that_has_not_begun_gives_its_place_back_only_while_there_are_too_many() -> None:
    limiter = ConcurrencyLimiter(4)
    for _ in range(4):
        await limiter.acquire()
    assert not limiter.over_limit()
    limiter.decrease()
    for _ in range(2):
        assert limiter.over_limit()
        limiter.release()
    assert limiter.full()
    assert not limiter.over_limit()
