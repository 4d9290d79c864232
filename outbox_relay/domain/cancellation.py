"""Cancellation of tasks that the code in between may swallow."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def propagate_cancellation() -> Generator[None]:
    """Raise ``CancelledError`` at the end of the block if it swallowed one.

    ``asyncio.wait_for`` of Python 3.11 returns a result that is ready at the moment of the cancellation and forgets the
    cancellation (python/cpython#86296, fixed in 3.12). Waiting for a connection of a pool is such a place. A task that
    missed its only cancellation would block its caller indefinitely.

    A cancellation that was requested before the block and is raised inside it counts too: Ctrl-C is one while the task
    runs. One that was raised before does not: what follows it cleans up.
    """
    task = asyncio.current_task()
    before = task.cancelling() - _is_pending(task) if task else 0
    try:
        yield
    except asyncio.CancelledError:
        raise
    except Exception:
        _raise_if_cancelled(task, before)
        raise
    else:
        _raise_if_cancelled(task, before)


def _is_pending(task: asyncio.Task[object]) -> bool:
    """Return True if a cancellation is requested that the task has not raised yet. No public attribute says this."""
    return bool(getattr(task, "_must_cancel", False))


def _raise_if_cancelled(task: asyncio.Task[object] | None, before: int) -> None:
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError from None
