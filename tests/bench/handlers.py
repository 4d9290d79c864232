"""Handlers for a measured relay and for the bare queue, whose log the environment names.

They wait until the benchmark opens the log, so that a relay makes its rows before the first of them is delivered.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

from outbox_relay.delivery import Delivery
from tests.bench.handler_log import LOG, HandlerLog

SECONDS = (0.002, 0.005)
"""Bounds of the duration of a call."""
LOOK_SECONDS = 0.01
_log = HandlerLog(Path(os.environ[LOG]))
_opened_at = 0.0


async def brief(_: Delivery) -> None:
    """Record the wait since the opening, and take 2 to 5 ms."""
    opened_at = _opened_at or await _opened()
    _log.add_wait(time.monotonic() - opened_at)
    await asyncio.sleep(random.uniform(*SECONDS))
    _log.add_done()


async def empty(_: Delivery) -> None:
    """Do nothing."""
    if not _opened_at:
        await _opened()
    _log.add_done()


async def _opened() -> float:
    """Wait until the log is open, and return the time of that."""
    global _opened_at  # noqa: PLW0603 - of the whole process
    while not _log.opened_at:  # noqa: ASYNC110 - another process opens it
        await asyncio.sleep(LOOK_SECONDS)
    _opened_at = _log.opened_at
    return _opened_at
