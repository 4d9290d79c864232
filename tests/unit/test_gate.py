"""How many requests a sink may have under way, and how that follows what the destination says."""

from __future__ import annotations

import asyncio

from outbox_relay.relay.gate import Slots


async def test_no_more_than_fit_are_under_way_and_each_that_ends_lets_one_in() -> None:
    slots = Slots(2)
    await slots.acquire()
    await slots.acquire()
    third = asyncio.create_task(slots.acquire())
    await asyncio.sleep(0)
    assert slots.full()
    assert not third.done()
    slots.release()
    await asyncio.wait_for(third, 5)


async def test_a_destination_that_asks_for_less_gets_half_and_at_least_one() -> None:
    slots = Slots(64)
    seen: list[int] = []
    for _ in range(8):
        slots.fewer()
        seen.append(slots.limit)
    assert seen == [32, 16, 8, 4, 2, 1, 1, 1]


async def test_deliveries_bring_it_back_by_one_for_as_many_as_fit_and_never_beyond_its_bound() -> None:
    slots = Slots(8)
    slots.fewer()
    for limit in (4, 5, 6, 7):
        assert slots.limit == limit
        for _ in range(limit + 1):
            slots.more()
    for _ in range(100):
        slots.more()
    assert slots.limit == 8


async def test_what_is_under_way_when_it_shrinks_ends_before_anything_begins() -> None:
    slots = Slots(4)
    for _ in range(4):
        await slots.acquire()
    slots.fewer()
    waiting = asyncio.create_task(slots.acquire())
    for _ in range(2):
        slots.release()
        await asyncio.sleep(0)
        assert not waiting.done()
    slots.release()
    await asyncio.wait_for(waiting, 5)


async def test_one_that_stops_waiting_takes_nobodys_place() -> None:
    slots = Slots(1)
    await slots.acquire()
    first, second = (asyncio.create_task(slots.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    slots.release()
    first.cancel()
    await asyncio.wait_for(second, 5)
    assert first.cancelled()


async def test_every_limit_is_told_once_and_nothing_when_there_is_none_any_more() -> None:
    told: list[int | None] = []
    slots = Slots(4, told.append)
    slots.fewer()
    slots.fewer()
    slots.fewer()
    for _ in range(20):
        slots.more()
    assert told == [2, 1, 2, 3, None]


async def test_one_that_has_not_begun_gives_its_place_back_only_while_there_are_too_many() -> None:
    slots = Slots(4)
    for _ in range(4):
        await slots.acquire()
    assert not slots.overfull()
    slots.fewer()
    for _ in range(2):
        assert slots.overfull()
        slots.release()
    assert slots.full()
    assert not slots.overfull()
