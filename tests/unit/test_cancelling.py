"""A cancellation is heeded, also when the code in between forgets it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from outbox_relay.domain.cancelling import heeded


async def _forgetful(then: Exception | None) -> None:
    """Forgets that it was cancelled, as `asyncio.wait_for` does in Python 3.11."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    if then:
        raise then


@pytest.mark.parametrize("then", [None, ValueError("something else")])
async def test_a_cancellation_that_was_forgotten_comes_at_the_end_of_the_block(then: Exception | None) -> None:
    went_on = False

    async def work() -> None:
        nonlocal went_on
        with heeded():
            await _forgetful(then)
        went_on = True

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not went_on


async def test_a_limit_of_time_inside_the_block_is_no_cancellation_of_the_task() -> None:
    with heeded(), contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.001):
            await asyncio.sleep(60)


async def test_what_is_raised_inside_comes_out_as_it_is() -> None:
    with pytest.raises(ValueError, match="as it is"), heeded():
        raise ValueError("as it is")


async def test_a_limit_of_time_around_the_block_still_ends_it() -> None:
    async def work() -> None:
        async with asyncio.timeout(0.001):
            with heeded():
                await _forgetful(None)

    with pytest.raises(TimeoutError):
        await work()
