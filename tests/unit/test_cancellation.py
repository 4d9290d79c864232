"""A cancellation is raised, also if the code in between swallows it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from outbox_relay.domain.cancellation import propagate_cancellation


async def _swallow_cancellation(then: Exception | None) -> None:
    """Swallow a cancellation, as `asyncio.wait_for` does in Python 3.11."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(60)
    if then:
        raise then


@pytest.mark.parametrize("then", [None, ValueError("something else")])
async def test_a_swallowed_cancellation_is_raised_at_the_end_of_the_block(then: Exception | None) -> None:
    finished = False

    async def work() -> None:
        nonlocal finished
        with propagate_cancellation():
            await _swallow_cancellation(then)
        finished = True

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not finished


async def test_a_timeout_inside_the_block_is_no_cancellation_of_the_task() -> None:
    with propagate_cancellation(), contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.001):
            await asyncio.sleep(60)


async def test_other_exceptions_are_unchanged() -> None:
    with pytest.raises(ValueError, match="as it is"), propagate_cancellation():
        raise ValueError("as it is")


async def test_a_timeout_around_the_block_still_ends_it() -> None:
    async def work() -> None:
        async with asyncio.timeout(0.001):
            with propagate_cancellation():
                await _swallow_cancellation(None)

    with pytest.raises(TimeoutError):
        await work()


async def test_a_cancellation_that_was_requested_before_the_block_is_raised_too() -> None:
    """As Ctrl-C requests it, which comes while the task runs."""
    finished = False

    async def work() -> None:
        nonlocal finished
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        with propagate_cancellation():
            await _swallow_cancellation(None)
        finished = True

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(work())
    assert not finished


async def test_cleaning_up_after_a_cancellation_is_not_cancelled_again() -> None:
    cleaned = False

    async def work() -> None:
        nonlocal cleaned
        try:
            await asyncio.sleep(60)
        finally:
            with propagate_cancellation():
                await asyncio.sleep(0)
            cleaned = True

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned
