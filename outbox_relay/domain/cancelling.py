"""Cancellations that must not get lost, whatever the code in between does with them."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def heeded() -> Generator[None]:
    """Raise ``CancelledError`` at the end of the block if the task was cancelled in it and the block did not say so.

    ``asyncio.wait_for`` of Python 3.11 returns its result when that is there at the moment of the cancellation, which
    is then forgotten (python/cpython#86296, mended in 3.12); waiting for a connection of a pool is such a place. A task
    that goes on after it was cancelled once would keep whoever waits for its end for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    try:
        yield
    except asyncio.CancelledError:
        raise
    except Exception:
        _heed(task, before)
        raise
    else:
        _heed(task, before)


def _heed(task: asyncio.Task[object] | None, before: int) -> None:
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError from None
